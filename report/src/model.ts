// The data inside the page, as crates/report writes them (types.ts), and what is derived from them. Times that end in `_ps` are picoseconds.

import { DeviceClass, Page, StepView } from "./types";

export * from "./types";

/** The cost of an op in the simulated step: computation, communication in seconds, bytes sent. */
export interface OpCost {
  compute: number;
  comm: number;
  bytes: number;
}

/** The costs of all ops. Communication counts for the first op that needs it. */
export function opCosts(report: Page): OpCost[] {
  const step = report.steps[0]!;
  const costs = step.compute_ps.map((ps) => ({ compute: ps / 1e12, comm: 0, bytes: 0 }));
  for (const move of step.moves) {
    const cost = costs[move.to];
    if (cost) {
      cost.comm += move.ps / 1e12;
      cost.bytes += move.bytes;
    }
  }
  return costs;
}

/** The title of a step. */
export function stepTitle(step: StepView): string {
  const titles: Record<string, string> = { plan: "This plan", data: "Data parallelism", before: "First plan" };
  return titles[step.name] ?? step.name;
}

/** The device class with the largest memory peak. */
export function fullest(step: StepView): DeviceClass {
  return step.classes.reduce((a, b) => (b.peak_memory_bytes > a.peak_memory_bytes ? b : a));
}

/** The title of a device class. */
export function classTitle(own: DeviceClass): string {
  return own.size > 1 ? `device ${own.device} and ${own.size - 1} equal ones` : `device ${own.device}`;
}

/** A panel that is built later. */
export interface PanelSpec {
  id: string;
  title: string;
  make: () => HTMLElement;
}

export interface PageContent {
  title: string;
  about: string;
  parts: PanelSpec[];
  /** The answer in a sentence, above the panels. */
  verdict?: HTMLElement;
  /** The drawer over the panels. */
  drawer?: HTMLElement;
  /** Called once all panels are there. */
  ready?: () => void;
}

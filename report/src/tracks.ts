// The geometry of the timeline: rows of tracks, the bar at a point, the visible bars. This file does not draw.

import { BandView, classTitle, Page, StepView, stepTitle } from "./model";

export const TRACK = 22;
export const TITLE = 24;
export const AXIS = 24;
export const BAND = 14;

/** One track of one step. */
export interface Row {
  step: StepView;
  track: number;
  /** Distance from the top, in pixels. */
  y: number;
  label: string;
  /** Its bars: a range of indices. */
  first: number;
  last: number;
}

export interface Title {
  y: number;
  text: string;
}

/** The passes of a device class, above its computing. */
export interface BandRow {
  y: number;
  bands: BandView[];
  /** Where passes are named: across the updates and waits in between. */
  names: BandView[];
}

/** The bands of a device class, with the times in which it computes nothing and communicates. */
export function withWaits(step: StepView, own: number, bands: BandView[]): BandView[] {
  const { track, start, duration } = step.bars;
  const [busy, talking]: [[number, number][], [number, number][]] = [[], []];
  track.forEach((at, bar) => {
    const { class: group, level } = step.tracks[at]!;
    if (group === own && duration[bar]! > 0) (level === null ? busy : talking).push([start[bar]!, start[bar]! + duration[bar]!]);
  });
  const waits: BandView[] = [];
  let at = 0;
  for (const [from, to] of union(talking)) {
    let free = from;
    while (at > 0 && busy[at - 1]![1] > from) at--;
    while (at < busy.length && busy[at]![1] <= from) at++;
    for (; at < busy.length && busy[at]![0] < to; at++) {
      if (busy[at]![0] > free) waits.push(wait(free, busy[at]![0]));
      free = Math.max(free, busy[at]![1]);
    }
    if (free < to) waits.push(wait(free, to));
  }
  // Where a device waits, no pass is shown.
  return [...bands, ...waits];
}

/** Passes, joined where nothing but updates and recomputing is between them. */
function named(bands: BandView[]): BandView[] {
  const joined: BandView[] = [];
  for (const band of bands) {
    const last = joined[joined.length - 1];
    if (band.pass === "update" || band.pass === "recompute") continue;
    if (last && last.pass === band.pass && last.micro_batch === band.micro_batch) last.end_ps = band.end_ps;
    else joined.push({ ...band });
  }
  return joined;
}

function wait(start_ps: number, end_ps: number): BandView {
  return { pass: "communication", micro_batch: null, start_ps, end_ps };
}

/** Times, joined where they overlap. */
function union(times: [number, number][]): [number, number][] {
  const joined: [number, number][] = [];
  for (const [from, to] of [...times].sort((a, b) => a[0] - b[0])) {
    const last = joined[joined.length - 1];
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else joined.push([from, to]);
  }
  return joined;
}

/** All steps below each other. */
export function layOut(report: Page): { rows: Row[]; bands: BandRow[]; titles: Title[]; height: number } {
  const rows: Row[] = [];
  const bands: BandRow[] = [];
  const titles: Title[] = [];
  let y = AXIS;
  for (const step of report.steps) {
    let bar = 0;
    let own = -1;
    titles.push({ y, text: stepTitle(step) });
    y += TITLE;
    step.tracks.forEach((track, at) => {
      const group = step.classes[track.class];
      const title = group && step.classes.length > 1 && track.class !== own ? classTitle(group) : "";
      own = track.class;
      if (title) {
        titles.push({ y, text: `  ${title}` });
        y += TITLE;
      }
      if (track.level === null && group?.bands.length) {
        bands.push({ y, bands: withWaits(step, track.class, group.bands), names: named(group.bands) });
        y += BAND;
      }
      const first = bar;
      while (bar < step.bars.track.length && step.bars.track[bar] === at) bar++;
      const label = track.level === null ? "computing" : `${report.levels[track.level] ?? "?"} links`;
      rows.push({ step, track: at, y, label, first, last: bar });
      y += TRACK;
    });
    y += 8;
  }
  return { rows, bands, titles, height: y };
}

/** The first bar of a row that ends after a time; bars of a track do not overlap. */
export function firstAfter(row: Row, time: number): number {
  const { start, duration } = row.step.bars;
  let [low, high] = [row.first, row.last];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle]! + duration[middle]! > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The bar at a time, or the nearest one within a tolerance. */
export function barAt(row: Row, time: number, tolerance: number): number | null {
  const { start, duration } = row.step.bars;
  const bar = firstAfter(row, time);
  const misses = (at: number) => Math.max(start[at]! - time, time - start[at]! - duration[at]!, 0);
  const near = [bar - 1, bar].filter((at) => at >= row.first && at < row.last && misses(at) <= tolerance);
  return near.length ? near.reduce((a, b) => (misses(b) < misses(a) ? b : a)) : null;
}

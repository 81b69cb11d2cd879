// The page of `compare`: strategies side by side, by device count, and by memory limit.

import { bars, BarRow, tile } from "./bars";
import { COMPUTING, MOVE } from "./colours";
import { el, figures, panel } from "./dom";
import * as show from "./format";
import { Comparison, Row, PageContent, MemoryLimitRow, PanelSpec } from "./model";
import { even, plot, powersOfTwo, Series } from "./plot";

/** A row that has a plan. */
type PlannedRow = Row & { step_seconds: number; objective: number; peak_memory_bytes: number; traffic_bytes: number };

function planned<R extends Row>(rows: R[]): (R & PlannedRow)[] {
  return rows.filter((row): row is R & PlannedRow => row.step_seconds !== null);
}

const times = (value: number) => `${value >= 100 ? value.toFixed(0) : value.toFixed(2)}x`;

function solvers(data: Comparison): HTMLElement {
  const rows = planned(data.rows).sort((a, b) => a.step_seconds - b.step_seconds);
  const failed = data.rows.filter((row) => row.step_seconds === null);
  const best = rows[0];
  if (!best) return panel("solvers", "Strategies", "No strategy has a plan.", ...failed.map(failure));
  const own = rows.find((row) => row.solver === "auto") ?? best;
  const minMemory = rows.reduce((a, b) => (b.peak_memory_bytes < a.peak_memory_bytes ? b : a));
  const proved = rows.filter((row) => row.proved_optimal);
  const chart = (caption: string, colour: string, value: (row: PlannedRow) => number, text: (row: PlannedRow) => string, cap?: number) =>
    bars(caption, rows.map((row): BarRow => ({
      name: row.solver, own: row === own, parts: [{ value: value(row), colour, text: text(row) }], text: text(row),
    })), cap);
  return panel("solvers", "Strategies", "Same model, machine and cost model for all; sorted by simulated step time.",
    el("dl", { class: "tiles" },
      tile("shortest step time", show.seconds(best.step_seconds), best.solver),
      best.speedup_over_data === null ? el("span") : tile("speedup over data parallelism", `${best.speedup_over_data.toFixed(2)}x`, `${best.solver}, simulated`),
      tile("proved optimal", proved.length ? `${proved.length} of ${rows.length}` : "none", proved.length ? `${proved.map((row) => row.solver).join(", ")}: in their search spaces, without overlap` : "without overlap"),
      tile("min memory per device", show.bytes(minMemory.peak_memory_bytes), `${minMemory.solver}; memory of a device: ${show.bytes(data.device_memory_bytes)}`)),
    el("div", { class: "columns" },
      chart("Step time, simulated", COMPUTING.colour, (row) => row.step_seconds, (row) => show.seconds(row.step_seconds) + (row.speedup_over_data === null ? "" : ` (${times(row.speedup_over_data)})`), 4),
      chart("Step time without overlap (the proved objective)", "#8a8f98", (row) => row.objective, (row) => show.seconds(row.objective / 1e12) + (row.proved_optimal ? " proved" : ""), 4),
      chart("Memory per device", "#e69f00", (row) => row.peak_memory_bytes, (row) => show.bytes(row.peak_memory_bytes)),
      chart("Bytes sent per step, all devices", MOVE.colour, (row) => row.traffic_bytes, (row) => show.bytes(row.traffic_bytes), 10),
      chart("Search time", "#cc79a7", (row) => row.search_seconds, (row) => `${row.search_seconds.toFixed(2)} s`)),
    own.speedup_over_data === null ? null : el("p", { class: "about" }, "In parentheses: speedup over data parallelism. Bars with a cut end are longer than shown."),
    ...failed.map(failure));
}

function failure(row: Row): HTMLElement {
  return el("p", { class: "about" }, `${row.solver}: ${row.failure ?? "no result"}`);
}

function scaling(data: Comparison): HTMLElement {
  const points = [...data.scaling!].sort((a, b) => a.devices - b.devices);
  const first = points.find((point) => planned(point.rows).length > 0);
  const about = "Smaller counts use the first devices of the machine.";
  if (!first) return panel("scaling", "Device counts", `${about} No strategy has a plan.`);
  const names = data.rows.map((row) => row.solver).filter((name) => points.some((point) => point.rows.some((row) => row.solver === name)));
  const base = Math.min(...planned(first.rows).map((row) => row.step_seconds)) / (first.batch ?? 1);
  const speed = (step: number, batch: number | null) => (base * (batch ?? 1)) / step;
  const grows = points.some((point) => point.batch !== first.batch);
  const many = show.count(first.devices, "device");
  const series = (value: (row: PlannedRow, batch: number | null) => number, text: (own: number) => string): Series[] =>
    names.map((name, look) => ({
      text: name, look, line: "straight",
      points: points.flatMap((point) => planned(point.rows).filter((row) => row.solver === name).map((row) => {
        const y = value(row, point.batch);
        return { x: point.devices, y, text: `${show.count(point.devices, "device")}: ${text(y)}` };
      })),
    }));
  const speeds = series((row, batch) => speed(row.step_seconds, batch), times);
  const held = series((row) => row.peak_memory_bytes, show.bytes);
  const values = (all: Series[]) => all.flatMap((own) => own.points.map((point) => point.y));
  const counts = points.map((point) => point.devices);
  const x = { ...powersOfTwo("devices", counts, String), ticks: counts };
  const last = counts[counts.length - 1]!;
  const ideal = { text: `Thin line: linear speedup.`, points: [[first.devices, 1], [last, last / first.devices]] as [number, number][] };
  const cell = (point: (typeof points)[number], name: string) => {
    const row = planned(point.rows).find((own) => own.solver === name);
    return row ? show.seconds(row.step_seconds) : "-";
  };
  return panel("scaling", "Device counts",
    `${about} ${grows ? "The batch grows with the devices; speedup is in samples per second." : "The batch is the same for all."} Speedups are over the best plan on ${many}.`,
    el("div", { class: "columns" },
      plot("speedup by device count", x, powersOfTwo("speedup", [...values(speeds), 1, last / first.devices], (own) => `${Number(own.toPrecision(3))}x`), speeds, ideal),
      plot("memory per device by device count", x, powersOfTwo("memory per device", values(held), (own) => show.tickBytes(own, own / 10), 1e9), held)),
    figures("Simulated step time by device count", ["devices", ...(first.batch === null ? [] : ["batch"]), ...names],
      points.map((point) => ({ cells: [String(point.devices), ...(first.batch === null ? [] : [String(point.batch)]), ...names.map((name) => cell(point, name))] }))));
}

function pareto(data: Comparison): HTMLElement {
  const all = data.pareto!;
  const plans = planned(all);
  const front = plans.filter((plan) => plan.on_front).sort((a, b) => a.peak_memory_bytes - b.peak_memory_bytes);
  const about = "The best plan of any variant (micro-batches, recomputation) that auto finds under each memory limit, from the minimum memory to that of the fastest plan.";
  if (!front.length) return panel("pareto", "Step time and memory", `${about} No plan was found.`);
  // A distant plan would flatten the front; it is listed as text instead.
  const close = (value: (row: PlannedRow) => number) => {
    const [low, high] = [Math.min(...plans.map(value)), Math.max(...plans.map(value))];
    return (row: PlannedRow) => value(row) <= high + Math.max(high - low, 0.01 * high);
  };
  const [fast, lean] = [close((row) => row.step_seconds), close((row) => row.peak_memory_bytes)];
  const text = (row: PlannedRow) => `${show.bytes(row.peak_memory_bytes)}, ${show.seconds(row.step_seconds)}`;
  const others = planned(data.rows).filter((row) => row.solver !== "auto");
  const near = others.filter((row) => fast(row) && lean(row));
  const far = others.filter((row) => !near.includes(row)).map((row) => `${row.solver} (${text(row)})`);
  const at = (row: PlannedRow, hollow = false) => ({ x: row.peak_memory_bytes, y: row.step_seconds, text: text(row), hollow });
  const beaten = plans.filter((plan) => !plan.on_front);
  const series: Series[] = [
    { text: "auto, by memory limit", look: 0, line: "steps", points: front.map((plan) => at(plan)) },
    ...(beaten.length ? [{ text: "auto, dominated by another limit's plan", look: 0, line: "none" as const, points: beaten.map((plan) => at(plan, true)) }] : []),
    ...near.map((row, own): Series => ({ text: row.solver, look: own + 1, line: "none", points: [at(row)] })),
  ];
  const shown = series.flatMap((own) => own.points);
  const limit = (plan: MemoryLimitRow) => (plan.memory_limit_bytes === null ? "none" : show.bytes(plan.memory_limit_bytes));
  return panel("pareto", "Step time and memory", about,
    el("div", { class: "columns" },
      el("div", {}, plot("step time by memory per device",
        even("memory per device", shown.map((point) => point.x), show.tickBytes),
        even("simulated step time", shown.map((point) => point.y), show.tickSeconds), series),
      far.length ? el("p", { class: "about" }, `Outside the plot: ${far.join(", ")}.`) : null),
      figures("Cost of a memory limit", ["memory limit", "peak memory", "step time", "without overlap", "micro-batches", "recompute", "search time"],
        all.map((plan) => {
          const [row] = planned([plan]);
          return { own: plan.memory_limit_bytes === null, cells: row
            ? [limit(plan), show.bytes(row.peak_memory_bytes), show.seconds(row.step_seconds) + (plan.on_front ? "" : " *"), show.seconds(row.objective / 1e12) + (row.proved_optimal ? " proved" : ""), String(row.micro_batches ?? 1), row.recompute ?? "off", `${row.search_seconds.toFixed(2)} s`]
            : [limit(plan), "-", "-", "-", "-", "-", "-"] };
        }))),
    beaten.length ? el("p", { class: "about" }, "* dominated: another plan is as fast and needs no more memory. The search minimises the step time without overlap, not the simulated one.") : null,
    ...all.filter((plan) => plan.failure).map((plan) => el("p", { class: "about" }, `${limit(plan)}: ${plan.failure}`)));
}

export function comparison(data: Comparison): PageContent {
  const notes = () => panel("notes", "Notes", "", el("ul", {}, ...data.notes.map((note) => el("li", {}, note))));
  const parts: (PanelSpec | null)[] = [
    { id: "solvers", title: "Strategies", make: () => solvers(data) },
    data.scaling?.length ? { id: "scaling", title: "Device counts", make: () => scaling(data) } : null,
    data.pareto?.length ? { id: "pareto", title: "Step time and memory", make: () => pareto(data) } : null,
    { id: "notes", title: "Notes", make: notes },
  ];
  return { title: `${data.model} on ${data.machine}`, about: `devices: ${data.devices}; comparison of strategies`, parts: parts.filter((part) => part !== null) };
}

// The page of `compare`: strategies side by side, over device counts, and over limits of memory.

import { bars, BarRow, tile } from "./bars";
import { COMPUTING, MOVE } from "./colours";
import { el, figures, panel } from "./dom";
import * as show from "./format";
import { Comparison, ComparisonRow, Content, Limited, Part } from "./model";
import { even, plot, powersOfTwo, Series } from "./plot";

/** A row that has a plan. */
type Planned = ComparisonRow & { step_seconds: number; objective: number; peak_memory_bytes: number; traffic_bytes: number };

function planned<R extends ComparisonRow>(rows: R[]): (R & Planned)[] {
  return rows.filter((row): row is R & Planned => row.step_seconds !== null);
}

const times = (value: number) => `${value >= 100 ? value.toFixed(0) : value.toFixed(2)}x`;

function solvers(data: Comparison): HTMLElement {
  const rows = planned(data.rows).sort((a, b) => a.step_seconds - b.step_seconds);
  const failed = data.rows.filter((row) => row.step_seconds === null);
  const best = rows[0];
  if (!best) return panel("solvers", "Strategies", "No strategy has a plan.", ...failed.map(failure));
  const own = rows.find((row) => row.solver === "auto") ?? best;
  const lean = rows.reduce((a, b) => (b.peak_memory_bytes < a.peak_memory_bytes ? b : a));
  const proved = rows.filter((row) => row.proved_optimal);
  const chart = (caption: string, colour: string, value: (row: Planned) => number, text: (row: Planned) => string, cap?: number) =>
    bars(caption, rows.map((row): BarRow => ({
      name: row.solver, own: row === own, parts: [{ value: value(row), colour, text: text(row) }], text: text(row),
    })), cap);
  return panel("solvers", "Strategies", "All on the same model, machine and cost model; shortest simulated step first.",
    el("dl", { class: "tiles" },
      tile("shortest step", show.seconds(best.step_seconds), best.solver),
      best.speedup_over_data === null ? el("span") : tile("against data parallelism", `${best.speedup_over_data.toFixed(2)}x as fast`, `${best.solver}, in the simulated step`),
      tile("proved optimal", proved.length ? `${proved.length} of ${rows.length}` : "none", proved.length ? `${proved.map((row) => row.solver).join(", ")}: in their spaces, if nothing overlapped` : "if nothing overlapped"),
      tile("leanest", show.bytes(lean.peak_memory_bytes), `${lean.solver}; a device has ${show.bytes(data.device_memory_bytes)}`)),
    el("div", { class: "columns" },
      chart("Time of a step, simulated", COMPUTING.colour, (row) => row.step_seconds, (row) => show.seconds(row.step_seconds) + (row.speedup_over_data === null ? "" : ` (${times(row.speedup_over_data)})`), 4),
      chart("The same if nothing overlapped: what proofs speak of", "#8a8f98", (row) => row.objective, (row) => show.seconds(row.objective / 1e12) + (row.proved_optimal ? " proved" : ""), 4),
      chart("Memory per device", "#e69f00", (row) => row.peak_memory_bytes, (row) => show.bytes(row.peak_memory_bytes)),
      chart("Sent per step, all devices together", MOVE.colour, (row) => row.traffic_bytes, (row) => show.bytes(row.traffic_bytes), 10),
      chart("Time of the search", "#cc79a7", (row) => row.search_seconds, (row) => `${row.search_seconds.toFixed(2)} s`)),
    own.speedup_over_data === null ? null : el("p", { class: "about" }, "In brackets: how many times as fast as data parallelism. Bars that are cut are longer than there is room for."),
    ...failed.map(failure));
}

function failure(row: ComparisonRow): HTMLElement {
  return el("p", { class: "about" }, `${row.solver}: ${row.failure ?? "no result"}`);
}

function scaling(data: Comparison): HTMLElement {
  const points = [...data.scaling!].sort((a, b) => a.devices - b.devices);
  const first = points.find((point) => planned(point.rows).length > 0);
  const about = "Fewer devices are the machine's first ones.";
  if (!first) return panel("scaling", "Device counts", `${about} No strategy has a plan.`);
  const names = data.rows.map((row) => row.solver).filter((name) => points.some((point) => point.rows.some((row) => row.solver === name)));
  const base = Math.min(...planned(first.rows).map((row) => row.step_seconds)) / (first.batch ?? 1);
  const speed = (step: number, batch: number | null) => (base * (batch ?? 1)) / step;
  const grows = points.some((point) => point.batch !== first.batch);
  const many = show.count(first.devices, "device");
  const series = (value: (row: Planned, batch: number | null) => number, text: (own: number) => string): Series[] =>
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
  const ideal = { text: `The thin line: speed grows as the number of devices does.`, points: [[first.devices, 1], [last, last / first.devices]] as [number, number][] };
  const cell = (point: (typeof points)[number], name: string) => {
    const row = planned(point.rows).find((own) => own.solver === name);
    return row ? show.seconds(row.step_seconds) : "-";
  };
  return panel("scaling", "Device counts",
    `${about} ${grows ? "The batch grows with the devices, so speed is samples per second." : "The batch is the same for all."} Speed is against the best plan on ${many}.`,
    el("div", { class: "columns" },
      plot("speed over device counts", x, powersOfTwo("speed", [...values(speeds), 1, last / first.devices], (own) => `${Number(own.toPrecision(3))}x`), speeds, ideal),
      plot("memory per device over device counts", x, powersOfTwo("memory per device", values(held), (own) => show.tickBytes(own, own / 10), 1e9), held)),
    figures("Simulated step by device count", ["devices", ...(first.batch === null ? [] : ["batch"]), ...names],
      points.map((point) => ({ cells: [String(point.devices), ...(first.batch === null ? [] : [String(point.batch)]), ...names.map((name) => cell(point, name))] }))));
}

function pareto(data: Comparison): HTMLElement {
  const all = data.pareto!;
  const plans = planned(all);
  const front = plans.filter((plan) => plan.on_front).sort((a, b) => a.peak_memory_bytes - b.peak_memory_bytes);
  const about = "The best plan that auto finds under each limit of memory, from what the leanest plan holds to what the fastest one does.";
  if (!front.length) return panel("pareto", "Time against memory", `${about} There is none.`);
  // A plan far off would flatten the front; it is named instead.
  const close = (value: (row: Planned) => number) => {
    const [low, high] = [Math.min(...plans.map(value)), Math.max(...plans.map(value))];
    return (row: Planned) => value(row) <= high + Math.max(high - low, 0.01 * high);
  };
  const [fast, lean] = [close((row) => row.step_seconds), close((row) => row.peak_memory_bytes)];
  const text = (row: Planned) => `${show.bytes(row.peak_memory_bytes)}, ${show.seconds(row.step_seconds)}`;
  const others = planned(data.rows).filter((row) => row.solver !== "auto");
  const near = others.filter((row) => fast(row) && lean(row));
  const far = others.filter((row) => !near.includes(row)).map((row) => `${row.solver} (${text(row)})`);
  const at = (row: Planned, hollow = false) => ({ x: row.peak_memory_bytes, y: row.step_seconds, text: text(row), hollow });
  const beaten = plans.filter((plan) => !plan.on_front);
  const series: Series[] = [
    { text: "auto under limits", look: 0, line: "steps", points: front.map((plan) => at(plan)) },
    ...(beaten.length ? [{ text: "auto, but another limit's plan is as fast and as lean", look: 0, line: "none" as const, points: beaten.map((plan) => at(plan, true)) }] : []),
    ...near.map((row, own): Series => ({ text: row.solver, look: own + 1, line: "none", points: [at(row)] })),
  ];
  const shown = series.flatMap((own) => own.points);
  const limit = (plan: Limited) => (plan.memory_limit_bytes === null ? "none" : show.bytes(plan.memory_limit_bytes));
  return panel("pareto", "Time against memory", about,
    el("div", { class: "columns" },
      el("div", {}, plot("step against memory per device",
        even("memory per device", shown.map((point) => point.x), show.tickBytes),
        even("simulated step", shown.map((point) => point.y), show.tickSeconds), series),
      far.length ? el("p", { class: "about" }, `Out of the picture: ${far.join(", ")}.`) : null),
      figures("What a limit costs", ["memory limit", "held", "step", "if nothing overlapped", "search"],
        all.map((plan) => {
          const [row] = planned([plan]);
          return { own: plan.memory_limit_bytes === null, cells: row
            ? [limit(plan), show.bytes(row.peak_memory_bytes), show.seconds(row.step_seconds) + (plan.on_front ? "" : " *"), show.seconds(row.objective / 1e12) + (row.proved_optimal ? " proved" : ""), `${row.search_seconds.toFixed(2)} s`]
            : [limit(plan), "-", "-", "-", "-"] };
        }))),
    beaten.length ? el("p", { class: "about" }, "* another plan here is as fast and as lean: what is made small under a limit is the sum, where nothing overlaps.") : null,
    ...all.filter((plan) => plan.failure).map((plan) => el("p", { class: "about" }, `${limit(plan)}: ${plan.failure}`)));
}

export function comparison(data: Comparison): Content {
  const notes = () => panel("notes", "Notes", "", el("ul", {}, ...data.notes.map((note) => el("li", {}, note))));
  const parts: (Part | null)[] = [
    { id: "solvers", title: "Strategies", make: () => solvers(data) },
    data.scaling?.length ? { id: "scaling", title: "Device counts", make: () => scaling(data) } : null,
    data.pareto?.length ? { id: "pareto", title: "Time against memory", make: () => pareto(data) } : null,
    { id: "notes", title: "Notes", make: notes },
  ];
  return { title: `${data.model} on ${data.machine}`, about: `${show.count(data.devices, "device")}, strategies compared`, parts: parts.filter((part) => part !== null) };
}

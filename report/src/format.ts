// Numbers with units, formatted as on the command line.

export function seconds(value: number): string {
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(2)} ms`;
  return `${(value * 1e6).toFixed(1)} us`;
}

export function bytes(value: number): string {
  if (value >= 1e15) return `${(value / 1e15).toFixed(2)} PB`;
  if (value >= 1e12) return `${(value / 1e12).toFixed(2)} TB`;
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} GB`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)} kB`;
  return `${value} B`;
}

/** A name of at most so many characters: its end says more than its middle. */
export function shortened(name: string, most: number): string {
  if (name.length <= most) return name;
  const head = Math.max(2, Math.floor(most / 5));
  return `${name.slice(0, head)}…${name.slice(name.length - Math.max(most - head - 1, 1))}`;
}

/** A rate as people read it: `12,345`, or with decimals below 100. */
export function rate(value: number): string {
  return value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString("en-US");
}

/** A whole number with commas. */
export function number(value: number): string {
  return value.toLocaleString("en-US");
}

/** The same, with zero as a plain 0. */
export function orZero(text: (value: number) => string): (value: number) => string {
  return (value) => (value === 0 ? "0" : text(value));
}

export function percent(share: number): string {
  return `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)}%`;
}

export function count(value: number, noun: string): string {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A rate of arithmetic. */
export function flops(value: number): string {
  const [scale, unit] = value >= 1e15 ? [1e15, "PFLOP/s"] : value >= 1e12 ? [1e12, "TFLOP/s"] : value >= 1e9 ? [1e9, "GFLOP/s"] : value >= 1e6 ? [1e6, "MFLOP/s"] : [1e3, "kFLOP/s"];
  return `${Number((value / scale).toPrecision(3))} ${unit}`;
}

/** About `most` round numbers from 0 up to `end`, for the ticks of an axis. */
export function ticks(from: number, end: number, most: number): number[] {
  const rough = (end - from) / Math.max(most, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? 10 * power;
  const all: number[] = [];
  for (let at = Math.ceil(from / step); at * step <= end * (1 + 1e-12); at++) all.push(at * step);
  return all;
}

/** A tick's label, with as many digits as the distance between ticks requires. */
export function tickSeconds(value: number, step: number): string {
  if (value === 0) return "0";
  const [scale, unit] = value >= 1 || step >= 1 ? [1, "s"] : step >= 1e-4 ? [1e3, "ms"] : step >= 1e-7 ? [1e6, "us"] : [1e9, "ns"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step * scale) - 1e-9));
  return `${(value * scale).toFixed(Math.min(digits, 6))} ${unit}`;
}

/** The same for bytes. */
export function tickBytes(value: number, step: number): string {
  if (value === 0) return "0";
  const [scale, unit] = value >= 1e12 ? [1e12, "TB"] : value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  return `${Number((value / scale).toFixed(Math.min(digits, 6)))} ${unit}`;
}

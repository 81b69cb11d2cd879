// The geometry of the timeline: rows of tracks, the bar at a point, the visible bars. This file does not draw.

import { Band, classTitle, Report, Step, stepTitle } from "./model";

export const TRACK = 22;
export const TITLE = 24;
export const AXIS = 24;
export const BAND = 14;

/** One track of one step. */
export interface Row {
  step: Step;
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
  bands: Band[];
}

/** All steps below each other. */
export function layOut(report: Report): { rows: Row[]; bands: BandRow[]; titles: Title[]; height: number } {
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
      if (track.level === null && group?.bands?.length) {
        bands.push({ y, bands: group.bands });
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

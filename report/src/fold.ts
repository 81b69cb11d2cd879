// Finds repeated blocks (a transformer's layers), which are shown once. This file does not draw.

/** A run of rows that repeats: `times` repetitions of `length` rows from `first` on. */
export interface Fold {
  first: number;
  length: number;
  times: number;
}

const MOST_ROWS = 400;

/** Finds runs of at least two repetitions in a sequence of signatures, from the front, the longest run first. */
export function findFolds(signatures: string[]): Fold[] {
  const ids = new Map<string, number>();
  const rows = signatures.map((text) => ids.get(text) ?? (ids.set(text, ids.size), ids.size - 1));
  const folds: Fold[] = [];
  let at = 0;
  while (at < rows.length) {
    let best: Fold | null = null;
    for (let length = 1; length <= MOST_ROWS && at + 2 * length <= rows.length; length++) {
      let same = 0;
      while (at + length + same < rows.length && rows[at + same] === rows[at + length + same]) same++;
      const times = 1 + Math.floor(same / length);
      if (times >= 2 && length * times > (best ? best.length * best.times : 3)) best = { first: at, length, times };
    }
    if (best) folds.push(best);
    at += best ? best.length * best.times : 1;
  }
  return folds;
}

/** A module that is a block by its name and number: the innermost one is repeated (`layer3.block6.conv1`). */
const NAMED_BLOCK = /^(.*(?:^|[. ])(?:block|cell|layer|stage|unit)_?)\d+(?=\.)/;

/**
 * A name with `*` for the numbers of blocks: `blocks.3.mlp.up` as `blocks.*.mlp.up`, `layer3.block6.conv1` as `layer3.block*.conv1`. A number
 * at the end is no block's.
 */
export function ofBlocks(name: string): string {
  const numbers = name.replace(/(^|[. ])\d+(?=\.)/g, "$1*");
  return numbers === name ? name.replace(NAMED_BLOCK, "$1*") : numbers;
}

/** A name without its numbers: equal for the same layer of all blocks. */
export function pattern(name: string): string {
  return name.replace(/\d+/g, "#");
}

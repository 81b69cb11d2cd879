//! Tables that are shared, and answers that are kept.
//!
//! Networks of deep models repeat themselves: a hundred equal blocks have equal tables, and the reductions would ask
//! every question about them a hundred times. A [`Memo`] makes equal tables one and remembers what came of turning,
//! cutting, adding and eliminating with them, so that what repeats is worked out once. It never changes an answer.

use super::kernel::min_sum;
use super::model::{INF, add, transpose};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The cells of a pairwise table, row-major; `INF` where forbidden.
pub type Table = Arc<Vec<i64>>;

/// Cells that a memo may hold on to, 8 bytes each; beyond it everything is forgotten.
const MOST_CELLS: usize = 1 << 25;
/// The part of a solver's memory that a memo may have.
const SHARE: u64 = 4;

/// A table as a key: the same one, not an equal one. Holds on to it, so that no other gets its address.
#[derive(Clone, Debug)]
pub struct Same(pub Table);

impl PartialEq for Same {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Same {}

impl Hash for Same {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(Arc::as_ptr(&self.0).addr());
    }
}

/// What a table is like.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Nothing is forbidden.
    pub finite: bool,
    /// Every cell is the sum of a term of its row and a term of its column.
    pub separable: bool,
}

/// A variable's cost and its tables, its own values major: what says which of its values are dominated.
type Surroundings = (Vec<i64>, Vec<Same>);

/// Remembers tables and answers; see the module's text.
#[derive(Debug)]
pub struct Memo {
    /// Cells that are held on to at most; none if nothing is remembered.
    most: usize,
    cells: usize,
    /// By a hash of the cells.
    tables: FxHashMap<u64, Vec<Table>>,
    /// By table and number of columns, here and below.
    turned: FxHashMap<(Same, usize), Table>,
    facts: FxHashMap<(Same, usize), Facts>,
    /// Rows (true) or columns taken out.
    kept: FxHashMap<(Same, usize, bool, Vec<bool>), Table>,
    sums: FxHashMap<(Same, Same), Table>,
    eliminated: FxHashMap<(Vec<i64>, Same, Same), Table>,
    undominated: FxHashMap<Surroundings, Option<Vec<bool>>>,
}

impl Memo {
    /// One that knows nothing yet.
    pub fn new() -> Self {
        Self::of(MOST_CELLS)
    }

    /// The same, for a solver that may hold so many bytes.
    pub fn within(memory_bytes: u64) -> Self {
        Self::of(MOST_CELLS.min((memory_bytes / (8 * SHARE)) as usize))
    }

    /// One that remembers nothing: for small changes, which it would not pay for.
    pub fn off() -> Self {
        Self::of(0)
    }

    fn of(most: usize) -> Self {
        Memo {
            most,
            cells: 0,
            tables: FxHashMap::default(),
            turned: FxHashMap::default(),
            facts: FxHashMap::default(),
            kept: FxHashMap::default(),
            sums: FxHashMap::default(),
            eliminated: FxHashMap::default(),
            undominated: FxHashMap::default(),
        }
    }

    fn is_off(&self) -> bool {
        self.most == 0
    }

    fn forget_if_full(&mut self, more: usize) {
        self.cells += more;
        if self.cells > self.most {
            *self = Memo { cells: more, ..Self::of(self.most) };
        }
    }

    /// The table with these cells.
    pub fn table(&mut self, cells: Vec<i64>) -> Table {
        if self.is_off() {
            return Arc::new(cells);
        }
        let mut hasher = FxHasher::default();
        cells.iter().for_each(|&c| hasher.write_i64(c));
        let hash = hasher.finish();
        if let Some(known) = self.tables.get(&hash).into_iter().flatten().find(|known| ***known == cells) {
            return known.clone();
        }
        self.forget_if_full(cells.len());
        let table = Arc::new(cells);
        self.tables.entry(hash).or_default().push(table.clone());
        table
    }

    /// The transpose of a table of so many columns.
    pub fn turned(&mut self, table: &Table, columns: usize) -> Table {
        let key = (Same(table.clone()), columns);
        if let Some(known) = self.turned.get(&key) {
            return known.clone();
        }
        let turned = self.table(transpose(table, table.len() / columns.max(1), columns));
        if !self.is_off() {
            self.turned.insert(key, turned.clone());
        }
        turned
    }

    /// A table with only some of its rows, or columns.
    pub fn kept(&mut self, table: &Table, columns: usize, rows: bool, keep: &[bool]) -> Table {
        let key = (Same(table.clone()), columns, rows, keep.to_vec());
        if let Some(known) = self.kept.get(&key) {
            return known.clone();
        }
        let lines = table.chunks_exact(columns.max(1));
        let cells = if rows {
            lines.zip(keep).filter(|(_, keep)| **keep).flat_map(|(row, _)| row).copied().collect()
        } else {
            lines.flat_map(|row| row.iter().zip(keep).filter(|(_, keep)| **keep)).map(|(&c, _)| c).collect()
        };
        let kept = self.table(cells);
        if !self.is_off() {
            self.kept.insert(key, kept.clone());
        }
        kept
    }

    /// Two tables added up cell by cell.
    pub fn sum(&mut self, a: &Table, b: &Table) -> Table {
        let key = (Same(a.clone()), Same(b.clone()));
        if let Some(known) = self.sums.get(&key) {
            return known.clone();
        }
        let sum = self.table(a.iter().zip(&**b).map(|(&x, &y)| add(x, y)).collect());
        if !self.is_off() {
            self.sums.insert(key, sum.clone());
        }
        sum
    }

    /// What eliminating a variable leaves between its two neighbours, given its costs and its tables with them, its own
    /// values major.
    pub fn eliminated(&mut self, unary: &[i64], a: &Table, b: &Table) -> Table {
        let key = (unary.to_vec(), Same(a.clone()), Same(b.clone()));
        if let Some(known) = self.eliminated.get(&key) {
            return known.clone();
        }
        let left = self.table(min_sum(unary, a, b));
        if !self.is_off() {
            self.eliminated.insert(key, left.clone());
        }
        left
    }

    /// What a table of so many columns is like.
    pub fn facts(&mut self, table: &Table, columns: usize) -> Facts {
        let key = (Same(table.clone()), columns);
        if let Some(&known) = self.facts.get(&key) {
            return known;
        }
        let finite = table.iter().all(|&c| c < INF);
        let facts = Facts { finite, separable: finite && separable(table, columns) };
        if !self.is_off() {
            self.facts.insert(key, facts);
        }
        facts
    }

    /// Which values of a variable are not dominated, `None` if all: worked out unless its costs and tables are known.
    pub fn undominated(
        &mut self,
        unary: &[i64],
        tables: &[Table],
        work_out: impl FnOnce() -> Option<Vec<bool>>,
    ) -> Option<Vec<bool>> {
        if self.is_off() {
            return work_out();
        }
        let key = (unary.to_vec(), tables.iter().cloned().map(Same).collect());
        self.undominated.entry(key).or_insert_with(work_out).clone()
    }
}

fn separable(table: &[i64], columns: usize) -> bool {
    let Some(first) = table.get(..columns) else { return true };
    table
        .chunks_exact(columns)
        .all(|row| row.iter().zip(first).all(|(&c, &above)| c - row[0] == above - first[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_tables_are_one_and_questions_are_asked_once() {
        let mut memo = Memo::new();
        let table = memo.table(vec![1, 2, 3, 4, 5, 7]);
        assert!(Arc::ptr_eq(&table, &memo.table(vec![1, 2, 3, 4, 5, 7])));
        let turned = memo.turned(&table, 3);
        assert_eq!(*turned, [1, 4, 2, 5, 3, 7]);
        assert!(Arc::ptr_eq(&turned, &memo.turned(&table, 3)));
        // The same cells in another shape are another question.
        assert_eq!(*memo.turned(&table, 2), [1, 3, 5, 2, 4, 7]);
        assert_eq!(*memo.kept(&table, 3, true, &[false, true]), [4, 5, 7]);
        assert_eq!(*memo.kept(&table, 3, false, &[true, false, true]), [1, 3, 4, 7]);
        assert!(!memo.facts(&table, 3).separable && memo.facts(&table, 3).finite);
        let sums = memo.table(vec![1, 2, 11, 12]);
        assert!(memo.facts(&sums, 2).separable);
        let mut asked = 0;
        for _ in 0..2 {
            memo.undominated(&[0, 0], std::slice::from_ref(&table), || {
                asked += 1;
                None
            });
        }
        assert_eq!(asked, 1);
    }

    #[test]
    fn a_full_memo_forgets_and_goes_on() {
        let mut memo = Memo::of(10);
        let table = memo.table(vec![7; 9]);
        assert!(Arc::ptr_eq(&table, &memo.table(vec![7; 9])));
        assert_eq!(*memo.table(vec![7; 2]), [7, 7]);
        assert!(!Arc::ptr_eq(&table, &memo.table(vec![7; 9])));
    }
}

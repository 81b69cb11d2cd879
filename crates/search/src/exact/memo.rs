//! Shared tables and cached results of table operations.
//!
//! Networks of deep models repeat themselves: a hundred equal blocks have equal tables. A [`TableMemo`] stores equal tables
//! once and caches their transposes, restrictions, sums and eliminations, so that repeated operations run once. It never
//! changes a result.

use super::kernel::min_sum;
use super::model::{INF, add, transpose};
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The cells of a pairwise table, row-major; `INF` where forbidden.
pub type Table = Arc<Vec<i64>>;

/// The most cells of a memo, 8 bytes each. Beyond it the memo is emptied.
const MOST_CELLS: usize = 1 << 25;
/// A memo may take one part in this number of a solver's memory.
const SHARE: u64 = 4;

/// A table as a key, compared by address. Keeps the table alive, so that no other gets its address.
#[derive(Clone, Debug)]
pub struct TableIdentity(pub Table);

impl PartialEq for TableIdentity {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for TableIdentity {}

impl Hash for TableIdentity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(Arc::as_ptr(&self.0).addr());
    }
}

/// Properties of a table.
#[derive(Clone, Copy, Debug)]
pub struct TableProperties {
    /// Nothing is forbidden.
    pub finite: bool,
    /// Every cell is the sum of a term of its row and a term of its column.
    pub separable: bool,
}

/// A variable's costs and its tables, its own values major. They determine which of its values are dominated.
type VariableCosts = (Vec<i64>, Vec<TableIdentity>);

/// Shared tables and cached results; see the module's documentation.
#[derive(Debug)]
pub struct TableMemo {
    /// The most cells; zero if nothing is cached.
    most: usize,
    cells: usize,
    /// By a hash of the cells.
    tables: FxHashMap<u64, Vec<Table>>,
    /// By table and number of columns, here and below.
    transposed: FxHashMap<(TableIdentity, usize), Table>,
    properties: FxHashMap<(TableIdentity, usize), TableProperties>,
    /// Rows (true) or columns taken out.
    restricted: FxHashMap<(TableIdentity, usize, bool, Vec<bool>), Table>,
    sums: FxHashMap<(TableIdentity, TableIdentity), Table>,
    eliminated: FxHashMap<(Vec<i64>, TableIdentity, TableIdentity), Table>,
    undominated: FxHashMap<VariableCosts, Option<Vec<bool>>>,
}

impl TableMemo {
    /// An empty memo.
    pub fn new() -> Self {
        Self::of(MOST_CELLS)
    }

    /// An empty memo for a solver with this memory limit.
    pub fn within(memory_bytes: u64) -> Self {
        Self::of(MOST_CELLS.min((memory_bytes / (8 * SHARE)) as usize))
    }

    /// A memo without cache, for small changes that do not repay its cost.
    pub fn off() -> Self {
        Self::of(0)
    }

    fn of(most: usize) -> Self {
        TableMemo {
            most,
            cells: 0,
            tables: FxHashMap::default(),
            transposed: FxHashMap::default(),
            properties: FxHashMap::default(),
            restricted: FxHashMap::default(),
            sums: FxHashMap::default(),
            eliminated: FxHashMap::default(),
            undominated: FxHashMap::default(),
        }
    }

    fn is_off(&self) -> bool {
        self.most == 0
    }

    fn clear_if_full(&mut self, more: usize) {
        self.cells += more;
        if self.cells > self.most {
            *self = TableMemo { cells: more, ..Self::of(self.most) };
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
        self.clear_if_full(cells.len());
        let table = Arc::new(cells);
        self.tables.entry(hash).or_default().push(table.clone());
        table
    }

    /// The transpose of a table of `columns` columns.
    pub fn transposed(&mut self, table: &Table, columns: usize) -> Table {
        let key = (TableIdentity(table.clone()), columns);
        if let Some(known) = self.transposed.get(&key) {
            return known.clone();
        }
        let transposed = self.table(transpose(table, table.len() / columns.max(1), columns));
        if !self.is_off() {
            self.transposed.insert(key, transposed.clone());
        }
        transposed
    }

    /// A table with only some of its rows, or columns.
    pub fn restricted(&mut self, table: &Table, columns: usize, rows: bool, keep: &[bool]) -> Table {
        let key = (TableIdentity(table.clone()), columns, rows, keep.to_vec());
        if let Some(known) = self.restricted.get(&key) {
            return known.clone();
        }
        let lines = table.chunks_exact(columns.max(1));
        let cells = if rows {
            lines.zip(keep).filter(|(_, keep)| **keep).flat_map(|(row, _)| row).copied().collect()
        } else {
            lines.flat_map(|row| row.iter().zip(keep).filter(|(_, keep)| **keep)).map(|(&c, _)| c).collect()
        };
        let restricted = self.table(cells);
        if !self.is_off() {
            self.restricted.insert(key, restricted.clone());
        }
        restricted
    }

    /// The sum of two tables, cell by cell.
    pub fn sum(&mut self, a: &Table, b: &Table) -> Table {
        let key = (TableIdentity(a.clone()), TableIdentity(b.clone()));
        if let Some(known) = self.sums.get(&key) {
            return known.clone();
        }
        let sum = self.table(a.iter().zip(&**b).map(|(&x, &y)| add(x, y)).collect());
        if !self.is_off() {
            self.sums.insert(key, sum.clone());
        }
        sum
    }

    /// The table between a variable's two neighbours after its elimination, given its costs and its tables with them, its
    /// own values major.
    pub fn eliminated(&mut self, unary: &[i64], a: &Table, b: &Table) -> Table {
        let key = (unary.to_vec(), TableIdentity(a.clone()), TableIdentity(b.clone()));
        if let Some(known) = self.eliminated.get(&key) {
            return known.clone();
        }
        let left = self.table(min_sum(unary, a, b));
        if !self.is_off() {
            self.eliminated.insert(key, left.clone());
        }
        left
    }

    /// The properties of a table of `columns` columns.
    pub fn properties(&mut self, table: &Table, columns: usize) -> TableProperties {
        let key = (TableIdentity(table.clone()), columns);
        if let Some(&known) = self.properties.get(&key) {
            return known;
        }
        let finite = table.iter().all(|&c| c < INF);
        let properties = TableProperties { finite, separable: finite && separable(table, columns) };
        if !self.is_off() {
            self.properties.insert(key, properties);
        }
        properties
    }

    /// Which values of a variable are not dominated, `None` if all. Calls `compute` unless the result is cached.
    pub fn undominated(
        &mut self,
        unary: &[i64],
        tables: &[Table],
        compute: impl FnOnce() -> Option<Vec<bool>>,
    ) -> Option<Vec<bool>> {
        if self.is_off() {
            return compute();
        }
        let key = (unary.to_vec(), tables.iter().cloned().map(TableIdentity).collect());
        self.undominated.entry(key).or_insert_with(compute).clone()
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
    fn equal_tables_are_shared_and_results_cached() {
        let mut memo = TableMemo::new();
        let table = memo.table(vec![1, 2, 3, 4, 5, 7]);
        assert!(Arc::ptr_eq(&table, &memo.table(vec![1, 2, 3, 4, 5, 7])));
        let transposed = memo.transposed(&table, 3);
        assert_eq!(*transposed, [1, 4, 2, 5, 3, 7]);
        assert!(Arc::ptr_eq(&transposed, &memo.transposed(&table, 3)));
        // The same cells in another shape have another transpose.
        assert_eq!(*memo.transposed(&table, 2), [1, 3, 5, 2, 4, 7]);
        assert_eq!(*memo.restricted(&table, 3, true, &[false, true]), [4, 5, 7]);
        assert_eq!(*memo.restricted(&table, 3, false, &[true, false, true]), [1, 3, 4, 7]);
        assert!(!memo.properties(&table, 3).separable && memo.properties(&table, 3).finite);
        let sums = memo.table(vec![1, 2, 11, 12]);
        assert!(memo.properties(&sums, 2).separable);
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
    fn a_full_memo_is_emptied() {
        let mut memo = TableMemo::of(10);
        let table = memo.table(vec![7; 9]);
        assert!(Arc::ptr_eq(&table, &memo.table(vec![7; 9])));
        assert_eq!(*memo.table(vec![7; 2]), [7, 7]);
        assert!(!Arc::ptr_eq(&table, &memo.table(vec![7; 9])));
    }
}

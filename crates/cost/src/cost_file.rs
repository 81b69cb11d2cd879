//! Measured operator times: the file that `profile` and `python/profile_torch.py` write.
//!
//! The file has a table per workload class, element type and mode of the matrix units. A row is the workload's sizes and the time in nanoseconds.
//! If several devices were measured at once, the key `paces` holds their speed trace: rows of microseconds and of one
//! number per device, its time in thousandths of the average. The key `run` holds factors learned from a run's trace. Everything in
//! the file is checked.

use crate::{learned::LearnedRun, speed_trace::SpeedTrace};
use serde::{Deserialize, Serialize};
use shardwright_graph::{DType, Workload};
use shardwright_machine::Seconds;
use std::collections::BTreeSet;

const FORMAT: &str = "shardwright-costs";
const VERSION: u32 = 1;
/// The most rows of all tables together; bounds memory and look-ups.
const MAX_ROWS: usize = 1_000_000;
/// The most sizes of a workload.
const MAX_SIZES: usize = 16;
/// The longest time of a row: an hour.
const MAX_NANOSECONDS: u64 = 3_600_000_000_000;

/// Why a cost file was refused.
#[derive(Debug, thiserror::Error)]
pub enum CostFileError {
    /// Not JSON, or not of this shape.
    #[error("not a cost file: {0}")]
    Shape(#[from] serde_json::Error),
    /// Another format or version.
    #[error(
        "format `{format}` version {version} is not `{FORMAT}` version {VERSION}; measure again with this release"
    )]
    Format {
        /// The format that the file states.
        format: String,
        /// Its version.
        version: u32,
    },
    /// An invalid table.
    #[error("table {table} ({class} {dtype}){place}: {reason}")]
    Table {
        /// Index of the table, from zero.
        table: usize,
        /// Its class.
        class: String,
        /// Its element type.
        dtype: DType,
        /// The row, if one is invalid.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// An invalid speed trace.
    #[error("paces: {0}")]
    SpeedTrace(String),
    /// Invalid factors of a run.
    #[error("run: {0}")]
    Run(String),
}

/// A table as written in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableText {
    /// The workload class.
    pub class: String,
    /// The element type.
    pub dtype: DType,
    /// How products and convolutions were computed.
    #[serde(default, skip_serializing_if = "Mode::is_usual")]
    pub mode: Mode,
    /// Sizes, then nanoseconds.
    pub rows: Vec<Vec<u64>>,
}

/// How products and convolutions are computed where there is a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// In the element type, tensors contiguous.
    #[default]
    Usual,
    /// f32 in TF32.
    Tf32,
    /// Channels innermost in memory.
    ChannelsLast,
    /// Both.
    Tf32ChannelsLast,
}

impl Mode {
    /// The mode of two choices.
    pub fn new(tf32: bool, channels_last: bool) -> Self {
        match (tf32, channels_last) {
            (false, false) => Self::Usual,
            (true, false) => Self::Tf32,
            (false, true) => Self::ChannelsLast,
            (true, true) => Self::Tf32ChannelsLast,
        }
    }

    /// Whether there was no choice, or the usual one was taken.
    pub fn is_usual(&self) -> bool {
        *self == Self::Usual
    }
}

/// The file as written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    format: String,
    version: u32,
    device: String,
    date: String,
    source: String,
    method: String,
    #[serde(default, rename = "paces")]
    speed_trace: Option<Vec<Vec<u64>>>,
    #[serde(default)]
    run: Option<LearnedRun>,
    tables: Vec<TableText>,
}

/// The measurements of one class and element type, sorted by sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct CostTable {
    /// The workload class.
    pub class: String,
    /// The element type.
    pub dtype: DType,
    /// How products and convolutions were computed.
    pub mode: Mode,
    /// Number of sizes of a row.
    pub arity: usize,
    /// Sizes of all rows, row after row.
    pub sizes: Vec<u64>,
    /// Base-two logarithms of `sizes`, for distances.
    pub logs: Vec<f32>,
    /// The time of each row.
    pub seconds: Vec<f64>,
}

impl CostTable {
    /// The sizes of a row.
    pub fn row(&self, i: usize) -> &[u64] {
        &self.sizes[i * self.arity..][..self.arity]
    }

    /// The logarithms of a row's sizes.
    pub fn row_logs(&self, i: usize) -> &[f32] {
        &self.logs[i * self.arity..][..self.arity]
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.seconds.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.seconds.is_empty()
    }

    /// The time measured for exactly these sizes.
    pub fn exact(&self, sizes: &[u64]) -> Option<Seconds> {
        if sizes.len() != self.arity {
            return None;
        }
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = (low + high) / 2;
            match self.row(middle).cmp(sizes) {
                std::cmp::Ordering::Equal => return Some(Seconds(self.seconds[middle])),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    fn from_text(text: TableText) -> Result<Self, (Option<usize>, String)> {
        let arity = text.rows.first().map_or(1, |r| r.len().saturating_sub(1));
        if arity == 0 || arity > MAX_SIZES {
            return Err((Some(0), format!("a row is 1 to {MAX_SIZES} sizes and a time")));
        }
        let mut rows = text.rows;
        for (i, row) in rows.iter().enumerate() {
            let time = row.last().copied().unwrap_or(0);
            if row.len() != arity + 1 {
                return Err((Some(i), format!("{} numbers where row 0 has {}", row.len(), arity + 1)));
            }
            if row[..arity].contains(&0) {
                return Err((Some(i), "a size is zero".into()));
            }
            if time == 0 || time > MAX_NANOSECONDS {
                return Err((
                    Some(i),
                    format!("a time of {time} ns; measured times are above zero and below an hour"),
                ));
            }
        }
        rows.sort_unstable();
        if let Some(pair) = rows.windows(2).find(|p| p[0][..arity] == p[1][..arity]) {
            return Err((None, format!("sizes {:?} occur twice", &pair[0][..arity])));
        }
        let sizes: Vec<u64> = rows.iter().flat_map(|r| r[..arity].to_vec()).collect();
        Ok(Self {
            class: text.class,
            dtype: text.dtype,
            mode: text.mode,
            arity,
            logs: sizes.iter().map(|&s| (s as f32).log2()).collect(),
            sizes,
            seconds: rows.iter().map(|r| r[arity] as f64 * 1e-9).collect(),
        })
    }

    fn to_text(&self) -> TableText {
        let rows = (0..self.len())
            .map(|i| {
                let mut row = self.row(i).to_vec();
                row.push(((self.seconds[i] * 1e9).round() as u64).max(1));
                row
            })
            .collect();
        TableText { class: self.class.clone(), dtype: self.dtype, mode: self.mode, rows }
    }
}

/// The sizes of a row as written: all numbers but the last.
fn sizes(row: &[u64]) -> &[u64] {
    row.split_last().map_or(row, |(_, sizes)| sizes)
}

/// Measured operator times of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct CostFile {
    /// The device that was measured.
    pub device: String,
    /// The date of the measurement.
    pub date: String,
    /// The software that was measured.
    pub source: String,
    /// The method of measurement.
    pub method: String,
    /// Speed variation between devices, if several were measured at once.
    pub speed_trace: Option<SpeedTrace>,
    /// Factors learned from a run's trace. They are of one model.
    pub run: Option<LearnedRun>,
    tables: Vec<CostTable>,
}

/// Cost files that come with the crate, by device name in lower case.
const BUILT_IN: &[(&str, &[u8])] = &[("h200", include_bytes!("../costs/h200.json"))];

impl CostFile {
    /// Names of the cost files that come with the crate.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// A cost file that comes with the crate.
    pub fn builtin(name: &str) -> Option<Result<Self, CostFileError>> {
        BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, json)| Self::from_json(json))
    }

    /// Reads and checks a file.
    pub fn from_json(json: &[u8]) -> Result<Self, CostFileError> {
        let text: FileText = serde_json::from_slice(json)?;
        if text.format != FORMAT || text.version != VERSION {
            return Err(CostFileError::Format { format: text.format, version: text.version });
        }
        let trace = text.speed_trace.map(SpeedTrace::from_rows).transpose();
        let speed_trace = trace.map_err(CostFileError::SpeedTrace)?;
        if let Some(run) = &text.run {
            run.check().map_err(CostFileError::Run)?;
        }
        Ok(Self {
            speed_trace,
            run: text.run,
            ..Self::new([text.device, text.date, text.source, text.method], text.tables)?
        })
    }

    /// A file from its parts: device, date, source, method; and the tables.
    pub fn new(
        [device, date, source, method]: [String; 4],
        tables: Vec<TableText>,
    ) -> Result<Self, CostFileError> {
        let mut checked: Vec<CostTable> = Vec::with_capacity(tables.len());
        let (mut rows, mut seen) = (0, BTreeSet::new());
        for (table, text) in tables.into_iter().enumerate() {
            let (class, dtype) = (text.class.clone(), text.dtype);
            let fail = |place: Option<usize>, reason| {
                let place = place.map_or(String::new(), |i| format!(", row {i}"));
                Err(CostFileError::Table { table, class: class.clone(), dtype, place, reason })
            };
            rows += text.rows.len();
            if rows > MAX_ROWS {
                return fail(None, format!("more than {MAX_ROWS} rows in all"));
            }
            if !seen.insert((class.clone(), dtype, text.mode)) {
                return fail(None, "this class, element type and mode have a table already".into());
            }
            match CostTable::from_text(text) {
                Ok(table) => checked.push(table),
                Err((place, reason)) => return fail(place, reason),
            }
        }
        Ok(Self { device, date, source, method, speed_trace: None, run: None, tables: checked })
    }

    /// Another file's tables with these rows added. Where both have the same sizes, these replace the old ones.
    pub fn updating(
        known: Option<&Self>,
        header: [String; 4],
        tables: Vec<TableText>,
    ) -> Result<Self, CostFileError> {
        let mut all: Vec<TableText> =
            known.into_iter().flat_map(|known| known.tables.iter().map(CostTable::to_text)).collect();
        for mut table in tables {
            let same = |other: &&mut TableText| {
                (&other.class, other.dtype, other.mode) == (&table.class, table.dtype, table.mode)
            };
            match all.iter_mut().find(same) {
                None => all.push(table),
                Some(other) => {
                    let new: BTreeSet<&[u64]> = table.rows.iter().map(|row| sizes(row)).collect();
                    other.rows.retain(|row| !new.contains(sizes(row)));
                    other.rows.append(&mut table.rows);
                }
            }
        }
        let speed_trace = known.and_then(|known| known.speed_trace.clone());
        Ok(Self { speed_trace, ..Self::new(header, all)? })
    }

    /// Writes the file, one row per line so that differences can be read.
    pub fn to_json(&self) -> String {
        let quote = |s: &str| serde_json::Value::from(s).to_string();
        let mut out = format!(
            "{{\"format\": \"{FORMAT}\", \"version\": {VERSION}, \"device\": {}, \"date\": {}, \"source\": {}, \
             \"method\": {}, ",
            quote(&self.device),
            quote(&self.date),
            quote(&self.source),
            quote(&self.method)
        );
        let lines = |rows: Vec<Vec<u64>>| {
            let line = |row: &Vec<u64>| {
                let numbers: Vec<String> = row.iter().map(u64::to_string).collect();
                format!("[{}]", numbers.join(","))
            };
            rows.iter().map(line).collect::<Vec<_>>().join(",\n")
        };
        if let Some(trace) = &self.speed_trace {
            out += &format!("\"paces\": [\n{}],\n", lines(trace.rows().collect()));
        }
        if let Some(run) = &self.run {
            out += &format!("\"run\": {},\n", serde_json::to_string(run).unwrap_or_default());
        }
        out += "\"tables\": [\n";
        for (i, table) in self.tables.iter().enumerate() {
            let comma = if i + 1 < self.tables.len() { "," } else { "" };
            let mode = match table.mode.is_usual() {
                true => String::new(),
                false => format!("\"mode\": {}, ", serde_json::to_string(&table.mode).unwrap_or_default()),
            };
            out += &format!(
                "{{\"class\": {}, \"dtype\": \"{}\", {mode}\"rows\": [\n{}]}}{comma}\n",
                quote(&table.class),
                table.dtype,
                lines(table.to_text().rows)
            );
        }
        out + "]}\n"
    }

    /// The table for a workload in a mode, if there is one of its class, element type and number of sizes. Times of contiguous
    /// tensors stand in for other memory formats; those of f32 never stand in for TF32.
    pub fn table(&self, workload: &Workload, mode: Mode) -> Option<&CostTable> {
        let find = |class: &str, mode: Mode| {
            self.tables.iter().find(|t| {
                t.class == class
                    && t.dtype == workload.dtype
                    && t.mode == mode
                    && t.arity == workload.sizes.len()
            })
        };
        let either = |mode| find(workload.class.name, mode).or_else(|| find(workload.class.fallback?, mode));
        either(mode).or_else(|| match mode {
            Mode::ChannelsLast => either(Mode::Usual),
            Mode::Tf32ChannelsLast => either(Mode::Tf32),
            Mode::Usual | Mode::Tf32 => None,
        })
    }

    /// Whether products or convolutions were measured in TF32.
    pub fn has_tf32(&self) -> bool {
        self.tables.iter().any(|table| matches!(table.mode, Mode::Tf32 | Mode::Tf32ChannelsLast))
    }

    /// All tables.
    pub fn tables(&self) -> &[CostTable] {
        &self.tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{RooflineKind, WorkloadClass};

    fn file(tables: &str) -> String {
        format!(
            r#"{{"format":"shardwright-costs","version":1,"device":"d","date":"2026-01-01","source":"s","method":"m","tables":[{tables}]}}"#
        )
    }

    #[test]
    fn a_file_survives_writing_and_reading() {
        let text = file(r#"{"class":"gemm","dtype":"f32","rows":[[1,8,8,8,900],[1,4,4,4,700]]}"#);
        let costs = CostFile::from_json(text.as_bytes()).unwrap();
        assert_eq!(CostFile::from_json(costs.to_json().as_bytes()).unwrap(), costs);
        let seconds = costs.tables()[0].exact(&[1, 4, 4, 4]).unwrap();
        assert!((seconds.0 - 700e-9).abs() < 1e-15, "{seconds}");
        assert_eq!(costs.tables()[0].exact(&[1, 4, 4, 5]), None);
        assert_eq!(costs.tables()[0].exact(&[1, 4]), None);
        let uneven = text.replace("\"tables\"", "\"paces\":[[700,900,1100],[20,1000,1000]],\"tables\"");
        let uneven = CostFile::from_json(uneven.as_bytes()).unwrap();
        assert_eq!(uneven.speed_trace.as_ref().unwrap().devices(), 2);
        assert_eq!(CostFile::from_json(uneven.to_json().as_bytes()).unwrap(), uneven);
        let later = CostFile::updating(Some(&uneven), ["d", "", "", ""].map(String::from), vec![]).unwrap();
        assert_eq!(later.speed_trace, uneven.speed_trace, "an update without a trace keeps the old one");
    }

    #[test]
    fn later_measurements_replace_earlier_ones() {
        let known = file(r#"{"class":"gemm","dtype":"f32","rows":[[1,8,8,8,900],[1,4,4,4,700]]}"#);
        let known = CostFile::from_json(known.as_bytes()).unwrap();
        let table = |class: &str, row: &[u64]| TableText {
            class: class.into(),
            dtype: DType::F32,
            mode: Mode::Usual,
            rows: vec![row.to_vec()],
        };
        let new = vec![table("gemm", &[1, 4, 4, 4, 300]), table("copy", &[64, 50])];
        let header = ["d", "", "", ""].map(String::from);
        let costs = CostFile::updating(Some(&known), header, new).unwrap();
        let answers: Vec<TableText> = costs.tables().iter().map(CostTable::to_text).collect();
        assert_eq!(answers[0].rows, [[1, 4, 4, 4, 300], [1, 8, 8, 8, 900]]);
        assert_eq!(answers[1], table("copy", &[64, 50]));
    }

    #[test]
    fn files_that_do_not_distinguish_products_cover_all() {
        let gemm = r#"{"class":"gemm","dtype":"f32","rows":[[1,4,4,4,700]]}"#;
        let both = format!(r#"{gemm},{{"class":"gemm_nt","dtype":"f32","rows":[[1,4,4,4,900]]}}"#);
        let wanted = |class| Workload {
            class: WorkloadClass::find(class).unwrap(),
            dtype: DType::F32,
            sizes: [1, 4, 4, 4].as_slice().into(),
            flops: 0,
            bytes: 0,
            roofline: RooflineKind::Stream,
        };
        let answer = |text: &str, class| {
            let costs = CostFile::from_json(file(text).as_bytes()).unwrap();
            costs.table(&wanted(class), Mode::Usual).map(|table| table.class.clone())
        };
        assert_eq!(answer(gemm, "gemm_nt").as_deref(), Some("gemm"));
        assert_eq!(answer(&both, "gemm_nt").as_deref(), Some("gemm_nt"));
        assert_eq!(answer(&both, "conv_grad_input"), None);
    }

    #[test]
    fn built_in_files_are_sound() {
        for name in CostFile::builtin_names() {
            let costs = CostFile::builtin(name).unwrap().unwrap();
            assert!(costs.tables().iter().map(CostTable::len).sum::<usize>() > 1000, "{name}");
        }
        assert!(CostFile::builtin("abacus").is_none());
    }

    #[test]
    fn errors_name_the_table_and_the_row() {
        let check = |tables: &str, expected: &str| {
            let error = CostFile::from_json(file(tables).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(r#"{"class":"a","dtype":"f32","rows":[[1,0]]}"#, "row 0: a time of 0 ns");
        check(r#"{"class":"a","dtype":"f32","rows":[[1,5],[0,5]]}"#, "row 1: a size is zero");
        check(r#"{"class":"a","dtype":"f32","rows":[[1,5],[1,1,5]]}"#, "3 numbers where row 0 has 2");
        check(r#"{"class":"a","dtype":"f32","rows":[[1,5],[1,6]]}"#, "sizes [1] occur twice");
        check(r#"{"class":"a","dtype":"f32","rows":[[5]]}"#, "row 0: a row is");
        check(r#"{"class":"a","dtype":"f32","rows":[[1,18446744073709551615]]}"#, "below an hour");
        check(r#"{"class":"a","dtype":"f33","rows":[]}"#, "unknown variant");
        check(r#"{"class":"a","dtype":"f32","rows":[[1,-5]]}"#, "invalid value");
        let twice = r#"{"class":"a","dtype":"f32","rows":[]},{"class":"a","dtype":"f32","rows":[]}"#;
        check(twice, "have a table already");
        let paces = file("").replace("\"tables\"", "\"paces\":[[0,900]],\"tables\"");
        let error = CostFile::from_json(paces.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("paces: sample 0 lasts 0"), "{error}");
        let other = CostFile::from_json(
            br#"{"format":"x","version":1,"device":"","date":"","source":"","method":"","tables":[]}"#,
        );
        assert!(other.unwrap_err().to_string().contains("format `x`"));
    }
}

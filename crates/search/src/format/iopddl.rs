//! Reads the JSON of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.
//!
//! ```json
//! {"problem": {"name": "...",
//!   "nodes": {"intervals": [[0, 2]], "costs": [[15, 55]], "usages": [[10, 8]]},
//!   "edges": {"nodes": [[0, 1]], "costs": [[1, 2, 3, 4]]},
//!   "usage_limit": 50}}
//! ```
//!
//! A node's usage counts at times `lo <= t < hi` of its interval. An edge's costs are row-major, its first node's choice
//! major; parallel edges add up. Keys may come in any order (the contest's files have the edges first). Unknown keys are
//! skipped, and a duplicate key is an error. Without `usage_limit`, or with `null`, memory is unlimited; then `intervals`
//! and `usages` may be left out together.
//!
//! The text is parsed as a stream, plain or gzip, and every count is checked before use. Errors name the location: `edges.costs[17]: 12 entries, but nodes 3 and 8 have 4 and 5 choices`.

use super::lexer::{Fault, Lexer};
use crate::network::{Interval, Limits, Network, NetworkBuilder, NetworkError, VarId};
use flate2::bufread::MultiGzDecoder;
use std::io::{self, BufRead, BufReader, Read};

/// A network and its name.
#[derive(Clone, Debug)]
pub struct NamedNetwork {
    /// The file's `name`; empty if it has none.
    pub name: String,
    /// The network.
    pub network: Network,
}

/// Size limits of a file, which protect against hostile and compressed input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// The most bytes of (decompressed) text.
    pub text_bytes: u64,
    /// The most numbers in the file, 8 bytes each during reading.
    pub numbers: usize,
    /// Limits of the network.
    pub network: Limits,
}

impl Default for ReadLimits {
    fn default() -> Self {
        ReadLimits { text_bytes: 4 << 30, numbers: 1 << 28, network: Limits::default() }
    }
}

/// Why a file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The source could not be read.
    #[error("cannot be read: {0}")]
    Io(#[source] io::Error),
    /// The compressed data is damaged or ends early.
    #[error("damaged or truncated gzip data after {after} bytes of text: {source}")]
    Gzip {
        /// Bytes of text decompressed before the error.
        after: u64,
        /// The decompressor's error.
        #[source]
        source: io::Error,
    },
    /// The text is not the expected JSON.
    #[error("{place}: {problem} (at byte {offset})")]
    Syntax {
        /// Where in the structure, e.g. `edges.costs[17]`.
        place: String,
        /// Byte offset in the text.
        offset: u64,
        /// What is wrong.
        problem: String,
    },
    /// The parts of the file do not match.
    #[error("{place}: {problem}")]
    Shape {
        /// Where in the structure, e.g. `edges.costs[17]`.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// A limit of [`ReadLimits`] was reached.
    #[error("{place}: {problem}")]
    TooLarge {
        /// Where in the structure.
        place: String,
        /// Which limit.
        problem: String,
    },
    /// The network as a whole was refused.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// Reads a network, plain or gzip, within the default limits.
///
/// # Errors
/// Where the source fails, the text is malformed or the numbers do not fit together; see [`ReadError`].
pub fn read_iopddl(source: impl Read) -> Result<NamedNetwork, ReadError> {
    read_iopddl_with(source, &ReadLimits::default())
}

/// Reads a network, plain or gzip, within given limits.
///
/// # Errors
/// As [`read_iopddl`].
pub fn read_iopddl_with(source: impl Read, limits: &ReadLimits) -> Result<NamedNetwork, ReadError> {
    let mut source = BufReader::with_capacity(1 << 16, source);
    let gzip = source.fill_buf().map_err(ReadError::Io)?.starts_with(&[0x1f, 0x8b]);
    if gzip {
        Reader::new(MultiGzDecoder::new(source), limits, true).problem()
    } else {
        Reader::new(source, limits, false).problem()
    }
}

/// A list of lists of numbers, stored flat.
#[derive(Default)]
struct NumberLists {
    values: Vec<i64>,
    ends: Vec<usize>,
}

impl NumberLists {
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn row(&self, index: usize) -> &[i64] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.values[start..self.ends[index]]
    }
}

/// The parts of the file read so far.
#[derive(Default)]
struct FileParts {
    name: Option<String>,
    usage_limit: Option<Option<i64>>,
    intervals: Option<NumberLists>,
    costs: Option<NumberLists>,
    usages: Option<NumberLists>,
    ends: Option<NumberLists>,
    tables: Option<NumberLists>,
}

struct Reader<'l, R> {
    lexer: Lexer<R>,
    limits: &'l ReadLimits,
    gzip: bool,
    /// Numbers that may still be read.
    room: usize,
    raw: FileParts,
}

impl<'l, R: Read> Reader<'l, R> {
    fn new(source: R, limits: &'l ReadLimits, gzip: bool) -> Self {
        let lexer = Lexer::new(source, limits.text_bytes);
        Reader { lexer, limits, gzip, room: limits.numbers, raw: FileParts::default() }
    }

    /// Adds the location to a lexer fault.
    fn at(&self, place: &str, fault: Fault) -> ReadError {
        match fault {
            Fault::Source(source) if self.gzip => ReadError::Gzip { after: self.lexer.offset(), source },
            Fault::Source(error) => ReadError::Io(error),
            Fault::Text { offset, problem } => {
                ReadError::Syntax { place: place.to_string(), offset, problem }
            }
            Fault::TooLarge { problem } => ReadError::TooLarge { place: place.to_string(), problem },
        }
    }

    fn problem(mut self) -> Result<NamedNetwork, ReadError> {
        let mut seen = false;
        self.object("the file", |reader, key| {
            if key != "problem" {
                return Ok(false);
            }
            if std::mem::replace(&mut seen, true) {
                return Err(twice("problem"));
            }
            reader.object("problem", Self::section)?;
            Ok(true)
        })?;
        self.lexer.expect_end().map_err(|fault| self.at("after the problem", fault))?;
        if !seen {
            return Err(shape("the file", "has no \"problem\"; is it a contest file?"));
        }
        build(self.raw, self.limits)
    }

    fn section(&mut self, key: &str) -> Result<bool, ReadError> {
        match key {
            "name" => {
                let name = self.lexer.string().map_err(|fault| self.at("name", fault))?;
                set(&mut self.raw.name, name, "name")?;
            }
            "usage_limit" => {
                let limit = match self.lexer.takes_null() {
                    Ok(true) => Ok(None),
                    Ok(false) => self.lexer.integer().map(Some),
                    Err(fault) => Err(fault),
                };
                let limit = limit.map_err(|fault| self.at("usage_limit", fault))?;
                if let Some(limit) = limit.filter(|&limit| limit < 0) {
                    return Err(shape("usage_limit", format!("{limit} is negative")));
                }
                set(&mut self.raw.usage_limit, limit, "usage_limit")?;
            }
            "nodes" => self.object("nodes", |reader, key| {
                match key {
                    "intervals" => {
                        let pairs = reader.lists("nodes.intervals")?;
                        set(&mut reader.raw.intervals, pairs, "nodes.intervals")?;
                    }
                    "costs" => {
                        let costs = reader.lists("nodes.costs")?;
                        set(&mut reader.raw.costs, costs, "nodes.costs")?;
                    }
                    "usages" => {
                        let usages = reader.lists("nodes.usages")?;
                        set(&mut reader.raw.usages, usages, "nodes.usages")?;
                    }
                    _ => return Ok(false),
                }
                Ok(true)
            })?,
            "edges" => self.object("edges", |reader, key| {
                match key {
                    "nodes" => {
                        let ends = reader.lists("edges.nodes")?;
                        set(&mut reader.raw.ends, ends, "edges.nodes")?;
                    }
                    "costs" => {
                        let tables = reader.lists("edges.costs")?;
                        set(&mut reader.raw.tables, tables, "edges.costs")?;
                    }
                    _ => return Ok(false),
                }
                Ok(true)
            })?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads an object. `visit` consumes a key's value, or returns false to skip it.
    fn object(
        &mut self,
        place: &str,
        mut visit: impl FnMut(&mut Self, &str) -> Result<bool, ReadError>,
    ) -> Result<(), ReadError> {
        self.lexer.expect(b'{').map_err(|fault| self.at(place, fault))?;
        if self.lexer.closes_at_once(b'}').map_err(|fault| self.at(place, fault))? {
            return Ok(());
        }
        loop {
            let key = self.lexer.string().and_then(|key| self.lexer.expect(b':').map(|()| key));
            let key = key.map_err(|fault| self.at(place, fault))?;
            if !visit(self, &key)? {
                self.lexer.skip_value().map_err(|fault| self.at(&format!("{place}.{key}"), fault))?;
            }
            if !self.lexer.more(b'}').map_err(|fault| self.at(place, fault))? {
                return Ok(());
            }
        }
    }

    /// A list of lists of naturals.
    fn lists(&mut self, place: &str) -> Result<NumberLists, ReadError> {
        let mut lists = NumberLists::default();
        self.lexer.expect(b'[').map_err(|fault| self.at(place, fault))?;
        if self.lexer.closes_at_once(b']').map_err(|fault| self.at(place, fault))? {
            return Ok(lists);
        }
        loop {
            // An empty list has no number but counts as one, since its row takes memory.
            let Some(room) = self.room.checked_sub(lists.values.len() + lists.len()).filter(|&room| room > 0)
            else {
                let problem = format!("more than the limit of {} numbers", self.limits.numbers);
                return Err(ReadError::TooLarge { place: place.to_string(), problem });
            };
            if let Err((index, fault)) = self.lexer.naturals(&mut lists.values, room) {
                return Err(self.at(&format!("{place}[{}][{index}]", lists.len()), fault));
            }
            lists.ends.push(lists.values.len());
            if !self.lexer.more(b']').map_err(|fault| self.at(place, fault))? {
                self.room -= lists.values.len() + lists.len();
                return Ok(lists);
            }
        }
    }
}

fn shape(place: impl Into<String>, problem: impl Into<String>) -> ReadError {
    ReadError::Shape { place: place.into(), problem: problem.into() }
}

fn twice(place: &str) -> ReadError {
    shape(place, "given twice")
}

fn set<T>(slot: &mut Option<T>, value: T, place: &str) -> Result<(), ReadError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(twice(place)),
    }
}

/// Checks that the parts fit together and builds the network.
fn build(raw: FileParts, limits: &ReadLimits) -> Result<NamedNetwork, ReadError> {
    let missing = |place| move || shape(place, "missing");
    let costs = raw.costs.ok_or_else(missing("nodes.costs"))?;
    let usage_limit = raw.usage_limit.flatten();
    if (raw.intervals.is_none() || raw.usages.is_none())
        && (raw.intervals.is_some() || raw.usages.is_some() || usage_limit.is_some())
    {
        let place = if raw.intervals.is_none() { "nodes.intervals" } else { "nodes.usages" };
        return Err(shape(place, "missing, but other parts of the file describe memory"));
    }
    let nodes = costs.len();
    for (place, list) in [("nodes.intervals", &raw.intervals), ("nodes.usages", &raw.usages)] {
        if let Some(count) = list.as_ref().map(NumberLists::len).filter(|&count| count != nodes) {
            return Err(shape(place, format!("{count} entries, but nodes.costs has {nodes}")));
        }
    }
    let mut builder = NetworkBuilder::with_limits(limits.network);
    for node in 0..nodes {
        let choices = costs.row(node).len();
        if choices == 0 {
            return Err(shape(format!("nodes.costs[{node}]"), "no choices; every node needs at least one"));
        }
        let usages = raw.usages.as_ref().map_or(&[][..], |usages| usages.row(node));
        if raw.usages.is_some() && usages.len() != choices {
            let problem = format!("{} entries, but the node has {choices} choices", usages.len());
            return Err(shape(format!("nodes.usages[{node}]"), problem));
        }
        let interval = match raw.intervals.as_ref().map(|intervals| intervals.row(node)) {
            None => Interval::default(),
            // The lexer accepts no negative numbers here.
            Some(&[lo, hi]) => Interval { lo: lo.unsigned_abs(), hi: hi.unsigned_abs() },
            Some(other) => {
                let problem = format!("{} numbers, expected two: [from, to]", other.len());
                return Err(shape(format!("nodes.intervals[{node}]"), problem));
            }
        };
        builder.variable(costs.row(node), usages, interval)?;
    }
    let (ends, tables) = match (raw.ends, raw.tables) {
        (None, None) => (NumberLists::default(), NumberLists::default()),
        (Some(ends), Some(tables)) => (ends, tables),
        (None, _) => return Err(shape("edges.nodes", "missing")),
        (_, None) => return Err(shape("edges.costs", "missing")),
    };
    if ends.len() != tables.len() {
        let problem = format!("{} entries, but edges.nodes has {}", tables.len(), ends.len());
        return Err(shape("edges.costs", problem));
    }
    for edge in 0..ends.len() {
        let &[a, b] = ends.row(edge) else {
            let problem = format!("{} numbers, expected two nodes", ends.row(edge).len());
            return Err(shape(format!("edges.nodes[{edge}]"), problem));
        };
        for end in [a, b] {
            if end.unsigned_abs() >= nodes as u64 {
                let problem = format!("there is no node {end}, only 0 to {}", nodes.saturating_sub(1));
                return Err(shape(format!("edges.nodes[{edge}]"), problem));
            }
        }
        let (rows, columns) = (costs.row(a as usize).len(), costs.row(b as usize).len());
        let entries = tables.row(edge).len();
        if entries as u128 != rows as u128 * columns as u128 {
            let problem =
                format!("{entries} entries, but nodes {a} and {b} have {rows} and {columns} choices");
            return Err(shape(format!("edges.costs[{edge}]"), problem));
        }
        builder.edge(VarId(a as u32), VarId(b as u32), tables.row(edge))?;
    }
    drop(tables);
    if let Some(limit) = usage_limit {
        builder.usage_limit(limit)?;
    }
    Ok(NamedNetwork { name: raw.name.unwrap_or_default(), network: builder.build()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const SMALL: &str = r#"{"problem": {"edges": {"costs": [[1,2,3,4,5,6], [10,20,30,40,50,60]], "nodes": [[0,1],[1,0]]},
        "extra": {"deep": [1, {"x": null}]}, "name": "small \u00e9",
        "nodes": {"costs": [[15,55], [1,2,3]], "intervals": [[0,2],[1,3]], "usages": [[10,8],[1,1,1]]},
        "usage_limit": 50}, "more": [true]}"#;

    fn fails(text: &str) -> String {
        read_iopddl(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_file_is_read_whatever_the_order_of_its_keys() {
        let problem = read_iopddl(SMALL.as_bytes()).unwrap();
        assert_eq!(problem.name, "small é");
        let network = problem.network;
        assert_eq!((network.variables(), network.usage_limit()), (2, Some(50)));
        assert_eq!(network.usage(VarId(0)), &[10, 8]);
        assert_eq!(network.interval(VarId(1)), Interval { lo: 1, hi: 3 });
        // The second edge runs backwards: its rows are node 1's choices.
        assert_eq!(network.table(network.edges()[0].table), &[11, 32, 53, 24, 45, 66]);
    }

    #[test]
    fn gzip_is_recognised_by_content() {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(SMALL.as_bytes()).unwrap();
        let packed = encoder.finish().unwrap();
        assert_eq!(read_iopddl(&packed[..]).unwrap().network.variables(), 2);
        for cut in [3, packed.len() / 2, packed.len() - 1] {
            let error = read_iopddl(&packed[..cut]).unwrap_err();
            assert!(matches!(error, ReadError::Gzip { .. }), "{cut}: {error}");
        }
    }

    #[test]
    fn memory_may_be_left_out_altogether_but_not_in_part() {
        let problem = read_iopddl(r#"{"problem":{"nodes":{"costs":[[1]]}}}"#.as_bytes()).unwrap();
        assert_eq!(problem.network.usage_limit(), None);
        let null = r#"{"problem":{"nodes":{"costs":[[1]]},"usage_limit":null}}"#;
        assert_eq!(read_iopddl(null.as_bytes()).unwrap().network.usage_limit(), None);
        assert_eq!(
            fails(r#"{"problem":{"nodes":{"costs":[[1]]},"usage_limit":5}}"#),
            "nodes.intervals: missing, but other parts of the file describe memory"
        );
    }

    #[test]
    fn errors_name_the_place() {
        let edit = |from: &str, to: &str| {
            assert!(SMALL.contains(from), "{from}");
            let error = fails(&SMALL.replacen(from, to, 1));
            error.split(" (at byte").next().unwrap_or_default().to_string()
        };
        let table = [
            (
                "[10,20,30,40,50,60]",
                "[10,20]",
                "edges.costs[1]: 2 entries, but nodes 1 and 0 have 3 and 2 choices",
            ),
            (", [10,20,30,40,50,60]", "", "edges.costs: 1 entries, but edges.nodes has 2"),
            ("[[0,1],[1,0]]", "[[0,1],[1,2]]", "edges.nodes[1]: there is no node 2, only 0 to 1"),
            ("[[0,1],[1,0]]", "[[0,1],[1]]", "edges.nodes[1]: 1 numbers, expected two nodes"),
            ("[15,55]", "[]", "nodes.costs[0]: no choices; every node needs at least one"),
            ("[15,55]", "[15,-55]", "nodes.costs[0][1]: -55 is negative"),
            ("[10,8]", "[10,NaN]", "nodes.usages[0][1]: expected a whole number, found NaN"),
            ("[10,8]", "[10]", "nodes.usages[0]: 1 entries, but the node has 2 choices"),
            ("[0,2],", "", "nodes.intervals: 1 entries, but nodes.costs has 2"),
            ("[0,2]", "[0,2,4]", "nodes.intervals[0]: 3 numbers, expected two: [from, to]"),
            ("50}", "-50}", "usage_limit: -50 is negative"),
            ("\"extra\"", "\"name\"", "name: expected '\"', found '{'"),
            ("\"problem\"", "\"puzzle\"", "the file: has no \"problem\"; is it a contest file?"),
            ("\"more\"", "\"problem\"", "problem: given twice"),
            ("55", "99999999999999999999", "nodes.costs[0][1]: 99999999999999999999 does not fit 64 bits"),
        ];
        for (from, to, message) in table {
            assert_eq!(edit(from, to), message, "{from} -> {to}");
        }
        assert_eq!(fails(""), "the file: expected '{', found the end of the text (at byte 0)");
        assert_eq!(fails(&SMALL[..100]), "problem: expected '\"', found the end of the text (at byte 100)");
    }

    #[test]
    fn limits_stop_what_compresses_too_well() {
        let bomb = |start: &str, unit: &str, count: usize| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            encoder.write_all(start.as_bytes()).unwrap();
            encoder.write_all(unit.repeat(count).as_bytes()).unwrap();
            encoder.finish().unwrap()
        };
        let limits = ReadLimits { text_bytes: 1 << 20, numbers: 1000, network: Limits::default() };
        let costs = r#"{"problem":{"nodes":{"costs":["#;
        let table = [
            (bomb("", " ", 1 << 24), "the file: the text is longer than the limit of 1048576 bytes"),
            (bomb(costs, "[0],", 50_000), "nodes.costs: more than the limit of 1000 numbers"),
            (bomb(costs, "[],", 50_000), "nodes.costs: more than the limit of 1000 numbers"),
            (
                bomb(&format!("{costs}[0"), ",0", 50_000),
                "nodes.costs[0][1000]: more numbers than the limit allows",
            ),
        ];
        for (packed, message) in table {
            let error = read_iopddl_with(&packed[..], &limits).unwrap_err().to_string();
            assert_eq!(error, message);
        }
    }
}

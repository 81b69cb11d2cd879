//! Reads a profiler's trace: Chrome's JSON, as PyTorch's profiler and JAX's write it, plain or compressed by gzip.
//!
//! The file is read as a stream. Sizes, number of events, durations and depth are bounded: a damaged or hostile file is an error that
//! names the place, never a panic or an exhausted memory.

use flate2::read::MultiGzDecoder;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{
    cell::Cell,
    fmt,
    io::{self, BufRead, BufReader, Read},
};

/// The most bytes of a trace, unpacked.
pub const MAX_BYTES: u64 = 4 << 30;
/// The most events of a trace.
pub const MAX_EVENTS: usize = 8_000_000;
/// The longest event that is believed: an hour, in microseconds.
const MAX_MICROSECONDS: f64 = 3.6e9;
/// The longest text of an event that is kept.
const MAX_TEXT: usize = 512;

/// Why a trace was refused.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// The text ends too early.
    #[error(
        "cut off after {events} events (line {line}, column {column}); let the profiler finish and copy the whole file"
    )]
    CutOff {
        /// Events before the end.
        events: usize,
        /// The line where the text ends.
        line: usize,
        /// Its column.
        column: usize,
    },
    /// Not a trace.
    #[error(
        "not a profiler's trace, event {events}: {reason}; write one with `prof.export_chrome_trace` or `jax.profiler.trace`"
    )]
    Shape {
        /// Events before the place.
        events: usize,
        /// What is wrong, with line and column.
        reason: String,
    },
    /// Too large.
    #[error("{0}; profile fewer steps")]
    TooLarge(String),
    /// Another version of the format.
    #[error(
        "schema version {0} of PyTorch's traces is not version 1, which this release reads; use a release that reads it"
    )]
    Version(u64),
    /// An impossible event.
    #[error("event {event} (`{name}`): {reason}; the trace is damaged, profile again")]
    Impossible {
        /// Its index in the file.
        event: usize,
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Nothing that a device did.
    #[error("no ops in the trace: {0}")]
    Empty(&'static str),
}

/// What made the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profiler {
    /// PyTorch's.
    Torch,
    /// JAX's.
    Jax,
}

/// A trace as read.
#[derive(Debug)]
pub struct Trace {
    /// What made it.
    pub profiler: Profiler,
    /// Complete events and names of tracks, in the file's order.
    pub events: Vec<Event>,
}

/// An event. Times are in microseconds.
#[derive(Clone, Debug, Default)]
pub struct Event {
    /// Its index in the file.
    pub at: usize,
    /// Its name.
    pub name: String,
    /// Its category.
    pub category: String,
    /// Whether it names a process or thread.
    pub names_track: bool,
    /// Begin.
    pub start: f64,
    /// Duration.
    pub duration: f64,
    /// The process that it belongs to: a device or a program.
    pub process: Track,
    /// The thread or stream.
    pub thread: Track,
    /// Details.
    pub args: Args,
}

/// A number or a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(untagged)]
pub enum Track {
    /// A number.
    Number(i64),
    /// A name.
    Name(String),
    /// Anything else.
    #[default]
    Other,
}

/// What is read of an event's details.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Args {
    /// Joins kernels to the op that launched them (PyTorch).
    #[serde(rename = "External id")]
    pub external: Option<u64>,
    /// Shapes of an op's operands (PyTorch, `record_shapes=True`).
    #[serde(rename = "Input Dims", deserialize_with = "dims")]
    pub dims: Vec<Vec<u64>>,
    /// Element types of an op's operands.
    #[serde(rename = "Input type", deserialize_with = "texts")]
    pub types: Vec<String>,
    /// The collective that a kernel belongs to (PyTorch).
    #[serde(rename = "Collective name")]
    pub collective: Option<String>,
    /// The instruction that a kernel computes (XLA).
    pub hlo_op: Option<String>,
    /// Its program.
    pub hlo_module: Option<String>,
    /// The run of the program; a text or a number.
    #[serde(deserialize_with = "label")]
    pub run_id: Option<String>,
    /// The device (XLA on processors).
    #[serde(deserialize_with = "label")]
    pub device_ordinal: Option<String>,
    /// The name of a process or thread.
    #[serde(deserialize_with = "label")]
    pub name: Option<String>,
}

fn label<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match serde_json::Value::deserialize(from)? {
        serde_json::Value::String(text) => Some(text),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    })
}

fn dims<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<u64>>, D::Error> {
    let value = serde_json::Value::deserialize(from)?;
    let shape = |value: &serde_json::Value| -> Vec<u64> {
        let sizes = value.as_array().map(|sizes| sizes.iter().map(serde_json::Value::as_u64).collect());
        sizes.flatten().unwrap_or_default()
    };
    Ok(value.as_array().map(|all| all.iter().map(shape).collect()).unwrap_or_default())
}

fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let value = serde_json::Value::deserialize(from)?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
    Ok(value.as_array().map(|all| all.iter().map(text).collect()).unwrap_or_default())
}

/// An event as written.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawEvent {
    ph: String,
    name: String,
    cat: String,
    ts: Option<serde_json::Number>,
    dur: Option<serde_json::Number>,
    pid: Track,
    tid: Track,
    args: Option<Args>,
}

/// Whether bytes begin like a compressed file or a trace, and not like a cost file.
pub fn is_trace(start: &[u8]) -> bool {
    let text = String::from_utf8_lossy(start);
    start.starts_with(&[0x1f, 0x8b]) || text.contains("\"traceEvents\"") || text.contains("\"schemaVersion\"")
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// Where it is cut off, too large, of another version, or has impossible events.
    pub fn read(file: impl Read) -> Result<Self, TraceError> {
        let mut file = BufReader::new(file);
        if file.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
            return Self::parse(BufReader::new(MultiGzDecoder::new(file)));
        }
        Self::parse(file)
    }

    fn parse(text: impl Read) -> Result<Self, TraceError> {
        let progress = Progress::default();
        // One byte more than allowed tells a file that is too large from one that ends there.
        let mut text = Counted { inner: text.take(MAX_BYTES + 1), count: 0 };
        let mut json = serde_json::Deserializer::from_reader(&mut text);
        let read = FileSeed(&progress).deserialize(&mut json).and_then(|parts| json.end().map(|()| parts));
        let count = text.count;
        let events = progress.events.get();
        if count > MAX_BYTES {
            return Err(TraceError::TooLarge(format!("more than {} GiB of trace", MAX_BYTES >> 30)));
        }
        let parts = read.map_err(|error| match progress.wrong.take() {
            Some(wrong) => wrong,
            None if error.is_eof() => {
                TraceError::CutOff { events, line: error.line(), column: error.column() }
            }
            // A compressed file that is cut off fails while it is unpacked.
            None if error.io_error_kind() == Some(io::ErrorKind::UnexpectedEof) => {
                TraceError::CutOff { events, line: error.line(), column: error.column() }
            }
            None if error.is_io() => TraceError::Unreadable(error.into()),
            None => TraceError::Shape { events, reason: error.to_string() },
        })?;
        let Some(found) = parts.events else {
            return Err(TraceError::Shape { events, reason: "there is no list `traceEvents`".into() });
        };
        match parts.schema {
            Some(1) => Ok(Self { profiler: Profiler::Torch, events: found }),
            Some(other) => Err(TraceError::Version(other)),
            None => Ok(Self { profiler: Profiler::Jax, events: found }),
        }
    }
}

struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.count += read as u64;
        Ok(read)
    }
}

#[derive(Default)]
struct Progress {
    events: Cell<usize>,
    wrong: Cell<Option<TraceError>>,
}

#[derive(Default)]
struct Parts {
    schema: Option<u64>,
    events: Option<Vec<Event>>,
}

struct FileSeed<'p>(&'p Progress);

impl<'de> DeserializeSeed<'de> for FileSeed<'_> {
    type Value = Parts;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Parts, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FileSeed<'_> {
    type Value = Parts;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an object with `traceEvents`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parts, A::Error> {
        let mut parts = Parts::default();
        while let Some(key) = map.next_key::<String>()? {
            match &key[..] {
                "schemaVersion" => parts.schema = Some(map.next_value()?),
                "traceEvents" => parts.events = Some(map.next_value_seed(EventsSeed(self.0))?),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(parts)
    }
}

struct EventsSeed<'p>(&'p Progress);

impl<'de> DeserializeSeed<'de> for EventsSeed<'_> {
    type Value = Vec<Event>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vec<Event>, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EventsSeed<'_> {
    type Value = Vec<Event>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Event>, A::Error> {
        let mut events = Vec::new();
        while let Some(raw) = list.next_element::<RawEvent>()? {
            let at = self.0.events.get();
            self.0.events.set(at + 1);
            let kept = match at < MAX_EVENTS {
                true => Event::of(raw, at),
                false => Err(TraceError::TooLarge(format!("more than {MAX_EVENTS} events"))),
            };
            match kept {
                Ok(event) => events.extend(event),
                Err(wrong) => {
                    self.0.wrong.set(Some(wrong));
                    return Err(serde::de::Error::custom("refused"));
                }
            }
        }
        Ok(events)
    }
}

impl Event {
    /// The event, if it is one with a duration or a track's name.
    fn of(raw: RawEvent, at: usize) -> Result<Option<Self>, TraceError> {
        let names_track = raw.ph == "M" && matches!(&raw.name[..], "process_name" | "thread_name");
        if raw.ph != "X" && !names_track {
            return Ok(None);
        }
        let mut name = raw.name;
        if name.len() > MAX_TEXT {
            let end = (0..=MAX_TEXT).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
            name.truncate(end);
        }
        let number = |value: Option<serde_json::Number>| value.and_then(|number| number.as_f64());
        let (start, duration) = (number(raw.ts), number(raw.dur));
        let impossible =
            |name: String, reason: String| Err(TraceError::Impossible { event: at, name, reason });
        if !names_track {
            match (start, duration) {
                (Some(start), Some(duration)) if start.is_finite() && duration.is_finite() => {
                    if duration < 0.0 {
                        return impossible(name, format!("a duration of {duration} us"));
                    }
                    if duration > MAX_MICROSECONDS {
                        return impossible(name, format!("a duration of {duration} us, more than an hour"));
                    }
                }
                _ => return impossible(name, "it has no begin or no duration".into()),
            }
        }
        Ok(Some(Self {
            at,
            name,
            category: raw.cat,
            names_track,
            start: start.unwrap_or(0.0),
            duration: duration.unwrap_or(0.0),
            process: raw.pid,
            thread: raw.tid,
            args: raw.args.unwrap_or_default(),
        }))
    }
}

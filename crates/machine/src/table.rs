//! Tables of a machine file, flattened: every value with its key and its place, so that whatever turns out to be wrong
//! with it is reported at its line.

use crate::error::{MachineError, Place};
use crate::spec::Precision;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

#[derive(Clone, Debug)]
pub(crate) enum Value {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
    List(Vec<Value>),
}

impl Value {
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) => "a string",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a number",
            Value::Bool(_) => "true or false",
            Value::List(_) => "a list",
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub value: Value,
    pub place: Place,
}

/// The keys of one table, with the place of its header.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub path: String,
    pub place: Place,
    pub entries: BTreeMap<String, Entry>,
}

impl Table {
    pub fn full(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    pub fn bad(&self, key: &str, reason: String) -> MachineError {
        let place = self.entries.get(key).map_or(&self.place, |entry| &entry.place).clone();
        MachineError::BadValue { place, key: self.full(key), reason }
    }

    pub fn missing(&self, key: &str, remedy: &str) -> MachineError {
        MachineError::MissingKey {
            place: self.place.clone(),
            key: self.full(key),
            remedy: remedy.to_string(),
        }
    }

    pub fn wrong(&self, key: &str, expected: &str, found: &Value) -> MachineError {
        self.bad(key, format!("must be {expected}, not {}", found.kind()))
    }

    pub fn get(&self, key: &str, remedy: &str) -> Result<&Value, MachineError> {
        self.entries.get(key).map(|entry| &entry.value).ok_or_else(|| self.missing(key, remedy))
    }

    pub fn text(&self, key: &str) -> Result<&str, MachineError> {
        match self.get(key, &format!("write {key} = \"...\""))? {
            Value::Text(text) => Ok(text),
            other => Err(self.wrong(key, "a string", other)),
        }
    }

    pub fn quantity<T>(
        &self,
        key: &str,
        example: &str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<T, MachineError> {
        match self.get(key, &format!("write {key} = {example}"))? {
            Value::Text(text) => parse(text).map_err(|reason| self.bad(key, reason)),
            other => Err(self.wrong(key, &format!("a string with its unit, such as {example}"), other)),
        }
    }

    pub fn int(&self, key: &str, value: &Value) -> Result<u32, MachineError> {
        match value {
            Value::Int(number) => u32::try_from(*number)
                .map_err(|_| self.bad(key, format!("{number} is out of range: 0 to {}", u32::MAX))),
            other => Err(self.wrong(key, "an integer", other)),
        }
    }

    pub fn list<T>(
        &self,
        key: &str,
        example: &str,
        item: impl Fn(&Value) -> Result<T, MachineError>,
    ) -> Result<Vec<T>, MachineError> {
        match self.get(key, &format!("write {key} = {example}"))? {
            Value::List(items) => items.iter().map(item).collect(),
            other => Err(self.wrong(key, &format!("a list such as {example}"), other)),
        }
    }

    pub fn quantities<T>(
        &self,
        key: &str,
        example: &str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, MachineError> {
        self.list(key, example, |value| match value {
            Value::Text(text) => parse(text).map_err(|reason| self.bad(key, reason)),
            other => Err(self.wrong(key, &format!("strings with their units, such as {example}"), other)),
        })
    }

    pub fn integers(&self, key: &str, example: &str) -> Result<Vec<u32>, MachineError> {
        self.list(key, example, |value| self.int(key, value))
    }
}

/// The text of a file, which tables are taken from.
pub(crate) struct Source<'a> {
    pub file: &'a str,
    pub text: &'a str,
}

impl Source<'_> {
    pub fn place(&self, offset: usize) -> Place {
        let line = 1 + self.text.as_bytes().iter().take(offset).filter(|&&b| b == b'\n').count();
        Place { file: self.file.to_string(), line: line as u32 }
    }

    pub fn tables(
        &self,
        name: &str,
        document: &DeTable<'_>,
        known: &[&str],
    ) -> Result<Vec<Table>, MachineError> {
        let Some(value) = document.get(name) else {
            return Ok(Vec::new());
        };
        let Some(items) = value.get_ref().as_array() else {
            return Err(MachineError::BadValue {
                place: self.place(value.span().start),
                key: name.to_string(),
                reason: format!("must be a list of tables: write [[{name}]]"),
            });
        };
        items
            .iter()
            .enumerate()
            .map(|(i, item)| self.subtable(&format!("{name}[{i}]"), item, known))
            .collect()
    }

    pub fn subtable(
        &self,
        path: &str,
        value: &Spanned<DeValue<'_>>,
        known: &[&str],
    ) -> Result<Table, MachineError> {
        let place = self.place(value.span().start);
        let Some(table) = value.get_ref().as_table() else {
            return Err(MachineError::BadValue {
                place,
                key: path.to_string(),
                reason: format!("must be a table: write [{}]", path.split('[').next().unwrap_or(path)),
            });
        };
        self.table(path, place, table, known, &[])
    }

    /// Checks the keys of a table and keeps its values; `tables` are left for the caller to read.
    pub fn table(
        &self,
        path: &str,
        place: Place,
        table: &DeTable<'_>,
        known: &[&str],
        tables: &[&str],
    ) -> Result<Table, MachineError> {
        let full = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
        let mut entries = BTreeMap::new();
        // In the order of the file, so that the first mistake is the one reported.
        let mut items: Vec<_> = table.iter().collect();
        items.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in items {
            let name = key.get_ref().as_ref();
            let place = self.place(key.span().start);
            if !known.contains(&name) {
                let known = known.join(", ");
                return Err(MachineError::UnknownKey { place, key: full(name), known });
            }
            if tables.contains(&name) {
                continue;
            }
            if name == "peak" {
                let precisions: Vec<&str> = Precision::ALL.iter().map(|p| p.name()).collect();
                let peaks = self.subtable(&full("peak"), value, &precisions)?;
                for (precision, entry) in peaks.entries {
                    entries.insert(format!("peak.{precision}"), entry);
                }
                continue;
            }
            let value = self.value(&full(name), value, 0)?;
            entries.insert(name.to_string(), Entry { value, place });
        }
        Ok(Table { path: path.to_string(), place, entries })
    }

    pub fn value(
        &self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        depth: usize,
    ) -> Result<Value, MachineError> {
        let bad = |reason: String| MachineError::BadValue {
            place: self.place(value.span().start),
            key: key.to_string(),
            reason,
        };
        match value.get_ref() {
            DeValue::String(text) => Ok(Value::Text(text.to_string())),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map(Value::Int)
                .map_err(|_| bad(format!("{} is too large", number.as_str()))),
            DeValue::Float(number) => number
                .as_str()
                .parse()
                .map(Value::Float)
                .map_err(|_| bad(format!("{} is not a number", number.as_str()))),
            DeValue::Boolean(yes) => Ok(Value::Bool(*yes)),
            DeValue::Array(items) if depth == 0 => items
                .iter()
                .map(|item| self.value(key, item, depth + 1))
                .collect::<Result<_, _>>()
                .map(Value::List),
            other => Err(bad(format!("a {} means nothing here", other.type_str()))),
        }
    }
}

//! Flattened tables of a machine file. Every value keeps its key and location, so that errors name its line.

use crate::error::{FileLocation, MachineError};
use crate::spec::Precision;
use std::collections::BTreeMap;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A value of a machine file.
#[derive(Clone, Debug)]
pub(crate) enum TomlValue {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
    List(Vec<TomlValue>),
}

impl TomlValue {
    pub fn kind(&self) -> &'static str {
        match self {
            TomlValue::Text(_) => "a string",
            TomlValue::Int(_) => "an integer",
            TomlValue::Float(_) => "a number",
            TomlValue::Bool(_) => "true or false",
            TomlValue::List(_) => "a list",
        }
    }
}

/// A value and its location.
#[derive(Clone, Debug)]
pub(crate) struct TomlEntry {
    pub value: TomlValue,
    pub location: FileLocation,
}

/// The keys of one table, with the location of its header.
#[derive(Clone, Debug)]
pub(crate) struct TomlTable {
    pub path: String,
    pub location: FileLocation,
    pub entries: BTreeMap<String, TomlEntry>,
}

impl TomlTable {
    /// The full path of a key.
    pub fn full(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    pub fn bad(&self, key: &str, reason: String) -> MachineError {
        let location = self.entries.get(key).map_or(&self.location, |entry| &entry.location).clone();
        MachineError::BadValue { location, key: self.full(key), reason }
    }

    pub fn missing(&self, key: &str, remedy: &str) -> MachineError {
        MachineError::MissingKey {
            location: self.location.clone(),
            key: self.full(key),
            remedy: remedy.to_string(),
        }
    }

    pub fn wrong(&self, key: &str, expected: &str, found: &TomlValue) -> MachineError {
        self.bad(key, format!("must be {expected}, not {}", found.kind()))
    }

    pub fn get(&self, key: &str, remedy: &str) -> Result<&TomlValue, MachineError> {
        self.entries.get(key).map(|entry| &entry.value).ok_or_else(|| self.missing(key, remedy))
    }

    pub fn text(&self, key: &str) -> Result<&str, MachineError> {
        match self.get(key, &format!("write {key} = \"...\""))? {
            TomlValue::Text(text) => Ok(text),
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
            TomlValue::Text(text) => parse(text).map_err(|reason| self.bad(key, reason)),
            other => Err(self.wrong(key, &format!("a string with its unit, such as {example}"), other)),
        }
    }

    pub fn int(&self, key: &str, value: &TomlValue) -> Result<u32, MachineError> {
        match value {
            TomlValue::Int(number) => u32::try_from(*number)
                .map_err(|_| self.bad(key, format!("{number} is out of range: 0 to {}", u32::MAX))),
            other => Err(self.wrong(key, "an integer", other)),
        }
    }

    pub fn number(&self, key: &str) -> Result<f64, MachineError> {
        match self.get(key, "write a number")? {
            TomlValue::Float(number) => Ok(*number),
            TomlValue::Int(number) => Ok(*number as f64),
            other => Err(self.wrong(key, "a number such as 1.5", other)),
        }
    }

    pub fn list<T>(
        &self,
        key: &str,
        example: &str,
        item: impl Fn(&TomlValue) -> Result<T, MachineError>,
    ) -> Result<Vec<T>, MachineError> {
        match self.get(key, &format!("write {key} = {example}"))? {
            TomlValue::List(items) => items.iter().map(item).collect(),
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
            TomlValue::Text(text) => parse(text).map_err(|reason| self.bad(key, reason)),
            other => Err(self.wrong(key, &format!("strings with their units, such as {example}"), other)),
        })
    }

    pub fn integers(&self, key: &str, example: &str) -> Result<Vec<u32>, MachineError> {
        self.list(key, example, |value| self.int(key, value))
    }
}

/// A file's name and text, for locations.
pub(crate) struct SourceText<'a> {
    pub file: &'a str,
    pub text: &'a str,
}

impl SourceText<'_> {
    pub fn location(&self, offset: usize) -> FileLocation {
        let line = 1 + self.text.as_bytes().iter().take(offset).filter(|&&b| b == b'\n').count();
        FileLocation { file: self.file.to_string(), line: line as u32 }
    }

    pub fn tables(
        &self,
        name: &str,
        document: &DeTable<'_>,
        known: &[&str],
    ) -> Result<Vec<TomlTable>, MachineError> {
        let Some(value) = document.get(name) else {
            return Ok(Vec::new());
        };
        let Some(items) = value.get_ref().as_array() else {
            return Err(MachineError::BadValue {
                location: self.location(value.span().start),
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
    ) -> Result<TomlTable, MachineError> {
        let location = self.location(value.span().start);
        let Some(table) = value.get_ref().as_table() else {
            return Err(MachineError::BadValue {
                location,
                key: path.to_string(),
                reason: format!("must be a table: write [{}]", path.split('[').next().unwrap_or(path)),
            });
        };
        self.table(path, location, table, known, &[])
    }

    /// Checks the keys of a table and keeps its values. Keys in `tables` are skipped: the caller reads them.
    pub fn table(
        &self,
        path: &str,
        location: FileLocation,
        table: &DeTable<'_>,
        known: &[&str],
        tables: &[&str],
    ) -> Result<TomlTable, MachineError> {
        let full = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
        let mut entries = BTreeMap::new();
        // In file order, so that the first mistake is reported.
        let mut items: Vec<_> = table.iter().collect();
        items.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in items {
            let name = key.get_ref().as_ref();
            let location = self.location(key.span().start);
            if !known.contains(&name) {
                let known = known.join(", ");
                return Err(MachineError::UnknownKey { location, key: full(name), known });
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
            entries.insert(name.to_string(), TomlEntry { value, location });
        }
        Ok(TomlTable { path: path.to_string(), location, entries })
    }

    pub fn value(
        &self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        depth: usize,
    ) -> Result<TomlValue, MachineError> {
        let bad = |reason: String| MachineError::BadValue {
            location: self.location(value.span().start),
            key: key.to_string(),
            reason,
        };
        match value.get_ref() {
            DeValue::String(text) => Ok(TomlValue::Text(text.to_string())),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map(TomlValue::Int)
                .map_err(|_| bad(format!("{} is too large", number.as_str()))),
            DeValue::Float(number) => number
                .as_str()
                .parse()
                .map(TomlValue::Float)
                .map_err(|_| bad(format!("{} is not a number", number.as_str()))),
            DeValue::Boolean(yes) => Ok(TomlValue::Bool(*yes)),
            DeValue::Array(items) if depth == 0 => items
                .iter()
                .map(|item| self.value(key, item, depth + 1))
                .collect::<Result<_, _>>()
                .map(TomlValue::List),
            other => Err(bad(format!("a {} is not allowed here", other.type_str()))),
        }
    }
}

//! Structure-aware mutations: most mutants are well-formed files with wrong contents, and so reach the code behind the
//! parsers.
//!
//! - JSON (graphs, cost files, plans, networks): values are replaced, moved, repeated and dropped.
//! - Protobuf (ONNX): the same, on fields. A field of bytes that parses as a message is one.
//! - Other text (machines, StableHLO, graphs): the same, on tokens and lines.
//!
//! A mutant differs from its seed in one to four places. The same seed of the random numbers gives the same mutant.

use serde_json::Value;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}

/// Whole numbers at limits: of ranks, of small counts, of element counts, of integer types.
const NUMBERS: [i64; 22] = [
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    9,
    64,
    255,
    4096,
    1 << 20,
    1 << 22,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 48,
    (1 << 53) + 1,
    i64::MAX,
    i64::MIN,
    i64::MIN + 1,
];
const REALS: [f64; 8] = [0.0, -0.0, 1e-320, 1e-9, -1.5, 1e18, 1e308, f64::MAX];
const TEXTS: [&str; 8] = ["", "*", "a.0", "\u{202e}x\u{1b}[2J", "NaN", "f32", "../x", "0x7fc00000"];

/// A mutant of a file, in the form of a reader's format.
pub fn mutate(reader: &str, bytes: &[u8], random: &mut Random) -> Vec<u8> {
    for _ in 0..4 {
        let mutant = match reader {
            "onnx" => protobuf(bytes, random),
            "graph_json" | "costs" | "plan" | "network" | "stages" => json(bytes, random),
            _ => text(bytes, random),
        };
        match mutant {
            Some(mutant) if mutant != bytes => return mutant,
            Some(_) => {}
            None => break,
        }
    }
    noise(bytes, random)
}

/// Bytes that have no structure: one is changed, or some are dropped.
fn noise(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.is_empty() {
        return vec![random.next() as u8];
    }
    let at = random.below(bytes.len());
    match random.below(3) {
        0 => bytes.truncate(at),
        1 => bytes[at] = random.next() as u8,
        _ => {
            let end = (at + random.below(16)).min(bytes.len());
            bytes.drain(at..end);
        }
    }
    bytes
}

// JSON

fn json(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let mut root: Value = serde_json::from_slice(bytes).ok()?;
    for _ in 0..=random.below(4) {
        let count = values(&root);
        let donor = value_at(&root, &mut random.below(count)).cloned()?;
        let mut at = random.below(count);
        change_value(value_at_mut(&mut root, &mut at)?, donor, random);
    }
    serde_json::to_vec(&root).ok()
}

/// The number of values in a tree.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(values).sum(),
        Value::Object(entries) => entries.values().map(values).sum(),
        _ => 0,
    }
}

fn value_at<'v>(value: &'v Value, at: &mut usize) -> Option<&'v Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter().find_map(|item| value_at(item, at)),
        Value::Object(entries) => entries.values().find_map(|item| value_at(item, at)),
        _ => None,
    }
}

fn value_at_mut<'v>(value: &'v mut Value, at: &mut usize) -> Option<&'v mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| value_at_mut(item, at)),
        Value::Object(entries) => entries.values_mut().find_map(|item| value_at_mut(item, at)),
        _ => None,
    }
}

fn change_value(value: &mut Value, donor: Value, random: &mut Random) {
    let kind = random.below(8);
    match value {
        Value::Array(items) if kind < 5 && !items.is_empty() => {
            let (at, other) = (random.below(items.len()), random.below(items.len()));
            match kind {
                0 => drop(items.remove(at)),
                1 => items.insert(at, donor),
                2 => items.swap(at, other),
                3 => items.insert(at, items[other].clone()),
                _ => items.truncate(at),
            }
        }
        Value::Object(entries) if kind < 4 && !entries.is_empty() => {
            let key = entries.keys().nth(random.below(entries.len())).cloned().unwrap_or_default();
            match kind {
                0 => drop(entries.remove(&key)),
                1 => drop(entries.insert(key, donor)),
                2 => drop(entries.insert((*random.one_of(&TEXTS)).to_string(), donor)),
                _ => {
                    if let Some(moved) = entries.remove(&key) {
                        entries.insert(format!("{key}2"), moved);
                    }
                }
            }
        }
        Value::Number(number) if kind < 6 => {
            let near = number.as_i64().map(|n| n.saturating_add(random.below(5) as i64 - 2));
            *value = match (kind, near) {
                (0 | 1, Some(near)) => near.into(),
                (2 | 3, _) => (*random.one_of(&NUMBERS)).into(),
                (4, _) => (*random.one_of(&REALS)).into(),
                _ => u64::MAX.into(),
            };
        }
        Value::String(text) if kind < 4 => {
            *value = match kind {
                0 => (*random.one_of(&TEXTS)).into(),
                1 => text.repeat(2).into(),
                2 => text.chars().rev().collect::<String>().into(),
                _ => text.chars().skip(1).collect::<String>().into(),
            };
        }
        Value::Bool(truth) if kind < 4 => *truth = !*truth,
        value => *value = donor,
    }
}

// Protobuf

/// A field of a message.
#[derive(Clone)]
enum Payload {
    Varint(u64),
    Fixed(Vec<u8>),
    Bytes(Vec<u8>),
    Message(Vec<(u64, Payload)>),
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn split<'b>(bytes: &mut &'b [u8], count: usize) -> Option<&'b [u8]> {
    let (head, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(head)
}

fn message(mut bytes: &[u8], depth: usize) -> Option<Vec<(u64, Payload)>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        if key >> 3 == 0 || key >> 3 > 64 {
            return None;
        }
        let payload = match key & 7 {
            0 => Payload::Varint(varint(&mut bytes)?),
            1 => Payload::Fixed(split(&mut bytes, 8)?.to_vec()),
            5 => Payload::Fixed(split(&mut bytes, 4)?.to_vec()),
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let inner = split(&mut bytes, length)?;
                // Short names often parse as messages by accident; text is text.
                let is_text = !inner.is_empty() && inner.iter().all(|b| b.is_ascii_graphic() || *b == b' ');
                match message(inner, depth + 1).filter(|_| depth < 12 && !is_text && !inner.is_empty()) {
                    Some(fields) => Payload::Message(fields),
                    None => Payload::Bytes(inner.to_vec()),
                }
            }
            _ => return None,
        };
        fields.push((key >> 3, payload));
    }
    Some(fields)
}

fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn encode(fields: &[(u64, Payload)], out: &mut Vec<u8>) {
    for (tag, payload) in fields {
        let mut wire = |kind: u64| put_varint(tag << 3 | kind, out);
        match payload {
            Payload::Varint(value) => {
                wire(0);
                put_varint(*value, out);
            }
            Payload::Fixed(bytes) => {
                wire(if bytes.len() == 8 { 1 } else { 5 });
                out.extend(bytes);
            }
            Payload::Bytes(bytes) => {
                wire(2);
                put_varint(bytes.len() as u64, out);
                out.extend(bytes);
            }
            Payload::Message(inner) => {
                wire(2);
                let mut bytes = Vec::new();
                encode(inner, &mut bytes);
                put_varint(bytes.len() as u64, out);
                out.extend(bytes);
            }
        }
    }
}

fn fields(message: &[(u64, Payload)]) -> usize {
    message.iter().map(|(_, p)| 1 + if let Payload::Message(inner) = p { fields(inner) } else { 0 }).sum()
}

/// Copies the field at a position in the tree.
fn field_at(message: &[(u64, Payload)], at: &mut usize) -> Option<(u64, Payload)> {
    for field in message {
        if *at == 0 {
            return Some(field.clone());
        }
        *at -= 1;
        if let Payload::Message(inner) = &field.1
            && let Some(found) = field_at(inner, at)
        {
            return Some(found);
        }
    }
    None
}

/// Changes the field at a position in the tree, or the list that it is in.
fn change_field(
    message: &mut Vec<(u64, Payload)>,
    at: &mut usize,
    donor: &(u64, Payload),
    random: &mut Random,
) -> bool {
    for i in 0..message.len() {
        if *at == 0 {
            match random.below(8) {
                0 => drop(message.remove(i)),
                1 => message.insert(i, message[i].clone()),
                2 => message.insert(i, donor.clone()),
                3 if donor.0 == message[i].0 => message[i] = donor.clone(),
                4 => message.swap(i, random.below(i + 1)),
                _ => change_payload(&mut message[i].1, random),
            }
            return true;
        }
        *at -= 1;
        if let Payload::Message(inner) = &mut message[i].1
            && change_field(inner, at, donor, random)
        {
            return true;
        }
    }
    false
}

fn change_payload(payload: &mut Payload, random: &mut Random) {
    match payload {
        Payload::Varint(value) => {
            *value = match random.below(3) {
                0 => value.wrapping_add(random.below(5) as u64).wrapping_sub(2),
                _ => *random.one_of(&NUMBERS) as u64,
            }
        }
        Payload::Fixed(bytes) if bytes.len() == 4 => {
            *bytes = (*random.one_of(&REALS) as f32).to_le_bytes().to_vec();
        }
        Payload::Fixed(bytes) => *bytes = random.one_of(&REALS).to_le_bytes().to_vec(),
        Payload::Bytes(bytes) => match random.below(4) {
            // A packed list of whole numbers, such as the sizes of a tensor.
            0 => {
                let mut list = Vec::new();
                (0..=random.below(4)).for_each(|_| put_varint(*random.one_of(&NUMBERS) as u64, &mut list));
                *bytes = list;
            }
            1 => *bytes = random.one_of(&TEXTS).as_bytes().to_vec(),
            2 => bytes.extend_from_within(..),
            _ => *bytes = noise(bytes, random),
        },
        Payload::Message(inner) => inner.truncate(random.below(inner.len() + 1)),
    }
}

fn protobuf(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let mut root = message(bytes, 0).filter(|root| !root.is_empty())?;
    for _ in 0..=random.below(4) {
        let count = fields(&root);
        let donor = field_at(&root, &mut random.below(count))?;
        change_field(&mut root, &mut random.below(count), &donor, random);
        if root.is_empty() {
            break;
        }
    }
    let mut out = Vec::new();
    encode(&root, &mut out);
    Some(out)
}

// Text

/// Words, numbers, strings and single other characters.
fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        let length = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else if first == '"' {
            rest[1..].find('"').map_or(rest.len(), |end| end + 2)
        } else {
            first.len_utf8()
        };
        let (token, tail) = rest.split_at(length);
        tokens.push(token);
        rest = tail;
    }
    tokens
}

fn text(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let text = str::from_utf8(bytes).ok().filter(|text| !text.trim().is_empty())?;
    let mut all: Vec<String> = tokens(text).into_iter().map(str::to_string).collect();
    let is_number = |token: &str| token.starts_with(|c: char| c.is_ascii_digit());
    let is_word = |token: &str| token.chars().any(char::is_alphanumeric);
    for _ in 0..=random.below(4) {
        let words: Vec<usize> = (0..all.len()).filter(|&i| is_word(&all[i])).collect();
        if words.is_empty() {
            break;
        }
        let (at, other) = (*random.one_of(&words), *random.one_of(&words));
        match random.below(8) {
            0..=2 if is_number(&all[at]) => {
                // Sizes are joined by `x`, as in 4x8xf32.
                let number = random.one_of(&NUMBERS).unsigned_abs().to_string();
                let parts: Vec<&str> = all[at].split('x').collect();
                let place = random.below(parts.len());
                let part =
                    |(i, part): (usize, &&str)| if i == place { number.clone() } else { (*part).to_string() };
                all[at] = parts.iter().enumerate().map(part).collect::<Vec<_>>().join("x");
            }
            3 if is_number(&all[at]) => all[at] = format!("{}e{}", all[at], random.below(400)),
            4 => all[at] = (*random.one_of(&TEXTS)).to_string(),
            5 => drop(all.remove(at)),
            6 => {
                // A line is repeated or moved.
                let line = |from: usize| {
                    let start = all[..from].iter().rposition(|t| t == "\n").map_or(0, |i| i + 1);
                    let end = all[from..].iter().position(|t| t == "\n").map_or(all.len(), |i| from + i + 1);
                    start..end
                };
                let (from, to) = (line(at), line(other).start);
                let copy: Vec<String> = all[from.clone()].to_vec();
                if random.below(2) == 0 && !from.contains(&to) {
                    all.drain(from.clone());
                    let to = if to > from.start { to - copy.len() } else { to };
                    all.splice(to..to, copy);
                } else {
                    all.splice(to..to, copy);
                }
            }
            _ if is_number(&all[at]) == is_number(&all[other]) => all[at] = all[other].clone(),
            _ => all.swap(at, other),
        }
    }
    Some(all.concat().into_bytes())
}

//! The page's program reads types that are generated from the Rust types which are written to it: `report/src/types.ts`.
//! This test generates them, and fails where the file is not fresh. `UPDATE_TYPES=1` writes the file.
//!
//! Types are read from the sources by name, from [`ROOTS`] on. Only what the sources have is understood: structs with named
//! fields, enums without fields, and serde's `rename_all`, `skip_serializing_if` and `flatten`. Anything else is an error.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Expr, Field, Fields, GenericArgument, Item, Lit, Meta, PathArguments, Type};

/// The types that pages hold.
const ROOTS: [&str; 2] = ["Page", "Comparison"];

/// The folders whose types are looked up.
const SOURCES: [&str; 2] = ["crates/report/src", "crates/plan/src"];

/// Types from elsewhere, as they are written.
const OTHERS: [(&str, &str); 2] =
    [("Phase", "\"forward\" | \"backward\" | \"update\""), ("Value", "unknown")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All structs and enums of the sources that are serialised, by name.
fn declared() -> BTreeMap<String, Item> {
    let mut found = BTreeMap::new();
    for folder in SOURCES {
        let mut paths: Vec<PathBuf> =
            fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths.iter().filter(|path| path.extension().is_some_and(|own| own == "rs")) {
            let file = syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap();
            for item in file.items {
                let (name, attributes) = match &item {
                    Item::Struct(own) => (own.ident.to_string(), &own.attrs),
                    Item::Enum(own) => (own.ident.to_string(), &own.attrs),
                    _ => continue,
                };
                if derives_serialize(attributes) {
                    assert!(found.insert(name.clone(), item).is_none(), "two types are called {name}");
                }
            }
        }
    }
    found
}

fn derives_serialize(attributes: &[Attribute]) -> bool {
    let derives = attributes.iter().filter(|own| own.path().is_ident("derive"));
    derives
        .filter_map(|own| own.meta.require_list().ok())
        .any(|list| list.tokens.clone().into_iter().any(|token| token.to_string() == "Serialize"))
}

/// The words of all `#[serde(...)]` attributes: name, and value where there is one.
fn serde_words(attributes: &[Attribute]) -> BTreeMap<String, String> {
    let mut words = BTreeMap::new();
    for own in attributes.iter().filter(|own| own.path().is_ident("serde")) {
        own.parse_nested_meta(|meta| {
            let name = meta.path.get_ident().unwrap().to_string();
            let value = match meta.value() {
                Ok(value) => value.parse::<syn::LitStr>()?.value(),
                Err(_) => String::new(),
            };
            words.insert(name, value);
            Ok(())
        })
        .unwrap();
    }
    words
}

/// The documentation as a comment, indented.
fn comment(attributes: &[Attribute], indent: &str) -> String {
    let lines: Vec<String> = attributes
        .iter()
        .filter_map(|own| match &own.meta {
            Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
                Expr::Lit(text) => match &text.lit {
                    Lit::Str(text) => Some(text.value().trim().to_owned()),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        })
        .collect();
    match lines.is_empty() {
        true => String::new(),
        false => format!("{indent}/** {} */\n", lines.join(" ")),
    }
}

/// What is still to be written, and what is known.
struct Writer {
    declared: BTreeMap<String, Item>,
    written: BTreeMap<String, String>,
}

impl Writer {
    /// A type in TypeScript; types that it names are written too.
    fn named(&mut self, ty: &Type) -> String {
        match ty {
            Type::Reference(own) => self.named(&own.elem),
            Type::Slice(own) => format!("{}[]", self.element(&own.elem)),
            Type::Array(own) => {
                let Expr::Lit(length) = &own.len else { panic!("the length of an array is no number") };
                let Lit::Int(length) = &length.lit else { panic!("the length of an array is no number") };
                let element = self.named(&own.elem);
                format!("[{}]", vec![element; length.base10_parse().unwrap()].join(", "))
            }
            Type::Path(path) => {
                let last = path.path.segments.last().unwrap();
                let arguments: Vec<&Type> = match &last.arguments {
                    PathArguments::AngleBracketed(own) => (own.args.iter())
                        .filter_map(|own| if let GenericArgument::Type(ty) = own { Some(ty) } else { None })
                        .collect(),
                    _ => Vec::new(),
                };
                match (last.ident.to_string().as_str(), &arguments[..]) {
                    ("bool", []) => "boolean".into(),
                    ("String" | "str", []) => "string".into(),
                    ("u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" | "f64", []) => "number".into(),
                    ("Option", [of]) => format!("{} | null", self.named(of)),
                    ("Vec", [of]) => format!("{}[]", self.element(of)),
                    ("Box", [of]) => self.named(of),
                    ("BTreeMap", [key, of]) => format!("Record<{}, {}>", self.named(key), self.named(of)),
                    (name, []) => {
                        self.write(name);
                        name.to_owned()
                    }
                    (name, _) => panic!("{name} has arguments that nothing is known of"),
                }
            }
            _ => panic!("a type of a kind that nothing is known of"),
        }
    }

    /// A type as an array's element.
    fn element(&mut self, ty: &Type) -> String {
        let text = self.named(ty);
        if text.contains('|') { format!("({text})") } else { text }
    }

    fn field(&mut self, field: &Field) -> String {
        let words = serde_words(&field.attrs);
        let known = ["default", "skip_serializing_if", "flatten"];
        assert!(words.keys().all(|word| known.contains(&word.as_str())), "{words:?} is not understood");
        let name = field.ident.as_ref().unwrap();
        let (text, optional) = match words.get("skip_serializing_if").map(String::as_str) {
            // An absent field is never null.
            Some("Option::is_none") => {
                let text = self.named(&field.ty);
                (text.strip_suffix(" | null").unwrap().to_owned(), "?")
            }
            Some(_) => (self.named(&field.ty), "?"),
            None => (self.named(&field.ty), ""),
        };
        format!("{}  {name}{optional}: {text};\n", comment(&field.attrs, "  "))
    }

    /// Writes a type, once.
    fn write(&mut self, name: &str) {
        if self.written.contains_key(name) {
            return;
        }
        self.written.insert(name.to_owned(), String::new());
        if let Some((_, text)) = OTHERS.iter().find(|(own, _)| *own == name) {
            self.written.insert(name.to_owned(), format!("export type {name} = {text};\n"));
            return;
        }
        let item =
            self.declared.get(name).unwrap_or_else(|| panic!("no serialised type is called {name}")).clone();
        let text = match &item {
            Item::Struct(own) => {
                assert!(serde_words(&own.attrs).is_empty(), "{name}: serde's attributes are not understood");
                let Fields::Named(fields) = &own.fields else { panic!("{name} has no named fields") };
                let mut extended = Vec::new();
                let mut body = String::new();
                for field in &fields.named {
                    match serde_words(&field.attrs).contains_key("flatten") {
                        true => extended.push(self.named(&field.ty)),
                        false => body += &self.field(field),
                    }
                }
                let extends = match extended.is_empty() {
                    true => String::new(),
                    false => format!(" extends {}", extended.join(", ")),
                };
                format!("{}export interface {name}{extends} {{\n{body}}}\n", comment(&own.attrs, ""))
            }
            Item::Enum(own) => {
                let words = serde_words(&own.attrs);
                let rule = words.get("rename_all").map_or("", String::as_str);
                let value = |name: String| match rule {
                    "lowercase" => name.to_lowercase(),
                    "kebab-case" => kebab(&name),
                    "" => name,
                    other => panic!("{other} is not understood"),
                };
                let variant = |own: &syn::Variant| {
                    assert!(own.fields.is_empty(), "a variant of {name} has fields");
                    format!("\"{}\"", value(own.ident.to_string()))
                };
                let values: Vec<String> = own.variants.iter().map(variant).collect();
                format!("{}export type {name} = {};\n", comment(&own.attrs, ""), values.join(" | "))
            }
            _ => unreachable!("only structs and enums are declared"),
        };
        self.written.insert(name.to_owned(), text);
    }
}

/// `AtLeast` as `at-least`.
fn kebab(name: &str) -> String {
    let mut text = String::new();
    for (at, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && at > 0 {
            text.push('-');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

fn generated() -> String {
    let mut writer = Writer { declared: declared(), written: BTreeMap::new() };
    ROOTS.iter().for_each(|name| writer.write(name));
    let mut text = String::from(
        "// Generated from the Rust types by `UPDATE_TYPES=1 cargo test -p shardwright-report --test types`.\n",
    );
    for own in writer.written.values() {
        write!(text, "\n{own}").unwrap();
    }
    text
}

#[test]
fn the_types_that_the_page_reads_are_those_that_are_written() {
    let path = root().join("report/src/types.ts");
    let fresh = generated();
    if std::env::var_os("UPDATE_TYPES").is_some() {
        fs::write(&path, &fresh).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == fresh,
        "report/src/types.ts is out of date: UPDATE_TYPES=1 cargo test -p shardwright-report --test types"
    );
}

//! `models`: the built-in models with their sizes; `models MODEL`: one model and its options; `models FILE`: the contents of a
//! file.

use crate::Verdict;
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde::Serialize;
use shardwright_graph::{Graph, Role};
use shardwright_request::{Inputs, Request, WIDTH, grouped, hanging, is_path, parse_size};
use shardwright_zoo::{self as zoo, BuildOptions, FAMILIES, OptionSpec, PRESET_OPTIONS, PRESETS};
use std::io::{self, Write};

/// Lists the built-in models, or the options of one model, or the contents of a file.
#[derive(clap::Args)]
pub struct Args {
    /// A model, with or without options: `gpt`, `gpt:layers=24,hidden=1024,heads=16`; or a file as `plan` takes it
    model: Option<String>,
    /// Samples per step
    #[arg(long, requires = "model")]
    batch: Option<u64>,
    /// Tokens per sample
    #[arg(long, requires = "model")]
    seq: Option<u64>,
    /// Size of a symbolic dimension of an ONNX file; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = parse_size, requires = "model")]
    dim: Vec<(String, u64)>,
    /// One JSON value on standard output
    #[arg(long)]
    json: bool,
}

/// The sizes of a model, computed from its graph.
#[derive(Serialize)]
struct Row {
    name: String,
    parameters: u64,
    ops: usize,
    flops_per_step: u64,
    summary: &'static str,
}

/// The training step of a file.
#[derive(Serialize)]
struct FileRow {
    #[serde(flatten)]
    row: Row,
    /// Inputs of the step and their types, labels included.
    inputs: Vec<String>,
    notes: Vec<String>,
}

impl FileRow {
    fn of(path: &str, args: &Args) -> anyhow::Result<Self> {
        let mut request = Request::new(path, "flat:1");
        (request.model.batch, request.model.dims) = (args.batch, args.dim.clone());
        request.model.seq = args.seq;
        let Inputs { graph, notes, .. } = request.open()?;
        let input = |t| format!("{} {}", graph.tensor(t).name, graph.tensor(t).ty);
        let inputs = graph.sources(Role::Input).map(input).collect();
        Ok(Self { row: Row::new(graph, "a file"), inputs, notes })
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Row { name, parameters, ops, flops_per_step, .. } = &self.row;
        let (parameters, flops) = (grouped(*parameters as f64), si(*flops_per_step as f64));
        let facts = format!("{name}: {parameters} parameters, {ops} ops, {flops}FLOP per step");
        writeln!(out, "{}", hanging("", &facts))?;
        writeln!(out, "{}", hanging("inputs: ", &self.inputs.join(", ")))?;
        self.notes.iter().try_for_each(|note| writeln!(out, "{}", hanging("note: ", note)))
    }
}

impl Row {
    fn of(spec: &str, summary: &'static str) -> anyhow::Result<Self> {
        let options = BuildOptions { optimizer: zoo::usual_optimizer(spec), ..BuildOptions::default() };
        Ok(Self::new(zoo::build(spec, &options)?, summary))
    }

    /// The row of a built-in model as `plan` would build it.
    fn asked(spec: &str, args: &Args, summary: &'static str) -> anyhow::Result<Self> {
        let mut request = Request::new(spec, "flat:1");
        (request.model.batch, request.model.seq) = (args.batch, args.seq);
        Ok(Self::new(request.open()?.graph, summary))
    }

    fn new(graph: Graph, summary: &'static str) -> Self {
        Self {
            parameters: graph.parameter_count(),
            ops: graph.ops.len(),
            flops_per_step: graph.total_flops(),
            name: graph.name,
            summary,
        }
    }

    fn cells(&self) -> [Cell; 4] {
        let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        [
            Cell::new(&self.name),
            number(si(self.parameters as f64)),
            number(self.ops.to_string()),
            number(format!("{}FLOP", si(self.flops_per_step as f64))),
        ]
    }
}

/// A model's description in JSON: its sizes, and what may be set.
#[derive(Serialize)]
struct Description {
    #[serde(flatten)]
    row: Row,
    tiny: String,
    options: Vec<OptionRow>,
}

#[derive(Serialize)]
struct OptionRow {
    name: &'static str,
    default: String,
    takes: String,
    help: &'static str,
}

impl From<&OptionSpec> for OptionRow {
    fn from(o: &OptionSpec) -> Self {
        Self { name: o.name, default: o.default_text(), takes: o.domain.to_string(), help: o.help }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let mut out = io::stdout().lock();
    match (&args.model, args.json) {
        (None, false) => write_table(&mut out, &rows()?)?,
        (None, true) => writeln!(out, "{:#}", serde_json::to_value(rows()?)?)?,
        (Some(path), json) if is_path(path) => {
            let found = FileRow::of(path, args)?;
            if json {
                writeln!(out, "{:#}", serde_json::to_value(found)?)?;
            } else {
                found.write(&mut out)?;
            }
        }
        (Some(spec), json) => {
            anyhow::ensure!(
                args.dim.is_empty(),
                "--dim is for ONNX files; built-in models have options, --batch and --seq"
            );
            let description = describe(spec, args)?;
            if json {
                writeln!(out, "{:#}", serde_json::to_value(description)?)?;
            } else {
                write_description(&mut out, &description)?;
            }
        }
    }
    Ok(Verdict::Done)
}

fn rows() -> anyhow::Result<Vec<Row>> {
    let families = FAMILIES.iter().map(|family| Row::of(family.name, family.summary));
    families.chain(PRESETS.iter().map(|preset| Row::of(preset.name, preset.summary))).collect()
}

/// Only a rule under the header.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic).set_header(header);
    table.set_width(WIDTH as u16);
    table
}

fn write_table(out: &mut impl Write, rows: &[Row]) -> anyhow::Result<()> {
    let mut table = table(&["model", "parameters", "ops", "per step", "description"]);
    for row in rows {
        table.add_row(row.cells().into_iter().chain([Cell::new(row.summary)]));
    }
    writeln!(out, "{}", table.trim_fmt())?;
    Ok(())
}

fn describe(spec: &str, args: &Args) -> anyhow::Result<Description> {
    let name = spec.split_once(':').map_or(spec, |(name, _)| name);
    if let Some(preset) = PRESETS.iter().find(|preset| preset.name == name.trim()) {
        return Ok(Description {
            row: Row::asked(spec, args, preset.summary)?,
            tiny: format!("{}:layers=1,batch=1", preset.name),
            options: PRESET_OPTIONS.iter().map(OptionRow::from).collect(),
        });
    }
    let family = zoo::family(name.trim())?;
    Ok(Description {
        row: Row::asked(spec, args, family.summary)?,
        tiny: format!("{}:{}", family.name, family.tiny),
        options: family.options.iter().map(OptionRow::from).collect(),
    })
}

fn write_description(out: &mut impl Write, description: &Description) -> anyhow::Result<()> {
    let row = &description.row;
    writeln!(out, "{}", hanging("", &format!("{}: {}", row.name, row.summary)))?;
    writeln!(
        out,
        "{} parameters, {} ops, {}FLOP per step\n",
        grouped(row.parameters as f64),
        row.ops,
        si(row.flops_per_step as f64)
    )?;
    let mut table = table(&["option", "default", "takes", "meaning"]);
    for option in &description.options {
        table.add_row([option.name, &option.default, &option.takes, option.help]);
    }
    writeln!(out, "{}", table.trim_fmt())?;
    writeln!(out, "\nsmall version for tests: {}", description.tiny)?;
    Ok(())
}

/// Four digits and a prefix: `138.4 M`, ready for a unit.
fn si(value: f64) -> String {
    let prefixes = ["", "k", "M", "G", "T", "P", "E"];
    let mut value = value;
    let mut i = 0;
    // 999.95 would print as a thousand.
    while value >= 999.95 && i + 1 < prefixes.len() {
        value /= 1000.0;
        i += 1;
    }
    let digits = match value {
        _ if i == 0 => 0,
        v if v < 9.9995 => 3,
        v if v < 99.995 => 2,
        _ => 1,
    };
    format!("{value:.digits$} {}", prefixes[i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_with_four_digits() {
        let check = |value: f64, text: &str| assert_eq!(si(value), text);
        check(0.0, "0 ");
        check(61_706.0, "61.71 k");
        check(999_960.0, "1.000 M");
        check(138_357_544.0, "138.4 M");
        check(9_999_900.0, "10.00 M");
        check(u64::MAX as f64, "18.45 E");
    }
}

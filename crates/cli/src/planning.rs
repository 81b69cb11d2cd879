//! What `plan`, `compare` and `network` have in common: model, machine, costs and the limits of the search.

use crate::commands::machines;
use crate::external::NeighbouringFiles;
use crate::interrupt;
use crate::stablehlo::{StablehloArgs, is_stablehlo};
use anyhow::Context;
use shardwright_cost::{CostFile, OperatorTimes};
use shardwright_frontend::onnx;
use shardwright_frontend::zoo::{self, BuildOptions};
use shardwright_graph::{Graph, Optimizer};
use shardwright_machine::{Bytes, Device, Machine, Mesh};
use shardwright_plan::{
    Demands, OpTimes, PlanRequest, Problem, Wish,
    strategy::{Space, Strategy},
};
use shardwright_search::Control;
use shardwright_space::OpShapes;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The most bytes of a model or cost file that are read.
pub const MOST_BYTES: u64 = 1 << 30;

/// What is planned, and for what.
#[derive(Clone, clap::Args)]
pub struct PlanningArgs {
    /// A built-in model with options (`vgg16`, `mlp:batch=400,hidden=300`), or a file: .onnx, .mlir or .stablehlo
    /// (text as JAX prints it, also .gz), .json (our graph)
    pub model: String,
    /// A built-in machine, `flat:N`, or a .toml file; `NAME:K` for its first K devices
    #[arg(long, default_value = "p100x16")]
    pub machine: String,
    /// Samples per step, over all devices
    #[arg(long)]
    pub batch: Option<u64>,
    #[command(flatten)]
    pub stablehlo: StablehloArgs,
    /// The size of a dimension that an ONNX file leaves open; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = named_size)]
    pub dim: Vec<(String, u64)>,
    /// What is trained of an ONNX model: cross-entropy, mse, output (its first output is the loss)
    #[arg(long, default_value = "cross-entropy")]
    pub loss: onnx::Loss,
    /// Only the forward pass, without loss and updates
    #[arg(long)]
    pub inference: bool,
    /// How weights are updated: sgd, momentum, adam
    #[arg(long, default_value = "sgd", value_parser = optimizer)]
    pub optimizer: Optimizer,
    /// Measured operator costs: a .json file, or the name of a device that comes with the program
    #[arg(long)]
    pub costs: Option<String>,
    /// The most that one device may hold at once: `16GiB`, `800MB`
    #[arg(long, value_parser = Bytes::parse)]
    pub memory: Option<Bytes>,
    /// Let every op choose for itself: weights, gradients and optimizer state find their own sharding
    #[arg(long)]
    pub untied: bool,
    /// Fix what you know: `fc*=c4` gives the layers of these names this config; may be repeated
    #[arg(long, value_name = "PATTERN=CONFIG", value_parser = Wish::parse)]
    pub fix: Vec<Wish>,
    /// Stop searching after this many seconds with the best found
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub time: Duration,
    /// How many threads to use; all cores by default
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Seed of all randomness
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is not a time that can be waited"))
}

fn named_size(text: &str) -> Result<(String, u64), String> {
    let (name, size) = text.split_once('=').ok_or("expected NAME=N")?;
    let size = size.parse().ok().filter(|&n| n > 0).ok_or_else(|| format!("{size} is no size"))?;
    Ok((name.into(), size))
}

fn optimizer(text: &str) -> Result<Optimizer, String> {
    match text {
        "sgd" => Ok(Optimizer::sgd(0.01)),
        "momentum" => Ok(Optimizer::momentum(0.01, 0.9)),
        "adam" => Ok(Optimizer::adam(0.001)),
        _ => Err(format!("there is no optimizer {text}; choose sgd, momentum or adam")),
    }
}

/// Everything that a plan starts from.
pub struct Request {
    pub graph: Graph,
    /// What the reader of the model has to say about it.
    pub notes: Vec<String>,
    pub machine: Machine,
    costs: Option<CostFile>,
    untied: bool,
    start: Instant,
}

impl PlanningArgs {
    /// The arguments of `MODEL` on the default machine.
    pub fn of(model: &str, batch: u64) -> Self {
        Self {
            model: model.into(),
            machine: "p100x16".into(),
            batch: Some(batch),
            stablehlo: StablehloArgs::default(),
            dim: Vec::new(),
            loss: onnx::Loss::CrossEntropy,
            inference: false,
            optimizer: Optimizer::sgd(0.01),
            costs: None,
            memory: None,
            untied: false,
            fix: Vec::new(),
            time: Duration::from_secs(60),
            threads: 0,
            seed: 0,
        }
    }

    /// Reads and builds what the arguments name.
    pub fn open(&self) -> anyhow::Result<Request> {
        let start = Instant::now();
        let machine = machines::open(&self.machine)?;
        let (graph, notes) =
            if is_path(&self.model) { self.read_model()? } else { (self.build()?, Vec::new()) };
        let costs = self.costs.as_deref().map(read_costs).transpose()?;
        Ok(Request { graph, notes, machine, costs, untied: self.untied, start })
    }

    /// How model and machine are asked for, so that a plan can be opened again.
    pub fn asked(&self) -> PlanRequest {
        PlanRequest {
            model: self.model.clone(),
            batch: self.batch,
            optimizer: self.optimizer,
            machine: self.machine.clone(),
            costs: self.costs.clone(),
        }
    }

    /// The same arguments, with the model, the machine and the costs that a plan was made for.
    pub fn for_request(&self, asked: PlanRequest) -> Self {
        let PlanRequest { model, batch, optimizer, machine, costs } = asked;
        Self { model, batch, optimizer, machine, costs, ..self.clone() }
    }

    fn build(&self) -> anyhow::Result<Graph> {
        anyhow::ensure!(self.dim.is_empty(), "--dim is for ONNX files; built-in models have options");
        let training = !self.inference;
        let options = BuildOptions { batch: self.batch, optimizer: self.optimizer, training };
        Ok(zoo::build(&self.model, &options)?)
    }

    fn read_model(&self) -> anyhow::Result<(Graph, Vec<String>)> {
        let path = Path::new(&self.model);
        let is = |name: &str| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(name));
        if is("onnx") {
            let imported = self.read_onnx(path)?;
            return Ok((imported.graph, imported.notes));
        }
        let known = is("json") || is_stablehlo(path);
        anyhow::ensure!(
            known,
            "{}: only .onnx, .mlir, .stablehlo and graphs in .json can be read so far",
            path.display()
        );
        anyhow::ensure!(
            self.batch.is_none() && self.dim.is_empty() && !self.inference,
            "{}: the sizes of a graph file are fixed; leave --batch, --dim and --inference out",
            path.display()
        );
        if is_stablehlo(path) {
            let imported = self.stablehlo.read(path, read(path)?)?;
            return Ok((imported.graph, imported.notes));
        }
        Ok((Graph::from_json(&read(path)?).with_context(|| path.display().to_string())?, Vec::new()))
    }

    /// Reads an ONNX model.
    pub fn read_onnx(&self, path: &Path) -> anyhow::Result<onnx::Imported> {
        let options = onnx::ImportOptions {
            batch: self.batch,
            dims: self.dim.clone(),
            constants: Vec::new(),
            loss: self.loss,
            optimizer: self.optimizer,
            training: !self.inference,
        };
        let external = NeighbouringFiles::of(path);
        onnx::import(&read(path)?.into(), &options, &external).with_context(|| path.display().to_string())
    }

    /// What the plan has to keep.
    pub fn demands(&self) -> Demands {
        Demands { memory: self.memory, wishes: self.fix.clone() }
    }

    /// Limits and listeners of the search.
    pub fn control(&self, request: &Request) -> Control<'static> {
        Control {
            deadline: request.start.checked_add(self.time),
            cancel: Some(interrupt::flag()),
            seed: self.seed,
            threads: self.threads,
            start: request.start,
            ..Control::new()
        }
    }

    /// Runs `work` on as many threads as were asked for.
    pub fn on_threads<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build()?;
        Ok(pool.install(work))
    }
}

impl Request {
    /// Builds the search problem.
    pub fn problem(&self) -> anyhow::Result<Problem<'_>> {
        let build = if self.untied { Problem::untied } else { Problem::new };
        Ok(build(&self.graph, &self.machine, self.costs.as_ref())?)
    }

    /// Times of the model's ops, split over a mesh of such devices.
    pub fn times<'a>(
        &'a self,
        device: &'a Device,
        shapes: &'a [OpShapes],
        mesh: &'a Mesh,
    ) -> anyhow::Result<OpTimes<'a>> {
        let times = OperatorTimes::new(device, self.costs.as_ref())?;
        Ok(OpTimes::new(times, &self.graph, shapes, mesh))
    }

    /// Builds what a strategy needs: SoyBean cuts prime axes and searches no network.
    pub fn problem_of(&self, strategy: &Strategy) -> anyhow::Result<Problem<'_>> {
        match strategy.space {
            Space::Tilings(_) => self.prime(),
            _ => self.problem(),
        }
    }

    /// The machine's prime axes, with no search problem.
    pub fn prime(&self) -> anyhow::Result<Problem<'_>> {
        Ok(Problem::prime(&self.graph, &self.machine, self.costs.as_ref())?)
    }

    /// Seconds since the request was read.
    pub fn elapsed(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

/// Whether a model is a file and not a name with options.
fn is_path(model: &str) -> bool {
    let name = model.split(':').next().unwrap_or(model);
    name.contains(['/', '\\', '.'])
}

/// Reads a file that a user names, unless it is absurdly large.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let context = || format!("cannot read {}", path.display());
    let file = std::fs::File::open(path).with_context(context)?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::Read::take(file, MOST_BYTES + 1), &mut bytes)
        .with_context(context)?;
    anyhow::ensure!(bytes.len() as u64 <= MOST_BYTES, "{} is larger than 1 GiB", path.display());
    Ok(bytes)
}

fn read_costs(name: &str) -> anyhow::Result<CostFile> {
    if let Some(built_in) = CostFile::builtin(name) {
        return Ok(built_in?);
    }
    let path = PathBuf::from(name);
    CostFile::from_json(&read(&path)?).with_context(|| path.display().to_string())
}

/// `0.0123 s` as people read it.
pub fn show_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

/// Bytes as people read them.
pub fn show_bytes(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.2} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.1} kB", b / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_with_options_are_not_paths() {
        for name in ["vgg16", "mlp:batch=400,hidden=300", "gpt:dropout=0.1"] {
            assert!(!is_path(name), "{name}");
        }
        for path in ["./vgg16", "a.json", "models/x.onnx", "x.onnx"] {
            assert!(is_path(path), "{path}");
        }
    }
}

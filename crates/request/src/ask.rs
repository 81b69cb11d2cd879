//! What is planned and for what, as it was asked for, and as it is once everything has been read.

use crate::external::{NeighbouringFiles, StoredValues};
use crate::files::{open_machine, read, read_costs};
use crate::stablehlo::{Program, is_stablehlo, read_program};
use anyhow::Context;
use shardwright_cost::{CostFile, OperatorTimes};
use shardwright_frontend::zoo::{self, BuildOptions};
use shardwright_frontend::{onnx, stablehlo};
use shardwright_graph::{Graph, GraphBuilder, Optimizer, Role, TensorId, train};
use shardwright_machine::{Device, Machine, Mesh};
use shardwright_plan::{
    OpTimes, PlanRequest, Problem,
    strategy::{Space, Strategy},
};
use shardwright_search::Control;
use shardwright_space::OpShapes;
use std::path::Path;
use std::time::{Duration, Instant};

/// A model and a machine, as a user names them.
#[derive(Clone, Debug)]
pub struct Ask {
    /// A built-in model with options, or a file; what to call [`Ask::text`] where that is given.
    pub model: String,
    /// The StableHLO program itself, where it is at hand, or a graph (in `.json`): a forward pass is trained by its
    /// first output.
    pub text: Option<String>,
    /// A built-in machine, or a file.
    pub machine: String,
    /// Samples per step, where that is not in the model.
    pub batch: Option<u64>,
    /// Roles of a StableHLO program's arguments by name.
    pub roles: Vec<(String, Role)>,
    /// Targets of custom calls that are planned replicated.
    pub opaque: Vec<String>,
    /// Sizes of dimensions that an ONNX file leaves open.
    pub dims: Vec<(String, u64)>,
    /// What is trained of an ONNX model.
    pub loss: onnx::Loss,
    /// Only the forward pass.
    pub inference: bool,
    /// How weights are updated.
    pub optimizer: Optimizer,
    /// Measured operator costs: a file, or a built-in device.
    pub costs: Option<String>,
    /// Whether every op chooses for itself.
    pub untied: bool,
}

/// Everything that a plan starts from.
pub struct Request {
    /// The step.
    pub graph: Graph,
    /// Where that comes from StableHLO: the program.
    pub program: Option<Program>,
    /// What the reader of the model has to say about it.
    pub notes: Vec<String>,
    /// Where that comes from ONNX: the contents of weights and constants that the file has.
    pub stored: Option<StoredValues>,
    /// The machine.
    pub machine: Machine,
    /// The model comes from an engine that runs one program on all devices, JAX or PyTorch, and goes back there.
    pub spmd: bool,
    pub(crate) asked: PlanRequest,
    costs: Option<CostFile>,
    untied: bool,
    pub(crate) start: Instant,
}

/// An optimizer by name.
///
/// # Errors
/// Where there is none of that name.
pub fn parse_optimizer(text: &str) -> Result<Optimizer, String> {
    match text {
        "sgd" => Ok(Optimizer::sgd(0.01)),
        "momentum" => Ok(Optimizer::momentum(0.01, 0.9)),
        "adam" => Ok(Optimizer::adam(0.001)),
        _ => Err(format!("there is no optimizer {text}; choose sgd, momentum or adam")),
    }
}

/// `NAME=ROLE`, or why it is none.
///
/// # Errors
/// Where it is none.
pub fn parse_role(text: &str) -> Result<(String, Role), String> {
    let (name, role) = text.rsplit_once('=').ok_or("expected NAME=ROLE")?;
    let role = match role {
        "parameter" => Role::Parameter,
        "state" => Role::OptimizerState,
        "input" => Role::Input,
        "constant" => Role::Constant,
        _ => return Err(format!("there is no role {role}; choose parameter, state, input or constant")),
    };
    Ok((name.into(), role))
}

/// `NAME=N`, or why it is none.
///
/// # Errors
/// Where it is none.
pub fn parse_size(text: &str) -> Result<(String, u64), String> {
    let (name, size) = text.split_once('=').ok_or("expected NAME=N")?;
    let size = size.parse().ok().filter(|&n| n > 0).ok_or_else(|| format!("{size} is no size"))?;
    Ok((name.into(), size))
}

/// Seconds that can be waited.
///
/// # Errors
/// Where they cannot.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is not a time that can be waited"))
}

/// By how much a device may have more than its share: a number from 0 on.
///
/// # Errors
/// Where it is none.
pub fn parse_balance(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("{text} is not a number"))?;
    if share.is_finite() && share >= 0.0 {
        Ok(share)
    } else {
        Err(format!("{text} is not a share: give 0.1 for a tenth"))
    }
}

impl Ask {
    /// A model on a machine, all else as usual.
    pub fn of(model: &str, machine: &str) -> Self {
        Self {
            model: model.into(),
            text: None,
            machine: machine.into(),
            batch: None,
            roles: Vec::new(),
            opaque: Vec::new(),
            dims: Vec::new(),
            loss: onnx::Loss::default(),
            inference: false,
            optimizer: Optimizer::sgd(0.01),
            costs: None,
            untied: false,
        }
    }

    /// Reads and builds what is named.
    ///
    /// # Errors
    /// Where that cannot be done; the message names file, place, reason and remedy.
    pub fn open(&self) -> anyhow::Result<Request> {
        let start = Instant::now();
        let machine = open_machine(&self.machine)?;
        let mut request = Request {
            graph: Graph::default(),
            program: None,
            notes: Vec::new(),
            stored: None,
            machine,
            spmd: self.text.is_some(),
            asked: self.asked(),
            costs: self.costs.as_deref().map(read_costs).transpose()?,
            untied: self.untied,
            start,
        };
        match &self.text {
            Some(text) if is_json(Path::new(&self.model)) => {
                request.graph = self.read_step(text.as_bytes())?
            }
            Some(text) => self.read_text(Path::new(&self.model), text.clone().into(), &mut request)?,
            None if is_path(&self.model) => self.read_model(&mut request)?,
            None => request.graph = self.build()?,
        }
        Ok(request)
    }

    /// How model and machine are asked for, so that a plan can be opened again.
    fn asked(&self) -> PlanRequest {
        PlanRequest {
            model: self.model.clone(),
            text: self.text.clone(),
            batch: self.batch,
            optimizer: self.optimizer,
            machine: self.machine.clone(),
            costs: self.costs.clone(),
            roles: self.roles.clone(),
            opaque: self.opaque.clone(),
            dims: self.dims.clone(),
            loss: (self.loss != onnx::Loss::default()).then(|| self.loss.name().into()),
            inference: self.inference,
        }
    }

    fn build(&self) -> anyhow::Result<Graph> {
        anyhow::ensure!(self.dims.is_empty(), "--dim is for ONNX files; built-in models have options");
        let training = !self.inference;
        let options = BuildOptions { batch: self.batch, optimizer: self.optimizer, training };
        Ok(zoo::build(&self.model, &options)?)
    }

    fn read_model(&self, request: &mut Request) -> anyhow::Result<()> {
        let path = Path::new(&self.model);
        if has_extension(path, "onnx") {
            let imported = self.read_onnx(path)?;
            request.stored = Some(StoredValues::new(path, imported.sources));
            (request.graph, request.notes) = (imported.graph, imported.notes);
            return Ok(());
        }
        let known = is_json(path) || is_stablehlo(path);
        anyhow::ensure!(
            known,
            "{}: only .onnx, .mlir, .stablehlo and graphs in .json can be read so far",
            path.display()
        );
        if is_stablehlo(path) {
            return self.read_text(path, read(path)?, request);
        }
        self.fixed_sizes(path)?;
        request.graph = self.read_step(&read(path)?)?;
        Ok(())
    }

    /// Reads a graph; what is no training step yet becomes one.
    fn read_step(&self, text: &[u8]) -> anyhow::Result<Graph> {
        let graph = Graph::from_json(text).with_context(|| self.model.clone())?;
        // A file whose first output is no loss is no step to be: it is planned as it is.
        let trains = |loss: &TensorId| {
            let ty = &graph.tensor(*loss).ty;
            self.text.is_some() || (ty.rank() == 0 && ty.dtype.is_float())
        };
        let forward = graph.gradients.is_empty() && !self.inference;
        let Some(loss) = graph.loss().filter(|loss| forward && trains(loss)) else {
            return Ok(graph);
        };
        let mut builder = GraphBuilder::resume(graph);
        train(&mut builder, loss, &self.optimizer).with_context(|| self.model.clone())?;
        Ok(builder.finish())
    }

    fn fixed_sizes(&self, path: &Path) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.batch.is_none() && self.dims.is_empty(),
            "{}: the sizes in such a file are fixed; leave --batch and --dim out",
            path.display()
        );
        Ok(())
    }

    fn read_text(&self, path: &Path, bytes: Vec<u8>, request: &mut Request) -> anyhow::Result<()> {
        self.fixed_sizes(path)?;
        anyhow::ensure!(
            !self.inference,
            "{}: a program is planned as it is; leave --inference out",
            path.display()
        );
        let options = stablehlo::Options { roles: self.roles.clone(), opaque: self.opaque.clone() };
        let mut program = read_program(path, bytes, &options)?;
        request.graph = std::mem::take(&mut program.imported.graph);
        request.notes = std::mem::take(&mut program.imported.notes);
        request.program = Some(program);
        request.spmd = true;
        Ok(())
    }

    /// Reads an ONNX model.
    fn read_onnx(&self, path: &Path) -> anyhow::Result<onnx::Imported> {
        let options = onnx::ImportOptions {
            batch: self.batch,
            dims: self.dims.clone(),
            constants: Vec::new(),
            loss: self.loss,
            optimizer: self.optimizer,
            training: !self.inference,
        };
        let external = NeighbouringFiles::of(path);
        onnx::import(&read(path)?.into(), &options, &external).with_context(|| path.display().to_string())
    }
}

impl Request {
    /// Builds the search problem, as large as the control's memory allows.
    ///
    /// # Errors
    /// Where there is none, say, for a batch that does not divide.
    pub fn problem(&self, control: &Control<'_>) -> anyhow::Result<Problem<'_>> {
        // Nobody who stops here would have a plan; a search that is stopped has one at once.
        let control = Control { memory_bytes: control.memory_bytes, ..Control::new() };
        Ok(Problem::within(&self.graph, &self.machine, self.costs.as_ref(), self.untied, &control)?)
    }

    /// Measured operator costs, where there are some.
    pub fn costs(&self) -> Option<&CostFile> {
        self.costs.as_ref()
    }

    /// Times of the model's ops, split over a mesh of such devices.
    ///
    /// # Errors
    /// Where the costs were measured on another device.
    pub fn times<'a>(
        &'a self,
        device: &'a Device,
        shapes: &'a [OpShapes],
        mesh: &'a Mesh,
    ) -> anyhow::Result<OpTimes<'a>> {
        let times = OperatorTimes::new(device, self.costs.as_ref())?;
        Ok(OpTimes::new(times, &self.graph, shapes, mesh))
    }

    /// A mesh of the machine with no search problem: enough to simulate a plan on it.
    ///
    /// # Errors
    /// As [`Request::problem`].
    pub fn bare(&self, mesh: Mesh, untied: bool) -> anyhow::Result<Problem<'_>> {
        Ok(Problem::bare(&self.graph, &self.machine, self.costs.as_ref(), mesh, untied)?)
    }

    /// Builds what a strategy needs: SoyBean and `place` work on prime axes and search no network.
    ///
    /// # Errors
    /// As [`Request::problem`].
    pub fn problem_of(&self, strategy: &Strategy, control: &Control<'_>) -> anyhow::Result<Problem<'_>> {
        match strategy.space {
            Space::Tilings(_) => self.prime(),
            Space::Whole => self.bare(self.machine.mesh().clone(), self.untied),
            _ => self.problem(control),
        }
    }

    /// The machine's prime axes, with no search problem.
    ///
    /// # Errors
    /// As [`Request::problem`].
    pub fn prime(&self) -> anyhow::Result<Problem<'_>> {
        Ok(Problem::prime(&self.graph, &self.machine, self.costs.as_ref())?)
    }
}

fn has_extension(path: &Path, name: &str) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(name))
}

fn is_json(path: &Path) -> bool {
    has_extension(path, "json")
}

/// Whether a model is a file and not a name with options.
pub fn is_path(model: &str) -> bool {
    let name = model.split(':').next().unwrap_or(model);
    name.contains(['/', '\\', '.'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forward_pass_that_is_at_hand_is_trained_unless_only_inference_is_wanted() {
        let forward =
            Ask { inference: true, ..Ask::of("mlp:batch=8,hidden=16", "flat:2") }.open().unwrap().graph;
        let ask =
            |inference| Ask { text: Some(forward.to_json()), inference, ..Ask::of("program.json", "flat:2") };
        assert_eq!(ask(true).open().unwrap().graph, forward);
        let step = ask(false).open().unwrap().graph;
        // So is one in a file.
        let folder = std::env::temp_dir().join(format!("shardwright-forward-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("forward.json");
        std::fs::write(&file, forward.to_json()).unwrap();
        assert_eq!(Ask::of(file.to_str().unwrap(), "flat:2").open().unwrap().graph, step);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(step.gradients.len(), forward.parameters().count());
        assert_eq!(step.carries.len(), forward.parameters().count());
        let wrong = Ask { text: Some("{}".into()), ..Ask::of("program.json", "flat:2") };
        assert!(
            format!("{:#}", wrong.open().err().unwrap()).starts_with("program.json: not a Shardwright graph")
        );
    }

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

//! The inputs of a request: everything that is named is read and built.

use crate::{
    clock::WallClock,
    external::{NeighbouringFiles, StoredValues},
    files::{open_machine, read, read_costs},
    request::{ModelSpec, Request},
    stablehlo::{Program, is_stablehlo, read_program},
};
use anyhow::Context as _;
use shardwright_cost::{CostFile, Engine};
use shardwright_graph::{GradientPrecision, Graph, GraphBuilder, Optimizer, TensorId, train, updates_last};
use shardwright_machine::{Bytes, EngineName, Machine, Mesh, Tf32Use};
use shardwright_onnx as onnx;
use shardwright_plan::Context;
use shardwright_search::Clock;
use shardwright_stablehlo as stablehlo;
use shardwright_strategies::Planner;
use shardwright_suggest::did_you_mean;
use shardwright_zoo::{self as zoo, BuildOptions, Precision};
use std::path::Path;
use std::time::Duration;

/// The learning rate of files without an optimizer.
const FILE_LEARNING_RATE: f64 = 0.01;

/// Everything that a plan starts from.
pub struct Inputs {
    /// The request.
    pub request: Request,
    /// The model's step; where a plan was made or opened, the plan's variant of it.
    pub graph: Graph,
    /// The program, where the step comes from StableHLO.
    pub program: Option<Program>,
    /// Notes of the model's reader.
    pub notes: Vec<String>,
    /// Contents of weights and constants, where the step comes from an ONNX file that has them.
    pub stored: Option<StoredValues>,
    /// The machine.
    pub machine: Machine,
    /// Measured operator costs.
    pub costs: Option<CostFile>,
    /// Whether the model comes from an engine that runs one program on all devices (JAX, PyTorch) and goes back there.
    pub spmd: bool,
    /// When reading began, on the wall clock.
    pub(crate) start: Duration,
}

impl Request {
    /// Reads and builds what is named.
    ///
    /// # Errors
    /// Where that cannot be done; the message names file, position, reason and remedy.
    pub fn open(&self) -> anyhow::Result<Inputs> {
        let start = WallClock::global().now();
        let machine = self.precise_machine(open_machine(&self.machine)?)?;
        let mut inputs = Inputs {
            request: self.clone(),
            graph: Graph::default(),
            program: None,
            notes: Vec::new(),
            stored: None,
            machine,
            costs: self.costs.as_deref().map(read_costs).transpose()?,
            spmd: self.model.text.is_some(),
            start,
        };
        self.model.read_into(&mut inputs)?;
        self.check_precision(&inputs)?;
        self.apply_run(&mut inputs)?;
        let engine = inputs.machine.slowest().engine.and_then(Engine::of);
        // A captured PyTorch module is trained by an optimizer of its own, after the backward pass.
        if inputs.graph.op_by_op || engine.is_some_and(|engine| engine.updates_last) && !inputs.spmd {
            inputs.graph = updates_last(&inputs.graph);
        }
        Ok(inputs)
    }

    /// Checks that costs which learned from a run are of this model, engine and release, and slows collectives down as in the run.
    fn apply_run(&self, inputs: &mut Inputs) -> anyhow::Result<()> {
        let Some(run) = inputs.costs.as_ref().and_then(|costs| costs.run.clone()) else { return Ok(()) };
        let file = self.costs.as_deref().unwrap_or_default();
        anyhow::ensure!(
            run.weights == weights_fingerprint(&inputs.graph),
            "{file}: learned from a run of another model ({}); learn from a trace of this one with `plan --refine`",
            run.model
        );
        let engine = inputs.machine.slowest().engine;
        let named = |engine: Option<EngineName>| engine.map_or("no engine", EngineName::name);
        anyhow::ensure!(
            run.engine == engine,
            "{file}: learned for {}, but the plan is for {}; give the same --engine, or learn again with `plan --refine`",
            named(run.engine),
            named(engine)
        );
        let release = env!("CARGO_PKG_VERSION");
        anyhow::ensure!(
            run.release == release,
            "{file}: its factors are relative to the predictions of release {}, and this is {release}; learn again with `plan --refine`",
            run.release
        );
        let mut spec = inputs.machine.spec().clone();
        for (kind, factor) in run.collectives {
            *spec.slowdown.entry(kind).or_insert(1.0) *= factor;
        }
        inputs.machine = Machine::try_from(spec)?;
        Ok(())
    }

    /// The machine as it multiplies f32 tensors in the request's precision. Measured times are those of IEEE arithmetic.
    fn precise_machine(&self, machine: Machine) -> anyhow::Result<Machine> {
        let mut spec = machine.spec().clone();
        if self.engine.is_some() {
            spec.device.engine = self.engine;
            spec.mixed.iter_mut().for_each(|mixed| mixed.device.engine = self.engine);
        }
        let engine = spec.device.engine.and_then(Engine::of);
        if engine.is_some_and(|engine| !engine.overlap) {
            spec.device.overlap = false;
            spec.mixed.iter_mut().for_each(|mixed| mixed.device.overlap = false);
        }
        let many = spec.device_count() > 1;
        for device in std::iter::once(&mut spec.device).chain(spec.mixed.iter_mut().map(|m| &mut m.device)) {
            let taken = engine.map_or(0, |engine| engine.reserves.bytes(device.memory.0, many));
            // A device too small for the reserve keeps its own: the limit then says that nothing fits.
            device.reserve = device.reserve.max(Bytes(taken).min(Bytes(device.memory.0.saturating_sub(1))));
        }
        let usual = |engine: &Engine| if engine.tf32_products { Tf32Use::All } else { Tf32Use::Convolutions };
        let used = match self.model.precision {
            Some(Precision::Tf32) => Some(Tf32Use::All),
            Some(Precision::Ieee) => Some(Tf32Use::Off),
            _ => engine.map(usual).or(self.costs.is_some().then_some(Tf32Use::Off)),
        };
        let Some(used) = used else { return Ok(Machine::try_from(spec)?) };
        if self.model.precision == Some(Precision::Tf32) {
            self.states_rate(&machine, "tf32")?;
            anyhow::ensure!(
                self.costs.is_none() || engine.is_some(),
                "--precision tf32: without an engine, f32 products are priced as measured without TF32; name an --engine, or leave --costs out"
            );
        }
        // A machine that states no rate in TF32 multiplies as it is.
        if spec.device.peak.tf32.is_none() && spec.mixed.iter().all(|mixed| mixed.device.peak.tf32.is_none())
        {
            return Ok(Machine::try_from(spec)?);
        }
        spec.device.tf32 = used;
        spec.mixed.iter_mut().for_each(|mixed| mixed.device.tf32 = used);
        Ok(Machine::try_from(spec)?)
    }

    /// Refuses a precision that the device states no rate for.
    fn states_rate(&self, machine: &Machine, format: &str) -> anyhow::Result<()> {
        let device = machine.slowest();
        let peak = &device.peak;
        let stated = match format {
            "tf32" => peak.tf32,
            "f8" => peak.f8,
            _ => peak.bf16,
        };
        anyhow::ensure!(
            stated.is_some(),
            "--precision {}: the device {} of machine {} states no rate in {format} (`peak.{format}`); use --precision {}",
            self.model.precision.map_or("fp8", Precision::name),
            device.name,
            machine.name(),
            if peak.bf16.is_some() && format == "f8" { "mixed" } else { "f32" }
        );
        Ok(())
    }

    /// Refuses a step whose products the machine cannot compute.
    fn check_precision(&self, inputs: &Inputs) -> anyhow::Result<()> {
        if inputs.graph.ops.iter().any(|node| node.op.operator().is_eight_bit()) {
            self.states_rate(&inputs.machine, "f8")?;
        }
        match self.model.precision {
            Some(Precision::Bf16 | Precision::Mixed) => self.states_rate(&inputs.machine, "bf16"),
            _ => Ok(()),
        }
    }
}

/// A fingerprint of the shapes and types of a model's weights. It does not depend on the batch, nor on where the model came from.
pub fn weights_fingerprint(graph: &Graph) -> String {
    let mut weights: Vec<String> = graph.parameters().map(|t| graph.tensor(t).ty.to_string()).collect();
    weights.sort_unstable();
    // FNV-1a, 64 bits.
    let bytes = weights.iter().flat_map(|ty| ty.bytes().chain([b';']));
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

/// Names a graph after its file where the name says nothing: exporters call most of theirs `main_graph` or `jit_f`.
fn name_after(path: &Path, graph: &mut Graph) {
    let says_nothing = graph.name.starts_with("jit_")
        || matches!(&graph.name[..], "" | "main" | "main_graph" | "torch_jit" | "torch-jit-export");
    if let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|_| says_nothing) {
        graph.name = name.into();
    }
}

impl ModelSpec {
    fn read_into(&self, inputs: &mut Inputs) -> anyhow::Result<()> {
        let path = Path::new(&self.name);
        match &self.text {
            Some(text) if is_json(path) => self.read_json(path, text.as_bytes(), inputs)?,
            Some(text) => self.read_text(path, text.clone().into(), inputs)?,
            None if is_path(&self.name) => self.read_model(inputs)?,
            None => {
                anyhow::ensure!(
                    self.dims.is_empty(),
                    "--dim is for ONNX files; built-in models have options"
                );
                let name = self.name.split(':').next().unwrap_or_default();
                let usual = zoo::usual_optimizer(&self.name);
                let options = self.build_options(zoo::is_preset(name), usual, inputs);
                inputs.graph = zoo::build(&self.name, &options)?;
            }
        }
        Ok(())
    }

    /// Options of a built-in model or of a config. Published models are mixed, unless the device has no bf16.
    fn build_options(&self, published: bool, usual: Optimizer, inputs: &mut Inputs) -> BuildOptions {
        let mut precision = self.precision;
        let given = precision.is_some() || self.name.contains("dtype=");
        if published && !given && inputs.machine.slowest().peak.bf16.is_none() {
            precision = Some(Precision::F32);
            inputs.notes.push(format!(
                "the device {} has no bf16, so the model is planned in f32",
                inputs.machine.slowest().name
            ));
        }
        let optimizer = self.optimizer.unwrap_or(usual);
        let (batch, seq, gradients) = (self.batch, self.seq, self.gradients);
        BuildOptions { batch, seq, precision, gradients, optimizer, training: !self.inference }
    }

    /// Reads a model's config, or a graph.
    fn read_json(&self, path: &Path, text: &[u8], inputs: &mut Inputs) -> anyhow::Result<()> {
        if !zoo::is_config(text) {
            inputs.graph = self.read_step(text)?;
            return if self.text.is_none() { self.fixed_sizes(path) } else { Ok(()) };
        }
        anyhow::ensure!(self.dims.is_empty(), "{}: --dim is for ONNX files", self.name);
        let options = self.build_options(true, zoo::adam(), inputs);
        inputs.graph = zoo::build_config(&self.name, text, &options).with_context(|| self.name.clone())?;
        if let (Some(seq), Some(positions)) = (self.seq, zoo::config_positions(text))
            && seq > positions
        {
            inputs.notes.push(format!(
                "--seq {seq} is longer than max_position_embeddings = {positions} of the config; rotary positions allow it"
            ));
        }
        Ok(())
    }

    /// The optimizer of a file without one.
    fn file_optimizer(&self) -> Optimizer {
        self.optimizer.unwrap_or(Optimizer::sgd(FILE_LEARNING_RATE))
    }

    fn read_model(&self, inputs: &mut Inputs) -> anyhow::Result<()> {
        let path = Path::new(&self.name);
        if has_extension(path, "onnx") {
            let imported = self.read_onnx(path)?;
            inputs.stored = Some(StoredValues::new(path, imported.sources));
            (inputs.graph, inputs.notes) = (imported.graph, imported.notes);
            name_after(path, &mut inputs.graph);
            return Ok(());
        }
        let known = is_json(path) || is_stablehlo(path);
        // `meta-llama/Llama-3-8B` is a name, but not one of ours.
        let name = path.file_name().and_then(|name| name.to_str()).filter(|_| !path.exists());
        anyhow::ensure!(
            known,
            "{}: only .onnx, .mlir, .stablehlo, and configs and graphs in .json can be read so far{}",
            path.display(),
            name.map_or_else(String::new, |name| did_you_mean(name, zoo::names()))
        );
        if is_stablehlo(path) {
            self.read_text(path, read(path)?, inputs)?;
            name_after(path, &mut inputs.graph);
            return Ok(());
        }
        self.read_json(path, &read(path)?, inputs)
    }

    /// Reads a graph; what is no training step yet becomes one.
    fn read_step(&self, text: &[u8]) -> anyhow::Result<Graph> {
        let graph = Graph::from_json(text).with_context(|| self.name.clone())?;
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
        train(&mut builder, loss, &self.file_optimizer()).with_context(|| self.name.clone())?;
        Ok(builder.finish())
    }

    fn fixed_sizes(&self, path: &Path) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.batch.is_none() && self.dims.is_empty() && self.seq.is_none(),
            "{}: the sizes in such a file are fixed; leave --batch, --seq and --dim out",
            path.display()
        );
        self.fixed_types(path)
    }

    /// Refuses options that change the types of a file's tensors. How f32 is multiplied is no such change.
    fn fixed_types(&self, path: &Path) -> anyhow::Result<()> {
        let products_only = |precision: Precision| matches!(precision, Precision::Tf32 | Precision::Ieee);
        anyhow::ensure!(
            self.precision.is_none_or(products_only) && self.gradients == GradientPrecision::default(),
            "{}: such a file states its own types; leave --precision (except tf32 and ieee) and --gradients out",
            path.display()
        );
        Ok(())
    }

    fn read_text(&self, path: &Path, bytes: Vec<u8>, inputs: &mut Inputs) -> anyhow::Result<()> {
        self.fixed_sizes(path)?;
        anyhow::ensure!(
            !self.inference,
            "{}: a program is planned as it is; leave --inference out",
            path.display()
        );
        let options = stablehlo::ImportOptions {
            roles: self.roles.clone(),
            opaque: self.opaque.clone(),
            rules: self.rules.clone(),
            fuse_attention: !self.plain_attention,
        };
        let mut program = read_program(path, bytes, &options)?;
        inputs.graph = std::mem::take(&mut program.imported.graph);
        inputs.notes = std::mem::take(&mut program.imported.notes);
        inputs.program = Some(program);
        inputs.spmd = true;
        Ok(())
    }

    /// Reads an ONNX model.
    fn read_onnx(&self, path: &Path) -> anyhow::Result<onnx::ImportedModel> {
        anyhow::ensure!(
            self.seq.is_none(),
            "{}: an ONNX file states its sizes by name (--dim); leave --seq out",
            path.display()
        );
        self.fixed_types(path)?;
        let options = onnx::ImportOptions {
            batch: self.batch,
            dims: self.dims.clone(),
            constants: Vec::new(),
            loss: self.loss,
            optimizer: self.file_optimizer(),
            training: !self.inference,
            fuse_attention: !self.plain_attention,
        };
        let external = NeighbouringFiles::of(path);
        onnx::import(&read(path)?.into(), &options, &external).with_context(|| path.display().to_string())
    }
}

impl Inputs {
    /// The planner of these inputs.
    pub fn planner(&self) -> Planner<'_> {
        Planner::new(&self.graph, &self.machine, self.costs.as_ref(), self.request.untied)
    }

    /// The context on a mesh of the machine: prices and simulates any assignment on it.
    ///
    /// # Errors
    /// Where the graph has no ops, or the costs are of another device.
    pub fn context(&self, mesh: Mesh, untied: bool) -> anyhow::Result<Context<'_>> {
        Ok(Context::new(&self.graph, &self.machine, self.costs.as_ref(), mesh, untied)?)
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
    // An extension is made of letters: `qwen2.5-72b` is a name.
    let extension = name
        .rsplit_once('.')
        .is_some_and(|(_, end)| !end.is_empty() && end.bytes().all(|b| b.is_ascii_alphabetic()));
    name.contains(['/', '\\']) || extension
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::DType;

    fn open(model: &str, text: Option<String>, inference: bool) -> anyhow::Result<Inputs> {
        let mut request = Request::new(model, "flat:2");
        (request.model.text, request.model.inference) = (text, inference);
        request.open()
    }

    #[test]
    fn a_forward_pass_that_is_given_is_trained_unless_only_inference_is_asked_for() {
        let forward = open("mlp:batch=8,hidden=16", None, true).unwrap().graph;
        let given = |inference| open("program.json", Some(forward.to_json()), inference).unwrap().graph;
        assert_eq!(given(true), forward);
        let step = given(false);
        // So is one in a file.
        let folder = std::env::temp_dir().join(format!("shardwright-forward-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("forward.json");
        std::fs::write(&file, forward.to_json()).unwrap();
        assert_eq!(open(file.to_str().unwrap(), None, false).unwrap().graph, step);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(step.gradients.len(), forward.parameters().count());
        assert_eq!(step.carries.len(), forward.parameters().count());
        // A captured PyTorch module is updated by an optimizer of its own, after the backward pass.
        let captured = Graph { op_by_op: true, ..forward.clone() };
        let step = open("program.json", Some(captured.to_json()), false).unwrap().graph;
        let updates = |node: &shardwright_graph::Node| node.phase == shardwright_graph::Phase::Update;
        let first = step.ops.iter().position(updates).unwrap();
        assert!(step.ops[first..].iter().all(updates));
        let wrong = open("program.json", Some("{}".into()), false).err().unwrap();
        assert!(format!("{wrong:#}").starts_with("program.json: not a Shardwright graph"));
    }

    #[test]
    fn a_config_is_a_model_whose_precision_the_machine_must_have() {
        let config = r#"{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 24, "vocab_size": 40}"#;
        let open = |machine: &str, change: &dyn Fn(&mut ModelSpec)| {
            let mut request = Request::new("config.json", machine);
            request.model.text = Some(config.into());
            (request.model.batch, request.model.seq) = (Some(4), Some(8));
            change(&mut request.model);
            request.open()
        };
        let inputs = open("8xh100", &|_| ()).unwrap();
        let graph = &inputs.graph;
        assert_eq!(graph.step_size().tokens, Some(32));
        // Mixed with Adam: a master copy and two moments for each weight.
        let state = graph.sources(shardwright_graph::Role::OptimizerState).count();
        assert_eq!(state, 3 * graph.parameters().count());
        // No bf16: f32, with a note. Asked for, it is an error before any search.
        let inputs = open("16xv100", &|_| ()).unwrap();
        assert!(inputs.notes[0].contains("V100 has no bf16"), "{:?}", inputs.notes);
        let wrong =
            open("16xv100", &|model| model.precision = Some(Precision::Mixed)).err().unwrap().to_string();
        assert!(
            wrong.contains("--precision mixed: the device V100") && wrong.contains("use --precision f32"),
            "{wrong}"
        );
        let wrong =
            open("8xa100", &|model| model.precision = Some(Precision::Fp8)).err().unwrap().to_string();
        assert!(wrong.contains("states no rate in f8") && wrong.contains("--precision mixed"), "{wrong}");
        let rounded = |inputs: Inputs| -> Vec<String> {
            let nodes = inputs.graph.ops.iter().filter(|node| node.op.operator().is_eight_bit());
            nodes.map(|node| inputs.graph.layers[node.layer.index()].name.clone()).collect()
        };
        let fp8 = |model: &mut ModelSpec| {
            (model.precision, model.batch, model.seq) = (Some(Precision::Fp8), Some(16), Some(16));
        };
        let names = rounded(open("8xh100", &fp8).unwrap());
        assert!(names.contains(&"blocks.0.attn.q".to_string()), "{names:?}");
        assert!(names.iter().all(|name| name != "logits"), "{names:?}");
        assert_eq!(rounded(open("8xh100", &|_| ()).unwrap()), Vec::<String>::new());
        // Gradients in f32 need master weights.
        let wide = open("8xh100", &|model| model.gradients = GradientPrecision::F32).unwrap().graph;
        assert!(wide.gradients.iter().all(|pair| wide.tensor(pair.gradient).ty.dtype == DType::F32));
        let wrong = open("8xh100", &|model| {
            (model.gradients, model.precision) = (GradientPrecision::F32, Some(Precision::Bf16));
        });
        assert!(format!("{:#}", wrong.err().unwrap()).contains("use dtype=mixed"));
        let wrong = open("8xh100", &|model| model.seq = Some(0)).err().unwrap();
        assert!(format!("{wrong:#}").contains("seq=0"), "{wrong:#}");
    }

    #[test]
    fn tf32_is_how_a_machine_multiplies_f32() {
        let on_engine = |machine: &str, precision, costs: Option<&str>, engine| {
            let mut request = Request::new("vgg16:batch=8", machine);
            (request.model.precision, request.costs) = (precision, costs.map(String::from));
            request.engine = engine;
            request.open().map(|inputs| inputs.machine.spec().device.tf32)
        };
        let used = |machine: &str, precision, costs| on_engine(machine, precision, costs, None);
        // Engines have modes of their own, which are measured too.
        let engines = [
            (EngineName::TorchEager, Tf32Use::Convolutions),
            (EngineName::TorchCompile, Tf32Use::Convolutions),
            (EngineName::Xla, Tf32Use::All),
        ];
        for (engine, tf32) in engines {
            assert_eq!(on_engine("8xh200", None, Some("h200"), Some(engine)).unwrap(), tf32);
            let wanted = Some(Precision::Tf32);
            assert_eq!(on_engine("8xh200", wanted, Some("h200"), Some(engine)).unwrap(), Tf32Use::All);
        }
        assert_eq!(used("8xh200", None, None).unwrap(), Tf32Use::Convolutions);
        assert_eq!(used("8xh200", Some(Precision::Tf32), None).unwrap(), Tf32Use::All);
        assert_eq!(used("8xh200", Some(Precision::Ieee), None).unwrap(), Tf32Use::Off);
        assert_eq!(used("8xh200", None, Some("h200")).unwrap(), Tf32Use::Off, "measured without TF32");
        let wrong = |machine, costs| used(machine, Some(Precision::Tf32), costs).unwrap_err().to_string();
        assert!(wrong("8xh200", Some("h200")).contains("leave --costs out"));
        assert!(
            wrong("16xv100", None).contains("V100") && wrong("16xv100", None).contains("--precision f32")
        );
    }

    #[test]
    fn models_with_options_are_not_paths() {
        for name in
            ["vgg16", "mlp:batch=400,hidden=300", "gpt:dropout=0.1", "qwen2.5-72b", "llama3.2-1b:seq=64"]
        {
            assert!(!is_path(name), "{name}");
        }
        for path in ["./vgg16", "a.json", "models/x.onnx", "x.onnx"] {
            assert!(is_path(path), "{path}");
        }
    }
}

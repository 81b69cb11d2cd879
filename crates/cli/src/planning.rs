//! What `plan`, `compare` and `network` have in common: the arguments that say model, machine, costs and the limits of
//! the search.

use crate::interrupt;
use shardwright_frontend::onnx;
use shardwright_graph::{Optimizer, Role};
use shardwright_machine::Bytes;
use shardwright_plan::{Demands, PlanRequest, Wish, strategy::Strategy};
use shardwright_request::{
    Ask, Search, parse_balance, parse_optimizer, parse_role, parse_seconds, parse_size,
};
use shardwright_search::Control;
use std::time::Duration;

pub use shardwright_request::{Request, read, show_bytes, show_seconds};

/// What is planned, and for what.
#[derive(Clone, clap::Args)]
pub struct PlanningArgs {
    /// A built-in model with options (`vgg16`, `mlp:batch=400,hidden=300`), or a file: .onnx, .mlir or .stablehlo
    /// (text as JAX prints it, also .gz), .json (our graph)
    pub model: String,
    /// What is called that, where a plan brings its model along
    #[arg(skip)]
    pub text: Option<String>,
    /// A built-in machine, `flat:N`, or a .toml file; `NAME:K` for its first K devices
    #[arg(long, default_value = "p100x16")]
    pub machine: String,
    /// Samples per step, over all devices
    #[arg(long)]
    pub batch: Option<u64>,
    /// What an argument of a StableHLO program is for: `params.*=parameter`, `arg3=input`; roles are parameter,
    /// state, input and constant; may be repeated
    #[arg(long, value_name = "NAME=ROLE", value_parser = parse_role)]
    pub role: Vec<(String, Role)>,
    /// Plan custom calls to this target replicated: for pure functions; may be repeated
    #[arg(long, value_name = "TARGET")]
    pub opaque: Vec<String>,
    /// The size of a dimension that an ONNX file leaves open; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = parse_size)]
    pub dim: Vec<(String, u64)>,
    /// What is trained of an ONNX model: cross-entropy, mse, output (its first output is the loss)
    #[arg(long, default_value = "cross-entropy")]
    pub loss: onnx::Loss,
    /// Only the forward pass, without loss and updates
    #[arg(long)]
    pub inference: bool,
    /// How weights are updated: sgd, momentum, adam
    #[arg(long, default_value = "sgd", value_parser = parse_optimizer)]
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
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub time: Duration,
    /// For --solver place: by how much a device may have more than its share of the work, `0.1` by default
    #[arg(long, value_name = "SHARE", value_parser = parse_balance)]
    pub balance: Option<f64>,
    /// Let every device run every op, as JAX and PyTorch want it: no layers on some devices only; always so for StableHLO
    #[arg(long)]
    pub spmd: bool,
    /// For --solver mcmc and place: end every chain after this many proposals, whatever the time
    #[arg(long, value_name = "N")]
    pub proposals: Option<u64>,
    /// The most of this computer's memory that the search's tables may take: `4GiB`; half of what is free by default
    #[arg(long, value_parser = Bytes::parse)]
    pub ram: Option<Bytes>,
    /// How many threads to use; all cores by default
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Seed of all randomness
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

impl PlanningArgs {
    /// The arguments of `MODEL` on the default machine.
    pub fn of(model: &str, batch: u64) -> Self {
        Self {
            model: model.into(),
            text: None,
            machine: "p100x16".into(),
            batch: Some(batch),
            role: Vec::new(),
            opaque: Vec::new(),
            dim: Vec::new(),
            loss: onnx::Loss::default(),
            inference: false,
            optimizer: Optimizer::sgd(0.01),
            costs: None,
            memory: None,
            untied: false,
            fix: Vec::new(),
            time: Duration::from_secs(60),
            proposals: None,
            balance: None,
            ram: None,
            spmd: false,
            threads: 0,
            seed: 0,
        }
    }

    /// Reads and builds what the arguments name.
    pub fn open(&self) -> anyhow::Result<Request> {
        let ask = Ask {
            model: self.model.clone(),
            text: self.text.clone(),
            machine: self.machine.clone(),
            batch: self.batch,
            roles: self.role.clone(),
            opaque: self.opaque.clone(),
            dims: self.dim.clone(),
            loss: self.loss,
            inference: self.inference,
            optimizer: self.optimizer,
            costs: self.costs.clone(),
            untied: self.untied,
        };
        ask.open()
    }

    /// The same arguments, with the model, the machine and the costs that a plan was made for.
    pub fn for_request(&self, asked: PlanRequest) -> anyhow::Result<Self> {
        let PlanRequest {
            model,
            text,
            batch,
            optimizer,
            machine,
            costs,
            roles,
            opaque,
            dims,
            loss,
            inference,
        } = asked;
        let loss = loss.map_or(Ok(onnx::Loss::default()), |loss| loss.parse()).map_err(anyhow::Error::msg)?;
        let (role, dim) = (roles, dims);
        let given = self.clone();
        Ok(Self {
            model,
            text,
            batch,
            optimizer,
            machine,
            costs,
            role,
            opaque,
            dim,
            loss,
            inference,
            ..given
        })
    }

    /// What the plan has to keep, and what the search may take.
    pub fn search(&self) -> Search {
        let Self { memory, time, proposals, balance, ram, spmd, threads, seed, .. } = *self;
        Search { memory, fix: self.fix.clone(), time, proposals, balance, ram, spmd, threads, seed }
    }

    /// What the plan has to keep.
    pub fn demands(&self, request: &Request) -> Demands {
        self.search().demands(request)
    }

    /// Limits of a strategy's search; Ctrl-C ends it.
    pub fn control(&self, request: &Request, strategy: &Strategy) -> Control<'static> {
        self.search().control(request, strategy, interrupt::flag())
    }

    /// Runs `work` on as many threads as were asked for.
    pub fn on_threads<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        self.search().on_threads(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_asks_for_its_model_as_it_was_asked_for() {
        let asked = r#"{"model": "a.onnx", "batch": 4, "optimizer": {"sgd": {"lr": 0.5}}, "machine": "flat:2",
            "roles": [["x", "parameter"]], "opaque": ["f"], "dims": [["n", 3]], "loss": "mse", "inference": true}"#;
        let asked: PlanRequest = serde_json::from_str(asked).unwrap();
        let given = PlanningArgs::of("plan.json", 1);
        let told = given.for_request(asked.clone()).unwrap();
        assert_eq!((told.model.as_str(), told.machine.as_str(), told.batch), ("a.onnx", "flat:2", Some(4)));
        assert_eq!((told.role, told.opaque), (vec![("x".into(), Role::Parameter)], vec!["f".into()]));
        assert_eq!((told.dim, told.loss, told.inference), (vec![("n".into(), 3)], onnx::Loss::Mse, true));
        let wrong = PlanRequest { loss: Some("luck".into()), ..asked };
        assert!(given.for_request(wrong).err().unwrap().to_string().contains("there is no loss luck"));
    }
}

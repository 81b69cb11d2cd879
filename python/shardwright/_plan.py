"""`plan`, and its result, `Plan`."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

from . import _native
from ._progress import ProgressLine, show_seconds, wanted


class Plan:
    """One config per op, their predicted costs, and a proved lower bound.

    >>> import shardwright
    >>> p = shardwright.plan("alexnet", machine="p100x16", batch=512)
    >>> p.machine, p.devices
    ('p100x16', 16)
    >>> p.lower_bound <= p.objective
    True
    """

    def __init__(self, native: _native.PlanHandle) -> None:
        self._native = native
        self._json: str | None = None
        self._data: dict[str, Any] | None = None
        #: Warnings about the captured program.
        self.notes: list[str] = []

    def to_json(self) -> str:
        """The plan file as JSON text, as `shardwright plan -o` writes it.

        >>> import json, shardwright
        >>> json.loads(shardwright.plan("mlp", machine="flat:2").to_json())["devices"]
        2
        """
        if self._json is None:
            self._json = self._native.to_json()
        return self._json

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan file, for `shardwright explain`, `simulate`, `report`, `export` and `run`. It contains a step that
        was given as text. Models and machines in files are referenced by path."""
        _write(path, self.to_json())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of a plan file's text.

        >>> import shardwright
        >>> p = shardwright.plan("mlp", machine="flat:2")
        >>> shardwright.Plan.from_json(p.to_json()).configs() == p.configs()
        True
        """
        return cls(_native.load(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan file, as `save` and `shardwright plan -o` write it."""
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    @property
    def data(self) -> dict[str, Any]:
        """The plan file as Python values."""
        if self._data is None:
            self._data = json.loads(self.to_json())
        return self._data

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.data["model"])

    @property
    def machine(self) -> str:
        """The machine's name."""
        return str(self.data["machine"])

    @property
    def devices(self) -> int:
        """The machine's number of devices."""
        return int(self.data["devices"])

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis names and sizes, outermost first."""
        return {axis["name"]: axis["size"] for axis in self.data["axes"]}

    @property
    def step_seconds(self) -> float:
        """Predicted seconds per step."""
        return float(self.data["simulated"]["step_seconds"])

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of one device, in bytes."""
        return int(self.data["peak_memory_bytes"])

    @property
    def memory_limit_bytes(self) -> int | None:
        """The limit on the memory of one device, in bytes."""
        limit = self.data["memory_limit_bytes"]
        return None if limit is None else int(limit)

    @property
    def fits(self) -> bool:
        """Whether the plan keeps the memory limit, or, without one, fits the usable memory of a device."""
        return bool(self.data["fits"])

    @property
    def throughput(self) -> dict[str, float | None]:
        """`tokens_per_second`, `tokens_per_second_per_device`, `samples_per_second` and `mfu`; with a price also
        `cost_per_million_tokens` or `cost_per_million_samples`."""
        return dict(self.data["throughput"])

    @property
    def summary(self) -> str:
        """The answer in one line."""
        return str(self.data["summary"])

    @property
    def traffic_bytes(self) -> int:
        """Bytes sent per step, summed over devices."""
        return int(self.data["traffic_bytes"])

    @property
    def objective(self) -> int:
        """Picoseconds per step if all ops and all communication run one after the other."""
        return int(self.data["objective"])

    @property
    def lower_bound(self) -> int:
        """Picoseconds: no plan of the search space has a lower objective. Zero if nothing is proved."""
        return int(self.data["lower_bound"])

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / lower_bound: the plan is at most so far above the optimum. Infinite without a bound."""
        gap = self.data["gap"]
        return math.inf if gap is None else float(gap)

    @property
    def proved_optimal(self) -> bool:
        """Whether no plan of the search space has a lower objective."""
        return bool(self.data["proved_optimal"])

    @property
    def warnings(self) -> list[str]:
        """Warnings about the plan, its assumptions and the search."""
        return [*self.data["warnings"], *self.notes]

    @property
    def baselines(self) -> dict[str, float]:
        """Predicted seconds per step of the baselines, by name."""
        return {name: cost["step_seconds"] for name, cost in self.data["baselines"].items()}

    def configs(self) -> dict[str, str]:
        """The config of every layer: `n4·c4` splits the batch 4 ways and the output channels 4 ways."""
        return {layer["name"]: layer["config"] for layer in self.data["layers"]}

    def table(self, detail: str = "usual") -> str:
        """The plan as text; `detail` is "verdict", "usual" or "all" (every layer).

        >>> import shardwright
        >>> print(shardwright.plan("mlp", machine="flat:2").table("verdict"))  # doctest: +ELLIPSIS
        mlp... on flat:2: ...
        """
        return self._native.table(detail)

    def to_sdy(self) -> str:
        """The planned program in Shardy's dialect: the mesh, the shardings of arguments and results, and a sharding
        constraint on every planned value. Only for plans of StableHLO programs."""
        return self._native.to_sdy()

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report, one self-contained HTML page: summary, network, timeline, memory, ops and costs of alternatives.
        Written to `path` if given."""
        page = self._native.report()
        if path is not None:
            _write(path, page)
        return page

    def _repr_html_(self) -> str:
        """The plan in a notebook: verdict and table of layers."""
        cells = (
            f"<tr><td>{html.escape(layer['name'])}<td>{html.escape(layer['config'])}"
            f"<td>{show_seconds(layer['compute_seconds'])}<td>{show_seconds(layer['comm_seconds'])}"
            for layer in self.data["layers"]
        )
        return (
            f"<pre>{html.escape(self.table('verdict'))}</pre><details><summary>layers</summary><table>"
            "<tr><th>layer<th>config<th>compute<th>communication" + "".join(cells) + "</table></details>"
        )

    def __repr__(self) -> str:
        return f"<Plan of {self.model} on {self.machine}: {show_seconds(self.step_seconds)} per step>"


def _write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file atomically."""
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


class SearchOptions(TypedDict, total=False):
    """Options that `parallelize` (JAX and PyTorch) passes to `plan`, which documents them."""

    costs: str | None
    engine: str | None
    untied: bool
    fix: Mapping[str, object] | Iterable[str] | None
    time: float
    threads: int
    seed: int
    progress: bool | Callable[[float, float | None, float], None] | None


def _option(name: str, value: object) -> list[str]:
    """An option of `shardwright plan`: a flag for True, one option per item of a list, nothing for None and False."""
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}={item}" for item in value]
    return [f"--{name}={value}"]


# A number below this is no size of a device's memory in bytes.
_FEWEST_BYTES = 1 << 16


def _bytes(size: str | float | None, name: str) -> str | None:
    """A size as text; numbers are bytes.

    >>> _bytes(1e9, "memory"), _bytes("80GB", "memory")
    ('1000000000B', '80GB')
    """
    if size is None or isinstance(size, str):
        return size
    if not isinstance(size, (int, float)) and not hasattr(size, "__float__"):
        raise _native.PlanError(f'{name}={size!r} is no size; write {name}="80GB" or {name}=80e9')
    if not math.isfinite(size) or size < _FEWEST_BYTES:
        raise _native.PlanError(f'{name}={size} is {size} bytes; write {name}="{size}GB" for gigabytes, or {name}=80e9 for bytes')
    return f"{int(size)}B"


def _pairs(given: Mapping[str, object] | Iterable[str] | None) -> list[str]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [f"{name}={value}" for name, value in given.items()]
    return list(given)


def _file_name(text: str) -> str:
    """The file name of a program given as text. Its extension tells the format."""
    return "program.json" if text.lstrip().startswith("{") else "program.mlir"


def plan(
    model: str | os.PathLike[str],
    *,
    machine: str = "p100x16",
    memory: str | float | None = None,
    recompute: str | None = None,
    recompute_policy: str | None = None,
    solver: str = "auto",
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    gradients: str = "bf16",
    optimizer: str | None = None,
    price: str | float | None = None,
    costs: str | None = None,
    micro_batches: int | str | None = None,
    pipeline: int | str | None = None,
    schedule: str | None = None,
    untied: bool = False,
    engine: str | None = None,
    fix: Mapping[str, object] | Iterable[str] | None = None,
    roles: Mapping[str, object] | Iterable[str] | None = None,
    opaque: Iterable[str] = (),
    rules: Mapping[str, str] | Iterable[str] | None = None,
    dims: Mapping[str, object] | Iterable[str] | None = None,
    loss: str = "cross-entropy",
    inference: bool = False,
    plain_attention: bool = False,
    time: float = 60.0,
    threads: int = 0,
    seed: int = 0,
    proposals: int | None = None,
    balance: float | None = None,
    spmd: bool = False,
    ram: str | float | None = None,
    progress: bool | Callable[[float, float | None, float], None] | None = None,
) -> Plan:
    """Plans how to split a model's training step over a machine's devices.

    Args:
        model: a published model (`"llama3-8b"`), a built-in model with options (`"vgg16"`, `"mlp:batch=400,hidden=300"`), a file
            (`.onnx`, `.mlir`, `.stablehlo`, `.json`: a Hugging Face `config.json` or a graph), the text of a StableHLO module (`jax.jit(step).lower(...).as_text()`), or a graph as
            JSON text. If the graph is a forward pass, its first output is the loss.
        machine: GPUs (`"8xh100"`), a TPU slice (`"tpu-v5p-256"`), a built-in machine (`"flat:8"`), `"NAME:K"` for its first K
            devices, or a .toml file.
        memory: the memory limit of one device: `"16GiB"`, or bytes; `"none"` lifts it. By default the device's memory less
            its reserve.
        recompute: forward ops that are computed again in the backward pass: `"off"`, `"elementwise"` (activations, norms),
            `"selective"` (cheap ops and attention scores), `"full"` (whole blocks). By default none, unless the memory limit binds: then the fastest of these.
        recompute_policy: what chooses between keeping and recomputing: `"blocks"` (one policy for equal blocks, the default) or `"ops"`
            (every forward op for itself).
        solver: `"auto"`, `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ...
        batch: samples per step, for models without a fixed batch size.
        seq: tokens per sample, for built-in models of sequences and configs.
        precision: `"f32"`, `"tf32"`, `"ieee"`, `"bf16"`, `"mixed"` or `"fp8"`, for built-in models and configs. Published models and
            configs are mixed by default. Only `"tf32"` and `"ieee"` are for files too: they say how f32 is multiplied.
        gradients: what gradients are stored in with `"mixed"` and `"fp8"`: `"bf16"` or `"f32"`.
        optimizer: `"sgd"`, `"momentum"`, `"adam"` or `"adamw"`, for models without an optimizer; by default Adam for
            transformers, else plain gradient descent.
        price: the price of a device for an hour; `Plan.throughput` then has the cost of a million tokens or samples.
        costs: measured op times: a cost file, or a built-in device.
        pipeline: groups of devices that run stages of layers, or `"auto"`; `schedule` is the order of their passes (`"1f1b"`, `"gpipe"`, ...).
        micro_batches: equal passes over parts of the batch before one update: a divisor of the batch, or `"auto"` for the fastest that fits;
            one by default.
        untied: every op has its own config, so that weights, gradients and optimizer state may be sharded differently.
        engine: the engine that will run the step, whose kernels and memory are priced: `"xla"`, `"torch-eager"`,
            `"torch-compile"` or `"embedded"`.
        fix: constraints, op name pattern to config: `{"fc*": "c4"}`.
        roles: roles of a StableHLO program's arguments, by name pattern: `{"params.*": "parameter"}`.
        opaque: targets of custom calls that are pure functions. These calls are replicated.
        rules: rules of custom calls, by target: `{"my_kernel": "b q _, b k _ -> b q _"}`. The call works on each block of the
            dimensions of one name separately, and needs `_` whole.
        dims: sizes of symbolic dimensions of an ONNX file.
        loss: the loss of an ONNX model: `"cross-entropy"`, `"mse"`, `"output"`.
        inference: plan the forward pass only.
        plain_attention: keep attention of an ONNX or StableHLO file as products and softmax that store scores, instead of
            one fused op.
        time: time limit of the search, in seconds. The best plan so far is returned.
        threads: number of threads; 0 means all cores.
        seed: seed of the random generator.
        proposals: for `"mcmc"` and `"place"`: the proposals of every chain, whatever the time.
        balance: for `"place"`: by how much a device may have more than its share of the work, such as 0.1.
        spmd: every device runs every op, as JAX and PyTorch need it. Always so for StableHLO programs and graphs as text.
        ram: the most of this computer's memory that tables of the search may take; by default half of the free memory.
        progress: True for a progress line on standard error, False for none; by default on terminals and in notebooks. Or a
            function of elapsed seconds, the best plan's seconds per step (None before the first plan) and the lower bound.

    The search releases the interpreter's lock. An interrupt (Ctrl-C, or a notebook's stop button) returns the best plan so
    far; another one more than a second later raises `KeyboardInterrupt`.

    Raises:
        DoesNotFit: it is proved that no plan fits the memory, or the plan of a strategy without memory limits exceeds it.
        PlanError: the search ended without a plan, or the model, the machine or an option is invalid. The message names the
            place and the remedy.

    >>> p = plan("mlp:batch=64,hidden=1024,layers=2", machine="flat:4", solver="data")
    >>> "n4" in p.configs().values()
    True
    >>> plan("mlp", machine="flat:4", memory="1kB")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    shardwright.DoesNotFit: ...
    """
    name = os.fspath(model)
    # A name or path is a single line.
    text = name if "\n" in name else None
    line = ProgressLine() if progress is True or (progress is None and wanted()) else None
    try:
        native = _native.plan(
            [
                *_option("machine", machine),
                *_option("memory", _bytes(memory, "memory")),
                *_option("recompute", recompute),
                *_option("recompute-policy", recompute_policy),
                *_option("batch", batch),
                *_option("seq", seq),
                *_option("precision", precision),
                *_option("gradients", gradients),
                *_option("price", price),
                *_option("optimizer", optimizer),
                *_option("costs", costs),
                *_option("engine", engine),
                *_option("micro-batches", micro_batches),
                *_option("pipeline", pipeline),
                *_option("schedule", schedule),
                *_option("untied", untied),
                *_option("fix", _pairs(fix)),
                *_option("role", _pairs(roles)),
                *_option("opaque", list(opaque)),
                *_option("rule", _pairs(rules)),
                *_option("dim", _pairs(dims)),
                *_option("loss", loss),
                *_option("inference", inference),
                *_option("plain-attention", plain_attention),
                *_option("time", float(time)),
                *_option("threads", threads),
                *_option("seed", seed),
                *_option("proposals", proposals),
                *_option("balance", balance),
                *_option("spmd", spmd),
                *_option("ram", _bytes(ram, "ram")),
                "--",
                _file_name(text) if text else name,
            ],
            text=text,
            solver=solver,
            tell=line if line is not None else progress if callable(progress) else None,
        )
    finally:
        if line is not None:
            line.close()
    return Plan(native)

"""`plan` and the `Plan` that it makes."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

from . import _native
from ._progress import ProgressLine, show_seconds, wanted


class Plan:
    """One config per op, what they are predicted to cost, and a proof of how good that is.

    >>> import shardwright
    >>> p = shardwright.plan("alexnet", machine="p100x16", batch=512)
    >>> p.machine, p.devices
    ('p100x16', 16)
    >>> p.lower_bound <= p.objective
    True
    """

    def __init__(self, native: _native.Planned) -> None:
        self._native = native
        self._json: str | None = None
        self._data: dict[str, Any] | None = None

    def to_json(self) -> str:
        """The plan as JSON: what `shardwright plan -o` writes and the other commands read.

        >>> import json, shardwright
        >>> json.loads(shardwright.plan("mlp", machine="flat:2").to_json())["devices"]
        2
        """
        if self._json is None:
            self._json = self._native.to_json()
        return self._json

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan for `shardwright explain`, `simulate`, `report`, `export` and `run`. A step that was planned as
        text is written with it; models and machines in files are found by their names."""
        _write(path, self.to_json())

    @property
    def data(self) -> dict[str, Any]:
        """The same as Python values."""
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
        """How many devices it has."""
        return int(self.data["devices"])

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes that configs speak of, outermost first, and their sizes."""
        return {axis["name"]: axis["size"] for axis in self.data["axes"]}

    @property
    def step_seconds(self) -> float:
        """Predicted seconds per step."""
        return float(self.data["simulated"]["step_seconds"])

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes that one device holds at once."""
        return int(self.data["peak_memory_bytes"])

    @property
    def traffic_bytes(self) -> int:
        """Bytes sent per step, all devices together."""
        return int(self.data["traffic_bytes"])

    @property
    def objective(self) -> int:
        """Picoseconds per step, all ops and all communication in sequence."""
        return int(self.data["objective"])

    @property
    def lower_bound(self) -> int:
        """No plan in the space is faster than this; zero where nothing is proved."""
        return int(self.data["lower_bound"])

    @property
    def gap(self) -> float:
        """How far the objective may be above the optimum, relative to the objective."""
        return float(self.data["gap"])

    @property
    def proved_optimal(self) -> bool:
        """Whether nothing in the space is faster."""
        return bool(self.data["proved_optimal"])

    @property
    def warnings(self) -> list[str]:
        """What to keep in mind."""
        return list(self.data["warnings"])

    @property
    def baselines(self) -> dict[str, float]:
        """Predicted seconds per step of the classics."""
        return {name: cost["step_seconds"] for name, cost in self.data["baselines"].items()}

    def configs(self) -> dict[str, str]:
        """How every layer is split: `n4·c4` is four ways along the batch, four along the output channels."""
        return {layer["name"]: layer["config"] for layer in self.data["layers"]}

    def table(self, detail: str = "usual") -> str:
        """The plan as text; `detail` is "verdict", "usual" or "all" (every layer).

        >>> import shardwright
        >>> print(shardwright.plan("mlp", machine="flat:2").table("verdict"))  # doctest: +ELLIPSIS
        mlp... on flat:2 (2 devices), auto: ...
        """
        return self._native.table(detail)

    def to_sdy(self) -> str:
        """The planned StableHLO program with its shardings in Shardy's dialect: the mesh, the shardings of arguments and
        results, and a constraint on every planned value. Only for plans of StableHLO programs."""
        return self._native.to_sdy()

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one page of HTML that needs nothing else: summary, network, timeline, memory, ops and what the
        alternatives would cost. Written to `path` if one is given."""
        page = self._native.report()
        if path is not None:
            _write(path, page)
        return page

    def _repr_html_(self) -> str:
        """What notebooks show."""
        cells = (
            f"<tr><td>{html.escape(layer['name'])}<td>{html.escape(layer['config'])}"
            f"<td>{show_seconds(layer['compute_seconds'])}<td>{show_seconds(layer['comm_seconds'])}"
            for layer in self.data["layers"]
        )
        return (
            f"<pre>{html.escape(self.table('verdict'))}</pre><details><summary>layers</summary><table>"
            "<tr><th>layer<th>config<th>computing<th>communicating" + "".join(cells) + "</table></details>"
        )

    def __repr__(self) -> str:
        return f"<Plan of {self.model} on {self.machine}: {show_seconds(self.step_seconds)} per step>"


def _write(path: str | os.PathLike[str], text: str) -> None:
    """The whole file or nothing."""
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


class SearchOptions(TypedDict, total=False):
    """Options of `plan` that `parallelize` hands on, for JAX and PyTorch alike; `plan` says what they mean."""

    costs: str | None
    untied: bool
    fix: Mapping[str, object] | Iterable[str] | None
    time: float
    threads: int
    seed: int
    progress: bool | Callable[[float, float | None, float], None] | None


def _pairs(given: Mapping[str, object] | Iterable[str] | None) -> list[str]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [f"{name}={value}" for name, value in given.items()]
    return list(given)


def _called(text: str) -> str:
    """What to call a program that is given as text; the ending says what it is."""
    return "program.json" if text.lstrip().startswith("{") else "program.mlir"


def plan(
    model: str | os.PathLike[str],
    *,
    machine: str = "p100x16",
    memory: str | int | None = None,
    solver: str = "auto",
    batch: int | None = None,
    optimizer: str = "sgd",
    costs: str | None = None,
    untied: bool = False,
    fix: Mapping[str, object] | Iterable[str] | None = None,
    roles: Mapping[str, object] | Iterable[str] | None = None,
    opaque: Iterable[str] = (),
    dims: Mapping[str, object] | Iterable[str] | None = None,
    loss: str = "cross-entropy",
    inference: bool = False,
    time: float = 60.0,
    threads: int = 0,
    seed: int = 0,
    progress: bool | Callable[[float, float | None, float], None] | None = None,
) -> Plan:
    """Finds the fastest way to split a model's training step over a machine.

    Args:
        model: a built-in model with options (`"vgg16"`, `"mlp:batch=400,hidden=300"`), a file (`.onnx`, `.mlir`,
            `.stablehlo`, `.json`), the text of a StableHLO module (`jax.jit(step).lower(...).as_text()`), or that of a
            graph as JSON, a forward pass of which is trained by its first output.
        machine: a built-in machine (`"h100x64"`, `"flat:8"`), `"NAME:K"` for its first K devices, or a .toml file.
        memory: the most that one device may hold at once: `"16GiB"`, or bytes.
        solver: `"auto"`, `"exact"`, `"data"`, `"megatron"`, `"fsdp"`, ...
        batch: samples per step, for models that leave it open.
        optimizer: `"sgd"`, `"momentum"` or `"adam"`, for models that do not bring their own.
        costs: measured operator costs: a file, or a built-in device.
        untied: let every op choose for itself: weights, gradients and optimizer state find their own sharding.
        fix: configs that you know, by pattern: `{"fc*": "c4"}`.
        roles: what arguments of a StableHLO program are for: `{"params.*": "parameter"}`.
        opaque: targets of custom calls that are pure functions; they are planned replicated.
        dims: sizes of dimensions that an ONNX file leaves open.
        loss: what is trained of an ONNX model: `"cross-entropy"`, `"mse"`, `"output"`.
        inference: only the forward pass.
        time: stop searching after this many seconds with the best found.
        threads: how many threads to use; 0 for all cores.
        seed: seed of all randomness.
        progress: False for silence, True for a line on standard error (as on terminals and in notebooks), or a
            function of elapsed seconds, the best plan's seconds per step (None before there is one) and the bound.

    The search runs without the interpreter's lock. An interrupt (Ctrl-C, or the stop button of a notebook) makes it
    return the best plan that it has; a second one raises `KeyboardInterrupt`.

    Raises:
        DoesNotFit: no plan fits the memory.
        PlanError: the model, the machine or an option is wrong; the message says where and what to do.

    >>> p = plan("mlp:batch=64,hidden=1024,layers=2", machine="flat:4", solver="data")
    >>> "n4" in p.configs().values()
    True
    >>> plan("mlp", machine="flat:4", memory="1kB")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    shardwright.DoesNotFit: ...
    """
    name = os.fspath(model)
    # No name and no path has several lines.
    text = name if "\n" in name else None
    line = ProgressLine() if progress is True or (progress is None and wanted()) else None
    try:
        native = _native.plan(
            _called(text) if text else name,
            text=text,
            machine=machine,
            memory=f"{memory}B" if isinstance(memory, int) else memory,
            solver=solver,
            batch=batch,
            optimizer=optimizer,
            costs=costs,
            untied=untied,
            fix=_pairs(fix),
            roles=_pairs(roles),
            opaque=list(opaque),
            dims=_pairs(dims),
            loss=loss,
            inference=inference,
            time=float(time),
            threads=threads,
            seed=seed,
            tell=line if line is not None else progress if callable(progress) else None,
        )
    finally:
        if line is not None:
            line.close()
    return Plan(native)

"""Constrains the values of a step to the shardings of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._capture import path_of
from ._pallas import kernel_rule, run_split
from ._walk import Path, scan_counts, show
from ._walk import bind as bind_again

# Per dimension: the names of the mesh axes that split it, or None if XLA may choose.
Spec = Sequence[Sequence[str] | None]

# Calls with specs of their own: XLA reshards their operands as they say.
_OWN_SPECS = {"shard_map", "xla_pmap", "pmap"}


class Constraints:
    """Constrains every value: operands to the layouts that an operation's config reads, results to those it produces."""

    def __init__(self, mesh: Mesh, sites: list[dict[str, Any]], unread: frozenset[Any], values: bool = True) -> None:
        self.mesh = mesh
        # Results of Pallas kernels that nothing reads.
        self.unread = unread
        # Whether values are constrained. Kernels always are: XLA cannot divide them.
        self.values = values
        # An equation may become several operations.
        self.sites: dict[str, list[dict[str, Any]]] = {}
        for site in sites:
            if (path := path_of(site["name"])) is not None:
                self.sites.setdefault(path, []).append(site)
        # Values by id, with their specs, and their reshards so far. The reference keeps the id from being reused.
        self.specs: dict[int, tuple[Any, Spec]] = {}
        self.resharded: dict[tuple[int, str], tuple[Any, Any]] = {}
        # Broadcasts, and slices of them, by the ids of their results: the equation and its operand.
        self.broadcasts: dict[int, tuple[Any, Any, Any]] = {}
        # Per body of a loop: the specs of its arguments, and of its results.
        self.entered: dict[Path, list[Spec | None]] = {}
        self.left: dict[Path, list[Spec | None]] = {}

    def __call__(
        self, eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        if eqn.primitive.name == "pallas_call":
            return self.kernel(eqn, path, operands)
        if not self.values:
            return bind(operands)
        if eqn.primitive.name == "scan":
            return self.scan(eqn, path, operands, bind)
        results = self.equation(eqn, path, operands, bind)
        name = eqn.primitive.name
        repeats = name == "broadcast_in_dim" and len(operands) == 1 and jnp.ndim(operands[0]) > 0
        if repeats or (name == "slice" and id(operands[0]) in self.broadcasts):
            self.broadcasts[id(results[0])] = (results[0], eqn, operands[0])
        return results

    def equation(
        self, eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """An equation between the constraints on its operands and on its results."""
        sites = self.sites.get(show(path), [])
        if not sites or eqn.primitive.name in _OWN_SPECS:
            return bind(operands)
        whole = _whole_dims(eqn)
        if whole is not None:
            return self.rows(eqn, operands, sites[-1], whole, bind)
        # The initial values of reductions follow the operands.
        counts = {len(operands)} | ({2 * len(operands)} if eqn.primitive.name.startswith("reduce_") else set())
        # Those of the equation's own name come first. The first one that reads as many tensors reads the operands, and the last one with
        # a layout produces the results.
        sites = [site for site in sites if site["name"].rsplit("/", 1)[-1] == eqn.primitive.name] or sites[-1:]
        given = [site for site in sites if len(site["operands"]) in counts and any(site["operands"])]
        wanted = _with_indices(eqn, given[0]) if given else []
        if not _of_ranks(wanted, operands):
            # As many operations each read one operand: those of a stack, before it concatenates.
            wanted = _one_each(sites, "operands", operands)
        if wanted:
            operands = [self.operand(x, spec) for x, spec in zip(operands, wanted, strict=False)] + operands[len(wanted) :]
        results = bind(operands)
        made = [site["results"] for site in reversed(sites) if len(site["results"]) == len(results) and any(site["results"])]
        # The parts of a split are operations of their own.
        specs = made[0] if made else _one_each(sites, "results", results)
        return [self.result(x, spec) for x, spec in zip(results, specs, strict=True)] if specs else results

    def rows(
        self, eqn: Any, operands: list[Any], site: dict[str, Any], whole: int, bind: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """A function of rows, whose trailing dimensions stay whole, on every device's rows: XLA gathers their operands."""
        x, steps = operands[0], site["results"][0]
        lead = [tuple(axes or ()) for axes in (steps[-1] if steps else [])[: x.ndim - whole]]
        parts = [math.prod(self.mesh.shape[axis] for axis in axes) for axes in lead]
        if math.prod(parts) == 1 or any(n % size for n, size in zip(x.shape, parts, strict=False)):
            return bind(operands)
        spec = PartitionSpec(*(axes or None for axes in lead))
        local = jax.shard_map(
            lambda x: bind_again(eqn, eqn.params, [x]), mesh=self.mesh, in_specs=spec, out_specs=[spec] * len(eqn.outvars), check_vma=False
        )
        results = local(self.operand(x, site["operands"][0]) if site["operands"] else x)
        return [self.result(y, path) for y, path in zip(results, site["results"], strict=True)]

    def kernel(self, eqn: Any, path: Path, operands: list[Any]) -> list[Any]:
        """A Pallas kernel on all devices, each with its part of the grid: XLA cannot divide kernels."""
        rule, sites = kernel_rule(eqn, self.unread), self.sites.get(show(path), [])
        kept = [(var.aval.shape, names) for var, names in zip(eqn.outvars, rule.results, strict=True) if names is not None]
        split: dict[int, tuple[str, ...]] = {}
        # Of several results, each has an operation of its own in the plan.
        specs = [steps[-1] for site in sites for steps in site["results"][:1] if steps]
        if kept and specs:
            split = rule.axes(specs[0], *kept[0])
        return run_split(eqn, rule, self.mesh, split, operands)

    def scan(
        self, eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """A scan. In the plan, the slices of what it reads and stacks are values of their own. XLA has one value for all of
        them, and would split it as any of its readers: it gets the layout of its slices, inside and outside of the loop."""
        fixed, carried = scan_counts(eqn)
        body = (*path, 0, 0)
        specs = self.known(operands)
        sliced = [None if spec is None else spec[1:] for spec in specs[fixed + carried :]]
        self.entered[body] = [*specs[:fixed], *([None] * carried), *sliced]
        results = bind(operands)
        left = self.left.get(body, [None] * len(results))
        return [
            x if at < carried or spec is None else self.result(x, [[[], *spec]])
            for at, (x, spec) in enumerate(zip(results, left, strict=True))
        ]

    def enter_body(self, path: Path, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a loop's body in the layouts that they have outside."""
        specs = self.entered.get(path, [None] * len(args))
        return [x if spec is None else self.result(x, [spec]) for x, spec in zip(args, specs, strict=True)]

    def leave_body(self, path: Path, results: Sequence[Any]) -> None:
        """Takes note of the layouts in which a loop's body leaves its results."""
        self.left[path] = self.known(results)

    def known(self, values: Sequence[Any]) -> list[Spec | None]:
        """The specs of values, where they are known."""
        return [known[1] if (known := self.specs.get(id(x))) is not None else None for x in values]

    def operand(self, x: Any, path: Sequence[Spec] | None) -> Any:
        """The operand in the layout that the operation reads, along its reshard path. Readers share the steps."""
        if not path or not isinstance(x, jax.core.Tracer):
            return x
        current = self.specs.get(id(x))
        if current is not None and current[1] == path[-1]:
            return x
        for spec in path:
            key = (id(x), str(spec))
            if key not in self.resharded:
                self.resharded[key] = (x, self.broadcast(x, spec))
            x = self.resharded[key][1]
        return x

    def broadcast(self, x: Any, spec: Spec) -> Any:
        """The value in a layout. In the plan, readers of a broadcast, and of slices of one, broadcast themselves: its operand is resharded,
        not its result."""
        known = self.broadcasts.get(id(x))
        if known is None or not any(axes is None for axes in spec):
            return self.constrain(x, spec)
        _, eqn, operand = known
        if eqn.primitive.name == "slice":
            resharded, params = self.broadcast(operand, spec), eqn.params
        else:
            own = [spec[dim] for dim in eqn.params["broadcast_dimensions"]]
            resharded, params = self.constrain(operand, own), {**eqn.params, "sharding": None}
        (repeated,) = bind_again(eqn, params, [resharded])
        result = self.constrain(repeated, spec)
        self.broadcasts[id(result)] = (result, eqn, resharded)
        return result

    def result(self, x: Any, path: Sequence[Spec] | None) -> Any:
        if not path or not isinstance(x, jax.core.Tracer):
            return x
        for spec in path:
            x = self.constrain(x, spec)
        self.specs[id(x)] = (x, path[-1])
        return x

    def constrain(self, x: Any, spec: Spec) -> Any:
        if not self.fits(x, spec):
            return x
        free = PartitionSpec.UNCONSTRAINED
        dims = (free if axes is None else tuple(axes) if axes else None for axes in spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*dims)))

    def fits(self, x: Any, spec: Spec) -> bool:
        if x.ndim == 0 or x.ndim != len(spec) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return False
        parts = (math.prod(self.mesh.shape[axis] for axis in axes or ()) for axes in spec)
        return all(size % n == 0 for size, n in zip(x.shape, parts, strict=True))


def _whole_dims(eqn: Any) -> int | None:
    """The trailing dimensions that a function of rows needs whole, which XLA does not divide by itself; None for other equations."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("top_k", "approx_top_k") and len(eqn.invars) == 1:
        rank = len(eqn.invars[0].aval.shape)
        last = int(params.get("axis", params.get("reduction_dimension", -1))) % max(rank, 1)
        return 1 if last == rank - 1 else None
    return None


def _of_ranks(wanted: Sequence[Sequence[Spec] | None], values: Sequence[Any]) -> bool:
    """Whether there are layouts, and they have the dimensions of the values."""
    pairs = zip(wanted, values, strict=False)
    return bool(wanted) and all(not path or len(path[-1]) == jnp.ndim(x) for path, x in pairs)


def _one_each(sites: Sequence[dict[str, Any]], side: str, values: Sequence[Any]) -> list[Any]:
    """The layouts of several values, where as many operations have one of them each; otherwise none."""
    found = [site[side][0] for site in sites if len(site[side]) == 1 and site[side][0]]
    found = [path for path in found if values and len(path[-1]) == jnp.ndim(values[0])]
    return found if len(found) == len(values) > 1 and _of_ranks(found, values) else []


def _with_indices(eqn: Any, site: dict[str, Any]) -> list[list[Spec] | None]:
    """The layouts of operands. Indices of a gather or scatter have none of their own where the plan reads them in another form: they are
    split as the rows that they stand for. Else XLA would split the rows as it finds the indices."""
    wanted = list(site["operands"])
    numbers, name = eqn.params.get("dimension_numbers"), eqn.primitive.name
    if name == "gather" and wanted[1] is None and site["results"][0]:
        rows, inside = site["results"][0][0], numbers.offset_dims
    elif name.startswith("scatter") and len(wanted) == 3 and wanted[1] is None and wanted[2]:
        rows, inside = wanted[2][-1], numbers.update_window_dims
    else:
        return wanted
    wanted[1] = [[*(axes for dim, axes in enumerate(rows) if dim not in inside), []]]
    return wanted

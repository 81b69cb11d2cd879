"""Pipelines of equal blocks over a mesh axis: a scan over stacked blocks becomes stages that pass micro-batches on.

One program runs on all devices. Every stage holds its share of the stacked blocks. In each of `micro_batches + stages - 1` rounds a
stage takes a micro-batch, applies its blocks, and a collective permute sends the result to the next stage (GPipe). JAX differentiates
the whole, so the backward pass is a pipeline in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._native import PlanError
from ._refusals import placed, refusals_at
from ._sample_flow import Kind, Refused, SampleFlow, dims_of
from ._walk import INLINED, Path, equation, parts, scan_counts, source_line, walk

_AXES = ("stage", "data")


@dataclass(frozen=True)
class _Blocks:
    """The scan over blocks: where it is, its equation, and its body for the samples that a device takes at once."""

    path: Path
    eqn: Any
    body: Any
    #: Per constant of the loop: whether it has samples.
    has_samples: tuple[bool, ...]


@placed
def pipelined(
    loss: Callable[..., Any],
    params: Any,
    *batch: Any,
    stages: int,
    micro_batches: int,
    devices: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """A loss `params, *batch -> value` whose scan over stacked blocks runs as a pipeline, equal to the loss up to rounding.

    Args:
        loss: a function with one `lax.scan` over stacked parameters of equal blocks, which carries the activations. Samples are the first
            dimension of the batch and of the activations, and blocks treat each sample by itself.
        params, batch: example arguments, or their shapes.
        stages: devices along the pipeline; it divides the number of blocks.
        micro_batches: parts of the batch in flight, one after the other.
        devices: the devices, by default all. Those beyond the stages split every micro-batch (data parallelism).

    Raises:
        PlanError: no scan can run so; the message has the line and the reason of each.
    """
    chosen = list(jax.devices() if devices is None else devices)
    if stages < 1 or micro_batches < 1 or len(chosen) % stages:
        raise PlanError(f"{len(chosen)} devices in {stages} stages with {micro_batches} micro-batches: stages must divide the devices")
    replicas = len(chosen) // stages
    leaves, tree = jax.tree.flatten((params, batch))
    count = len(jax.tree.leaves(params))
    sizes = {np.shape(leaf)[0] for leaf in leaves[count:] if np.ndim(leaf)}
    if len(sizes) != 1:
        raise PlanError(f"the first dimensions of the batch are {sorted(sizes)}; all of them must be the samples")
    (samples,) = sizes
    if samples % (micro_batches * replicas):
        raise PlanError(f"{samples} samples are no multiple of {micro_batches} micro-batches on {replicas} devices each")

    def flat(*values: Any) -> Any:
        params, batch = jax.tree.unflatten(tree, values)
        return loss(params, *batch)

    def traced(samples: int) -> Any:
        kinds = [jax.typeof(leaf) for leaf in leaves]
        shapes = [(samples, *k.shape[1:]) if at >= count and k.shape else k.shape for at, k in enumerate(kinds)]
        return jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(s, k.dtype) for s, k in zip(shapes, kinds, strict=True)))

    full = traced(samples)
    # Samples are followed with as many as possible: a dimension of one sample looks like any other of size one.
    divisor = next(n for n in range(2, samples + 1) if samples % n == 0) if samples > 1 else 1
    with refusals_at(loss):
        path = _find(full, traced(samples // divisor), samples, stages)
    blocks = _blocks(path, full, traced(samples // (micro_batches * replicas)))
    mesh = Mesh(np.asarray(chosen).reshape(stages, replicas), _AXES)

    def visit(eqn: Any, path: Path, operands: list[Any], bind: Callable[[list[Any]], list[Any]]) -> list[Any]:
        if path != blocks.path:
            return bind(operands)
        return [_run(blocks, operands, mesh, micro_batches)]

    @placed
    def run(params: Any, *batch: Any) -> Any:
        values, structure = jax.tree.flatten((params, batch))
        if str(structure) != str(tree) or [np.shape(x) for x in values] != [np.shape(x) for x in leaves]:
            raise PlanError("the arguments have other shapes than the pipeline was made for")
        (value,) = walk(full.jaxpr, full.consts, values, visit)
        return value

    return run


def _blocks(path: Path, full: Any, part: Any) -> _Blocks:
    a, b = equation(full, path), equation(part, path)
    fixed, _ = scan_counts(a)
    shapes = zip(a.invars[:fixed], b.invars[:fixed], strict=True)
    return _Blocks(path, a, b.params["jaxpr"], tuple(x.aval.shape != y.aval.shape for x, y in shapes))


def _find(full: Any, part: Any, samples: int, stages: int) -> Path:
    """The path of the scan over blocks. Raises `PlanError` with the reasons against every scan."""
    reasons: list[str] = []
    for path, a, b in _scans(full, part, ()):
        try:
            _check(a, b, samples, stages)
            return path
        except PlanError as error:
            reasons.append(f"{source_line(a)}: {error}")
    if not reasons:
        raise PlanError("the loss has no `lax.scan` over stacked blocks; stack the parameters of equal blocks and scan over them")
    raise PlanError("no scan of the loss can run as a pipeline: " + "; ".join(reasons))


def _scans(full: Any, part: Any, path: Path) -> list[tuple[Path, Any, Any]]:
    (whole, _), (small, _) = parts(full), parts(part)
    if len(whole.eqns) != len(small.eqns):
        raise PlanError("the loss computes something else with a smaller batch")
    found = []
    for at, (a, b) in enumerate(zip(whole.eqns, small.eqns, strict=True)):
        body = INLINED.get(a.primitive.name)
        if a.primitive.name == "scan" and b.primitive.name == "scan":
            found.append(((*path, at), a, b))
        elif body is not None and body in a.params and body in b.params:
            found += _scans(a.params[body], b.params[body], (*path, at))
    return found


def _check(a: Any, b: Any, samples: int, stages: int) -> None:
    """Refuses a scan that cannot run as a pipeline."""
    (fixed, carried), length = scan_counts(a), a.params["length"]
    stacked = a.invars[fixed + carried :]
    if carried != 1 or not stacked or len(a.outvars) != 1:
        raise PlanError("it must carry one array, read stacked parameters, and stack no results")
    if a.params["reverse"]:
        raise PlanError("it runs backwards")
    if length % stages:
        raise PlanError(f"{length} blocks cannot be divided into {stages} equal stages")
    sample_dims = [dims_of(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
    if sample_dims[fixed] != (0,):
        raise PlanError("the first dimension of what it carries is not the samples")
    if any(sample_dims[fixed + 1 :]) or any(dims not in ((), (0,)) for dims in sample_dims[:fixed]):
        raise PlanError("samples are a later dimension of what it reads")
    kinds = [Kind.SAMPLES if dims else Kind.FIXED for dims in sample_dims]
    body_a, body_b = a.params["jaxpr"], b.params["jaxpr"]
    try:
        (kind,) = SampleFlow(samples).body(body_a, body_b, kinds)
    except Refused as error:
        raise PlanError(f"its blocks do not treat each sample by itself: {error}") from None
    if kind is not Kind.SAMPLES:
        raise PlanError("its blocks do not keep the samples")


def _run(blocks: _Blocks, operands: list[Any], mesh: Mesh, micro_batches: int) -> Any:
    """What the scan carries in the end, by stages."""
    fixed, _ = scan_counts(blocks.eqn)
    stages, replicas = mesh.shape["stage"], mesh.shape["data"]
    body = jaxpr_as_fun(blocks.body)

    def divided(x: Any) -> Any:
        return x.reshape(micro_batches, replicas, -1, *x.shape[1:])

    consts = [divided(x) if split else x for x, split in zip(operands[:fixed], blocks.has_samples, strict=True)]
    start, stacked = operands[fixed], operands[fixed + 1 :]

    def stage(consts: list[Any], x: Any, stacked: list[Any]) -> Any:
        me = jax.lax.axis_index("stage")

        def take(x: Any, at: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(x, jnp.clip(at, 0, micro_batches - 1), keepdims=False)[0]

        def turn(arrived: Any, at: Any) -> tuple[Any, Any]:
            given = jnp.where(me == 0, take(x, at), arrived)
            own = [take(c, at - me) if split else c for c, split in zip(consts, blocks.has_samples, strict=True)]
            made, _ = jax.lax.scan(lambda h, layer: (body(*own, h, *layer)[0], None), given, stacked)
            return jax.lax.ppermute(made, "stage", [(i, i + 1) for i in range(stages - 1)]), made

        # Rounds before a stage's first micro-batch compute on samples too, so that nothing of them can be infinite.
        _, made = jax.lax.scan(turn, take(x, 0), jnp.arange(micro_batches + stages - 1))
        return made[None, stages - 1 :, None]

    specs = [PartitionSpec(None, "data") if split else PartitionSpec() for split in blocks.has_samples]
    run = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(None, "data"), [PartitionSpec("stage")] * len(stacked)),
        out_specs=PartitionSpec("stage", None, "data"),
        check_vma=False,
    )
    made = run(consts, divided(start), stacked)[-1].reshape(start.shape)
    return jax.lax.with_sharding_constraint(made, NamedSharding(mesh, PartitionSpec()))

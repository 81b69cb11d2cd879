"""A step that runs on a mesh by its plan, for arguments of one structure and of certain types."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._plan import Plan
from . import _nnx
from ._arguments import Call, unfold
from ._capture import PlannedText, StepCapture, without_mesh
from ._constrain import Constraints, Spec


class ShardedStep:
    """A captured step, its plan, and the program that both give."""

    def __init__(
        self, step: StepCapture, plan: Plan, planned: PlannedText, devices: Sequence[Any], constrain: bool
    ) -> None:
        self.step = step
        #: The text that was planned.
        self.planned = planned
        self.plan = plan
        self.mesh = _mesh(plan, devices)
        shardings = json.loads(plan._native.shardings())
        self.sites: list[dict[str, Any]] = shardings["sites"]
        first = len(step.constants)
        #: Per leaf of the arguments: `parameter`, `optimizer_state`, `input` or `constant`.
        self.roles: list[str] = shardings["roles"][first:]
        #: Per leaf of the arguments: the dimension that runs over the batch.
        self.batch_dims: list[int | None] = shardings["batch_dims"][first:]
        self.constant_shardings = [
            self._sharding(spec, np.ndim(x)) for spec, x in zip(shardings["arguments"][:first], step.constants, strict=True)
        ]
        #: Per leaf of the arguments.
        self.leaf_shardings = [
            self._sharding(spec, len(kind[0]))
            for spec, kind in zip(shardings["arguments"][first:], step.types, strict=True)
        ]
        #: Per leaf of the results, then per changed leaf of the modules.
        self.result_shardings = [
            self._sharding(spec, len(aval.shape) - (0 if key is None else len(key._impl.key_shape)))
            for spec, aval, key in zip(shardings["results"], step.jaxpr.out_avals, step.out_keys, strict=True)
        ]
        self.constrain = constrain
        self._constants: list[Any] | None = None
        self._compiled: Any = None
        self._jitted = self._jit(step.donated_leaves)

    def _sharding(self, spec: Spec, rank: int) -> NamedSharding:
        # The numbers of a random key and the parts of a complex number are further dimensions, which the user does not see.
        dims = (tuple(axes) if axes else None for axes in spec[:rank])
        return NamedSharding(self.mesh, PartitionSpec(*dims))

    def _jit(self, donated: tuple[int, ...]) -> Any:
        visit = Constraints(self.mesh, self.sites, self.step.unread, values=self.constrain)

        def step(constants: list[Any], *leaves: Any) -> list[Any]:
            return self.step.evaluate(leaves, constants, visit)

        step.__name__ = getattr(self.step.function, "__name__", "step")
        return jax.jit(
            step,
            in_shardings=(self.constant_shardings, *self.leaf_shardings),
            out_shardings=self.result_shardings,
            donate_argnums=tuple(at + 1 for at in donated),
        )

    def enforced(self, constrain: bool) -> ShardedStep:
        """The same plan with all values constrained, or only arguments and results."""
        if constrain == self.constrain:
            return self
        return ShardedStep(self.step, self.plan, self.planned, list(self.mesh.devices.flat), constrain)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Shardings of the arguments, in their structure."""
        args, kwargs = self.step.structure.arguments(self.leaf_shardings)
        return args if not kwargs else (*args, kwargs)

    @property
    def out_shardings(self) -> Any:
        """Shardings of the results, in their structure."""
        return jax.tree.unflatten(self.step.out_tree, self.result_shardings[: self.step.out_tree.num_leaves])

    def constants(self) -> list[Any]:
        """The constants of closures, on their devices."""
        if self._constants is None:
            self._constants = [
                put(np.asarray(x), s) for x, s in zip(self.step.constants, self.constant_shardings, strict=True)
            ]
        return self._constants

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves of the arguments in the planned shardings."""
        return [
            x if _in_place(x, sharding) else put(x, sharding)
            for x, sharding in zip(leaves, self.leaf_shardings, strict=True)
        ]

    def run(self, call: Call) -> Any:
        """Runs a step, and writes new states into the modules of the call."""
        placed = self.place(call.leaves)
        traced = any(isinstance(x, jax.core.Tracer) for x in placed)
        program = self._jitted if self._compiled is None or traced else self._compiled
        with without_mesh():
            results = program(self.constants(), *placed)
        count = self.step.out_tree.num_leaves
        if call.structure.modules is not None:
            for at, x in zip(self.step.changed, results[count:], strict=True):
                placed[at] = x
            _nnx.update(call.structure.modules, call.objects, *map(unfold, call.structure.arguments(placed)))
        return unfold(jax.tree.unflatten(self.step.out_tree, results[:count]))

    def lower(self) -> Any:
        """Lowers the step, as `jax.jit(f).lower` does."""
        constants = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in self.step.constants]
        with without_mesh():
            return self._jitted.lower(constants, *self.step.shapes)

    def lower_propagated(self) -> Any:
        """The step lowered with the shardings of its arguments only, from which XLA propagates."""

        def step(constants: list[Any], *leaves: Any) -> list[Any]:
            return self.step.evaluate(leaves, constants, Constraints(self.mesh, self.sites, self.step.unread, values=False))

        jitted = jax.jit(
            step,
            in_shardings=(self.constant_shardings, *self.leaf_shardings),
            donate_argnums=tuple(at + 1 for at in self.step.donated_leaves),
            keep_unused=True,
        )
        constants = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in self.step.constants]
        with without_mesh():
            return jitted.lower(constants, *self.step.shapes)

    def compiled(self) -> Any:
        """XLA's program. It is kept, and runs the steps."""
        if self._compiled is None:
            self._compiled = self.lower().compile()
        return self._compiled

    def compiled_bytes(self) -> int:
        """Bytes of XLA's program on one device."""
        return used_bytes(self.compiled())

    def predicted_bytes(self) -> int:
        """The predicted memory of XLA's program on one device."""
        first = len(self.step.constants)
        return self.plan._native.xla_memory([first + at for at in self.step.donated_leaves])

    def without_donation(self) -> Callable[..., Any]:
        """The sharded step of leaves, without donation. Its arguments must have the planned shardings."""
        jitted = self._jit(()) if self.step.donated_leaves else self._jitted

        def run(*leaves: Any) -> Any:
            with without_mesh():
                return jitted(self.constants(), *leaves)

        return run


def used_bytes(compiled: Any) -> int:
    """Bytes of a compiled program on one device: arguments, results and temporary values; 0 where XLA does not say."""
    usage = compiled.memory_analysis()
    if usage is None:
        return 0
    size = usage.argument_size_in_bytes + usage.output_size_in_bytes + usage.temp_size_in_bytes
    return int(size - usage.alias_size_in_bytes)


def put(x: Any, sharding: NamedSharding) -> Any:
    """An array in a sharding, from another mesh too."""
    return jax.device_put(x, sharding)


def _mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    axes = plan.axes or {"device": 1}
    return Mesh(np.asarray(devices).reshape(tuple(axes.values())), tuple(axes))


def _in_place(leaf: Any, sharding: NamedSharding) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

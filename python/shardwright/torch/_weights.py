"""Fetches weights and reduces their gradients, many in one collective.

Weights that are exchanged alike are fetched together before their first use: those that are stored as shards by one
all-gather, which starts while the ops before them run. Their gradients are reduced together in the backward pass, as soon as
the last of them is there, by one all-reduce or reduce-scatter. `.grad` has the sums when the pass ends.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._batches import Batch, Exchange, Filling, Member, divided, divided_for_sums, shards
from ._layout import Layout, layout_of
from ._regather import Regather
from ._tensor import dense, resharded

#: A read of a weight: its name, the layouts of the weight and its gradient, and the type, `None` for that of computing.
Read = tuple[str, Layout, Layout, "torch.dtype | None"]

#: Bytes of whole weights in one batch, and the least where memory is short: a batch then has a quarter of all weights at most.
#: Batches of gathered weights have half of that, since whole weights and whole gradients lie beside them.
TOGETHER, LEAST = 25 << 20, 2 << 20

#: DTensor's constructor, without what keeps `torch.compile` out of it.
_new: Any = inspect.unwrap(DTensor.__new__)


def keep_their_type(module: torch.nn.Module) -> set[int]:
    """Weights that mixed precision does not convert: PyTorch wants those of batch norms in the type of the running statistics."""
    norms = (m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.running_mean is not None)
    return {id(p) for norm in norms for p in norm.parameters(recurse=False)}


class _Fetch(torch.autograd.Function):
    """Weights as they are read. Their gradients are reduced together."""

    @staticmethod
    def forward(ctx: Any, owner: Weights, batch: Batch, filling: Filling, *weights: Any) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.batch, ctx.filling = owner, batch, filling
        ctx.set_materialize_grads(False)
        return tuple(batch.fetch(weights))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            return None, None, None, *ctx.owner.differentiable(ctx.batch, grads)
        return None, None, None, *ctx.owner.reduce(ctx.batch, ctx.next_functions, grads, ctx.filling.taken())


class Weights:
    """The weights of a module, and the gradients that a backward pass has collected so far."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        #: Whether weights are exchanged in batches; otherwise each by itself, when it is read.
        self.together = True
        #: Whether gradients are kept back, to be added to those of the next pass (`no_sync`).
        self.postponed = False
        self.batches: list[Batch] = []
        self._batch_of: dict[tuple[int, str, Layout, Layout, torch.dtype], tuple[Batch, int]] | None = None
        self._names: dict[int, tuple[int, str]] = {}
        self._seen: list[tuple[torch.nn.Module, str, Any, Any]] = []
        #: Whether memory of reduced gradients is kept for the next step, which a plan does not count.
        self.keeps = True
        #: Weights that are not gathered, as they are read in this pass, and whether with a gradient.
        self._ready: dict[tuple[int, Layout, Layout], tuple[Any, torch.Tensor, bool]] = {}
        self._kept: dict[Any, tuple[Batch, Member, torch.Tensor]] = {}
        #: The element type of computing, where it is not the weights' own (`mixed_precision`).
        self.dtype: torch.dtype | None = None
        self._stand_ins: dict[tuple[int, torch.dtype], tuple[Any, Any]] = {}
        self._masters: dict[int, Any] = {}
        self._wide: set[int] = set()
        self.regather = Regather()
        self._sent: list[tuple[list[Member], torch.Tensor]] = []
        self._awaited = False

    def keep_within(self, plan: Any, weights: Iterable[Any]) -> None:
        """Keeps memory of reduced gradients from step to step if the plan's limit leaves room for it."""
        more = sum(w.to_local().nbytes for w in weights if w.requires_grad)
        limit = plan.memory_limit_bytes
        self.keeps = limit is None or int(plan.peak_memory_bytes) + more <= limit

    # Mixed precision.

    def type_of(self, weight: Any) -> torch.dtype:
        """The element type in which a weight is read."""
        narrowed = self.dtype is not None and weight.is_floating_point() and id(weight) not in self._wide
        return self.dtype if narrowed else weight.dtype  # type: ignore[return-value]

    def stand_in(self, x: Any, dtype: torch.dtype | None = None) -> Any:
        """What calls see of a weight that is read in another type: a DTensor of that type, without data."""
        if not isinstance(x, torch.nn.Parameter) or not isinstance(x, DTensor):
            return x
        dtype = dtype or self.type_of(x)
        if dtype == x.dtype:
            return x
        found = self._stand_ins.get((id(x), dtype))
        if found is None or found[0] is not x or found[1].requires_grad != x.requires_grad:
            empty = torch.empty((), dtype=dtype, device=x.device).expand(x._local_tensor.shape)
            made = DTensor.from_local(empty, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
            found = self._stand_ins[id(x), dtype] = (x, made.requires_grad_(x.requires_grad))
            self._masters[id(made)] = x
        return found[1]

    def master(self, x: Any) -> Any:
        """The weight for which a DTensor stands."""
        return self._masters.get(id(x), x)

    # Batches.

    def plan(self, root: torch.nn.Module, reads: Iterable[Read]) -> None:
        """Makes batches of weights in the order in which a pass reads them."""
        counts: dict[Read, int] = {}
        for read in reads:
            counts[read] = counts.get(read, 0) + 1
        self._batch_of, grid = {}, self.engine.grid
        self.batches, self._names, self._seen, self._wide = [], {}, [], keep_their_type(root)
        own = dict(root.named_parameters())
        total = sum(w.numel() * w.element_size() for w in own.values())
        alike: dict[Any, list[tuple[int, Any, Member, int, int]]] = {}
        for at, ((path, layout, gradient, dtype), count) in enumerate(counts.items()):
            owner, _, name = path.rpartition(".")
            weight = own.get(path)
            if not isinstance(weight, DTensor):
                continue
            module = root.get_submodule(owner)
            self._seen.append((module, name, weight, _state(weight)))
            if _state(weight)[1] or not weight.is_leaf:
                # A hook gets its gradient as soon as it is there, and so do the ops that made a weight (`functional_call`).
                continue
            stored, shape = layout_of(weight), tuple(weight.shape)
            found = Exchange.of(stored, layout, gradient)
            whole = tuple(grid.block(shape, layout)[1])
            if found is None or tuple(grid.block(shape, stored)[1]) != tuple(weight._local_tensor.shape):
                continue
            exchange, dim = found
            if exchange.gathered and shape[dim] % math.prod(grid.sizes[axis] for axis in exchange.gathered):
                continue
            dtype = dtype or self.type_of(weight)
            key = (exchange, layout, gradient, weight.dtype, dtype, weight.device, weight.requires_grad)
            self._names[id(weight)] = (id(module), name)
            place = (id(module), name, layout, gradient, dtype)
            member = Member(weight, tuple(weight._local_tensor.shape), whole, dim)
            alike.setdefault(key, []).append((at, place, member, math.prod(whole) * weight.element_size(), count))
        made: list[tuple[int, Batch]] = []
        for (exchange, layout, gradient, _, dtype, _, _), entries in alike.items():
            sizes = [size for *_, size, _ in entries]
            few = min(TOGETHER, max(LEAST, total // 4))
            if exchange.gathered:
                groups = divided(sizes, few // 2)
            else:
                groups = divided_for_sums(sizes, TOGETHER if self.keeps else few)
            for group in groups:
                batch = Batch(exchange, layout, gradient, grid, dtype=dtype, keeps=self.keeps)
                made.append((entries[group[0]][0], batch))
                for index, i in enumerate(group):
                    _, place, member, size, count = entries[i]
                    self._batch_of[place] = (batch, index)
                    batch.members.append(member)
                    batch.bytes, batch.reads = batch.bytes + size, batch.reads + count
        # In the order of their first reads.
        self.batches = [batch for _, batch in sorted(made, key=lambda pair: pair[0])]
        gathered = [batch for batch in self.batches if batch.exchange.gathered]
        for batch, following in zip(gathered, gathered[1:], strict=False):
            batch.following, following.preceding = following, batch

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass. What a failed pass has left is dropped. Weights that were replaced are batched again."""
        self.begin()
        gathers = self.together and torch.is_grad_enabled() and any(batch.exchange.gathered for batch in self.batches)
        with self.regather.saving() if gathers else contextlib.nullcontext():
            yield

    def begin(self) -> None:
        """Begins a forward pass."""
        if torch._C._current_graph_task_id() == -1:
            self._sent, self._awaited = [], False
            self.regather.drop()
            self.end()
        if self._batch_of is None or any(m._parameters[n] is not w or _state(w) != state for m, n, w, state in self._seen):
            self.plan(self.engine.module, self.engine.reads_of_weights())

    def end(self) -> None:
        """Ends a pass: fetched weights are no longer held."""
        self._ready = {}
        for batch in self.batches:
            batch.fetched = None
            batch.drop()

    def read(self, weight: Any, layout: Layout, gradient: Layout, needs: bool) -> torch.Tensor | None:
        """The local tensor of a weight, fetched with its batch; `None` for a weight that is read by itself."""
        if self._batch_of is None or not self.together:
            return None
        ready = self._ready.get((id(weight), layout, gradient))
        if ready is not None and ready[0] is weight and (ready[2] or not needs):
            return ready[1]
        dtype, given, weight = weight.dtype, weight, self.master(weight)
        place = self._names.get(id(weight))
        found = self._batch_of.get((*place, layout, gradient, dtype)) if place is not None else None
        if found is None or place is None:
            return None
        batch, index = found
        if batch.members[index].weight is not weight:
            return None
        fetched = batch.fetched
        if fetched is None or (needs and not fetched[1]):
            weights = [m.weight for m in batch.members]
            if any(type(w) is not type(weight) or not isinstance(w, DTensor) or w.requires_grad != weight.requires_grad for w in weights):
                return None
            differentiable = needs or (weight.requires_grad and self.engine.differentiable)
            with torch.set_grad_enabled(differentiable):
                made = self._with_gradients(batch, weights) if differentiable else batch.fetch(weights)
            if batch.exchange.gathered:
                self.regather.gathered(batch, made)
            elif dtype == weight.dtype:
                for m, local in zip(batch.members, made, strict=True):
                    self._ready[id(m.weight), layout, gradient] = (m.weight, local, differentiable)
            if batch.following is not None and batch.following.fetched is None:
                batch.following.start()
            fetched = (made, differentiable, batch.reads)
        local, left = fetched[0][index], fetched[2] - 1
        if not batch.exchange.gathered:
            self._ready[id(given), layout, gradient] = (given, local, fetched[1])
        batch.fetched = (fetched[0], fetched[1], left) if left > 0 or not batch.exchange.gathered else None
        return local

    def _with_gradients(self, batch: Batch, weights: Sequence[Any]) -> list[torch.Tensor]:
        """Fetches weights with their gradients."""
        filling = Filling(self, batch)
        made = _Fetch.apply(self, batch, filling, *weights)
        return list(made) if batch.exchange.gathered or not batch.exchange.reduced else filling.watched(made)

    # Gradients.

    def reduce(self, batch: Batch, nodes: Any, grads: Sequence[Any], slots: list[torch.Tensor] | None = None) -> list[Any]:
        """Reduces the gradients of a batch. Those that nothing but `.grad` waits for arrive when the pass ends."""
        at = [i for i, g in enumerate(grads) if g is not None]
        members = [batch.members[i] for i in at]
        results: list[Any] = [None] * len(grads)
        if not at:
            return results
        stored = _accumulates(nodes, at)
        given = [grads[i] for i in at]
        if stored and self.postponed:
            for m, g in zip(members, given, strict=True):
                self._keep(batch, m, g)
            return results
        given = [self._with_kept(batch, m, g) for m, g in zip(members, given, strict=True)]
        with torch.no_grad():
            flat = batch.reduce(members, given, slots)
        if stored and not any(_state(m.weight)[1] for m in members):
            self._sent.append((members, flat))
            self._await()
            return results
        for i, m, shard in zip(at, members, shards(members, flat), strict=True):
            results[i] = _gradient(m.weight, shard)
        return results

    def differentiable(self, batch: Batch, grads: Sequence[Any]) -> list[Any]:
        """Gradients that are differentiated again (`create_graph=True`), each reduced by itself."""
        results: list[Any] = [None] * len(grads)
        for i, (m, g) in enumerate(zip(batch.members, grads, strict=True)):
            if g is not None:
                weight, engine = m.weight, self.engine
                at = layout_of(weight)
                local = resharded(g, engine, tuple(weight.shape), (batch.gradient, at), (at, batch.layout))
                results[i] = DTensor.from_local(
                    local.to(weight.dtype).contiguous(), engine.grid.mesh, weight.placements, run_check=False, shape=weight.shape,
                    stride=weight.stride(),
                )  # fmt: skip
        return results

    def _await(self) -> None:
        if not self._awaited:
            self._awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _keep(self, batch: Batch, member: Member, grad: torch.Tensor) -> None:
        # Passes are added up in the weight's own type.
        total = dense(self._with_kept(batch, member, grad)).to(member.weight.dtype)
        self._kept[batch.place(member)] = (batch, member, total)

    def _with_kept(self, batch: Batch, member: Member, grad: torch.Tensor) -> torch.Tensor:
        earlier = self._kept.pop(batch.place(member), None)
        return grad if earlier is None else earlier[2] + grad

    def flush(self) -> None:
        """Reduces all gradients that were kept back."""
        by_batch: dict[int, tuple[Batch, list[tuple[Member, torch.Tensor]]]] = {}
        for batch, member, grad in self._kept.values():
            by_batch.setdefault(id(batch), (batch, []))[1].append((member, grad))
        self._kept = {}
        with torch.no_grad():
            # Gradients were kept in the same order on all processes.
            for batch, kept in by_batch.values():
                order = {id(m): i for i, m in enumerate(batch.members)}
                kept.sort(key=lambda found: order.get(id(found[0]), len(order)))
                members = [m for m, _ in kept]
                self._sent.append((members, batch.reduce(members, [g for _, g in kept])))
        self._finish()

    def _finish(self) -> None:
        """Adds the sums to the weights' `.grad`."""
        self._awaited = False
        self.regather.drop()
        for batch in self.batches:
            batch.drop()
        if not self.postponed and self._kept:
            # Weights that only earlier passes used.
            self.flush()
            return
        sent, self._sent = self._sent, []
        sent.reverse()
        with torch.no_grad():
            while sent:
                # The sums of one batch after the other are dropped where `.grad` has another type.
                members, flat = sent.pop()
                for m, shard in zip(members, shards(members, flat), strict=True):
                    weight = m.weight
                    if weight.grad is None:
                        weight.grad = _gradient(weight, shard)
                    else:
                        weight.grad += _gradient(weight, shard)


def _accumulates(nodes: Any, at: Sequence[int]) -> bool:
    """Whether the pass adds gradients to `.grad`; not so in `torch.autograd.grad`."""
    try:
        return all(torch._C._will_engine_execute_node(nodes[i][0]) for i in at)
    except RuntimeError:
        return False


def _state(weight: Any) -> tuple[bool, bool]:
    """Whether a weight is trained, and whether it has hooks."""
    return weight.requires_grad, bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _gradient(weight: Any, shard: torch.Tensor) -> Any:
    return _new(DTensor, shard if shard.dtype == weight.dtype else shard.to(weight.dtype), weight._spec, requires_grad=False)

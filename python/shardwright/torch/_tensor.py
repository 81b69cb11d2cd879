"""`ShardTensor`: a tensor of the user's program of which each process holds a shard.

It has the global shape, takes part in autograd, and stands for the same values as on one process. PyTorch functions of it go
to the engine, above autograd, so that each planned op runs on local shards. Ops below autograd (sums of gradients, in-place
ops) come to `__torch_dispatch__`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ._layout import Grid, Layout, dual, is_partial, layout_of, placements

aten = torch.ops.aten


class ShardTensor(torch.Tensor):
    """A distributed tensor in a layout. `full_tensor()` is the whole tensor, `to_local()` this process's shard."""

    _local: torch.Tensor
    _layout: Layout
    _engine: Any
    #: Reshards made so far, by layout and layout of the gradient.
    _reads: Any = MappingProxyType({})
    #: Whether it is a view of another tensor, or another tensor is a view of it.
    _shares: bool = False
    #: The shard with its own place in autograd, and the version for which it is valid. Local ops read it directly, so
    #: that a backward pass stays among local ops where no layout changes.
    _linked: torch.Tensor | None = None
    _made: int = 0
    #: A number for shape, strides, type and layout, while the version is `_made`.
    _sort: int | None = None

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, layout: Layout, engine: Any, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> ShardTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=local.dtype, device=local.device, requires_grad=False
        )
        self._local, self._layout, self._engine = local, layout, engine
        return self

    @property
    def _grid(self) -> Grid:
        return self._engine.grid

    @property
    def device_mesh(self) -> Any:
        """The mesh."""
        return self._grid.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """The layout as DTensor's placements, one per mesh axis."""
        return tuple(placements(self._layout))

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every process, with its gradient."""
        return whole(self, self._engine)

    def to_local(self) -> torch.Tensor:
        """This process's shard, with its gradient. Partial sums are added first."""
        at = dual(self._layout)
        return read(self, self._engine, at, at)

    def to_dtensor(self) -> DTensor:
        """The same tensor as PyTorch's DTensor, with its gradient."""
        at = dual(self._layout)
        local = read(self, self._engine, at, at)
        return DTensor.from_local(local, self._grid.mesh, placements(at), run_check=False, shape=self.shape, stride=self.stride())

    def register_hook(self, hook: Any) -> Any:
        """As `torch.Tensor.register_hook`. The hook gets the gradient as a ShardTensor."""
        with torch._C.DisableTorchFunctionSubclass():
            if (own := linked(self)) is None or not own.requires_grad:
                return super().register_hook(hook)
            at = dual(self._layout)

            def on_shard(grad: torch.Tensor) -> Any:
                changed = hook(gradient_of(self, grad))
                return None if changed is None else local_of(changed, self._engine, at)

            return own.register_hook(on_shard)

    def retain_grad(self) -> None:
        """As `torch.Tensor.retain_grad`."""
        with torch._C.DisableTorchFunctionSubclass():
            super().retain_grad()
            if (own := linked(self)) is not None and own.requires_grad:
                me = weakref.ref(self)

                def keep(grad: torch.Tensor) -> None:
                    if (tensor := me()) is not None:
                        earlier, tensor.grad = tensor.grad, gradient_of(tensor, grad)
                        if earlier is not None:
                            tensor.grad = earlier + tensor.grad

                own.register_hook(keep)

    def __repr__(self, **_: Any) -> str:
        return f"ShardTensor(shape={list(self.shape)}, placements={list(self.placements)}, local={self._local})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ShardTensor cannot be pickled: save `.full_tensor()`")

    def __deepcopy__(self, memo: Any) -> ShardTensor:
        at = dual(self._layout)
        local = self._grid.reshard(self._local.detach(), tuple(self.shape), self._layout, at).clone()
        return ShardTensor(local, at, self._engine, tuple(self.shape), self.stride())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _outside(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _below_autograd(func, args, kwargs or {})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside(func: Any, args: Any, kwargs: Any) -> Any:
    """A call outside of all modules."""
    engine = next(leaf._engine for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardTensor))
    result = engine.call(func, args, kwargs or {}, None)
    if engine.frames.stack:
        return result
    if isinstance(result, (tuple, list)):
        return pytree.tree_map(lambda x: beside_weights(x, engine), result)
    return beside_weights(result, engine)


def beside_weights(x: Any, engine: Any) -> Any:
    """A result for code outside of the module, where it may meet weights: a penalty that is added to a loss. DTensor takes a single
    number as replicated, and then sends it a DTensor for its gradient, which plain ops before it could not read."""
    if type(x) is torch.Tensor and x.requires_grad and not x.is_leaf:
        if x.dim() == 0:
            x.register_hook(lambda grad: grad.full_tensor() if isinstance(grad, DTensor) else None)
        else:
            return _Make.apply(x, engine.whole, engine, tuple(x.shape), x.stride(), engine.whole)
    return x


@dataclass(frozen=True)
class _Back:
    """Where a gradient comes from, and the layout in which it goes on."""

    engine: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source: Layout
    layout: Layout
    gradient: Layout
    #: Whether the tensor is a weight, and whether it is whole on every process.
    weight: Any
    plain: bool


class _Read(torch.autograd.Function):
    """A tensor's shard in another layout. The gradient of a replicated tensor that a split op reads is a partial sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, back: _Back, data: list[torch.Tensor]) -> torch.Tensor:
        ctx.back = back
        # A new tensor with the same memory. It is no view: it may be written.
        return aten._unsafe_view.default(data[0], data[0].shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back: _Back = ctx.back
        grid, target = back.engine.grid, dual(back.source)
        local = resharded(dense(grad), back.engine, back.shape, (back.gradient, target), (back.source, back.layout))
        if back.weight is not None:
            # Sums of processes are formed in the type of computing, as they are planned.
            made = DTensor.from_local(
                local.to(back.weight.dtype).contiguous(), grid.mesh, placements(target), run_check=False, shape=back.shape,
                stride=back.stride,
            )  # fmt: skip
            return made, None, None
        if back.plain:
            return local, None, None
        if torch.is_grad_enabled() and local.requires_grad:
            return _Make.apply(local, target, back.engine, back.shape, back.stride, back.source), None, None
        return ShardTensor(local, target, back.engine, back.shape, back.stride), None, None


def dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient that can be exchanged: those of embeddings may be sparse."""
    return grad if grad.layout is torch.strided else grad.to_dense()


class _Reshard(torch.autograd.Function):
    """A gradient's shard in another layout, where gradients are differentiated again. The second gradient takes the reshard of
    the forward pass, and so on: each is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, engine: Any, shape: tuple[int, ...], there: Any, back: Any) -> torch.Tensor:
        ctx.engine, ctx.shape, ctx.there, ctx.back = engine, shape, there, back
        made = engine.grid.reshard(local.detach(), shape, *there)
        return aten._unsafe_view.default(made, made.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return resharded(grad, ctx.engine, ctx.shape, ctx.back, ctx.there), None, None, None, None


def resharded(
    local: torch.Tensor, engine: Any, shape: tuple[int, ...], there: tuple[Layout, Layout], back: tuple[Layout, Layout]
) -> torch.Tensor:
    """A gradient's shard in another layout. `back` has the layouts between which the gradient of the result is resharded."""
    if torch.is_grad_enabled() and local.requires_grad:
        return _Reshard.apply(local, engine, shape, there, back)  # type: ignore[no-any-return]
    return engine.grid.reshard(local, shape, *there)  # type: ignore[no-any-return]


class _Make(torch.autograd.Function):
    """A distributed tensor from this process's shard. `back` is the layout of the shard's gradient."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, layout: Layout, engine: Any, shape: tuple[int, ...], stride: tuple[int, ...], back: Layout
    ) -> ShardTensor:
        ctx.made = engine, layout, back
        return ShardTensor(local.detach(), layout, engine, shape, stride)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _local_gradient(grad, *ctx.made), None, None, None, None, None


#: `_Make.apply` where no transform of `torch.func` is active.
_make: Any = super(torch.autograd.Function, _Make).apply


def _local_gradient(grad: torch.Tensor, engine: Any, layout: Layout, at: Layout) -> torch.Tensor:
    """The shard of the gradient of a tensor in `layout`. Its own gradient has the tensor's layout."""
    if torch.is_grad_enabled() and grad.requires_grad:
        return read(grad, engine, at, layout)
    return local_of(grad, engine, at)


def make(local: torch.Tensor, layout: Layout, engine: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor from this process's shard: distributed, or plain if every process holds it whole."""
    if layout == engine.whole:
        return local
    return made_of(local, layout, engine, shape, stride, dual(layout))


def made_of(
    local: torch.Tensor, layout: Layout, engine: Any, shape: tuple[int, ...], stride: tuple[int, ...], back: Layout
) -> ShardTensor:
    """A distributed tensor from this process's shard. `back` is the dual of the layout."""
    if not local.requires_grad:
        made = ShardTensor(local, layout, engine, shape, stride)
        made._linked = local
        return made
    apply = _Make.apply if torch._C._are_functorch_transforms_active() else _make
    made = apply(local, layout, engine, shape, stride, back)
    if made.requires_grad == local.requires_grad:
        made._linked = local
    return made


class _Rewrite(torch.autograd.Function):
    """Gives a distributed tensor the history of its shard, which a local op has written."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor, local: torch.Tensor) -> ShardTensor:
        ctx.mark_dirty(tensor)
        ctx.layout, ctx.engine = tensor._layout, tensor._engine
        tensor._local = local.detach()
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _local_gradient(grad, ctx.engine, ctx.layout, dual(ctx.layout))


def rewritten(x: ShardTensor, local: torch.Tensor) -> ShardTensor:
    """The tensor after an in-place op on its linked shard."""
    _Rewrite.apply(x, local)
    x._linked, x._made, x._reads, x._sort = local, version(x), {}, None
    return x


def version(x: torch.Tensor) -> int:
    """A number that changes when the tensor is written; -1 in inference mode, where PyTorch does not count."""
    return -1 if x.is_inference() else x._version


_SORTS: dict[Any, int] = {}


def sort_of(x: ShardTensor) -> int:
    """A number for what the run of a call depends on: shape, strides, element type, device and layout."""
    if x._sort is None or version(x) != x._made:
        facts = (x.shape, x.stride(), x.dtype, x.device, x._layout)
        number = _SORTS.setdefault(facts, len(_SORTS))
        if x.is_inference():
            # Writes cannot be noticed.
            return number
        x._sort = number
    return x._sort


def gradient_of(x: ShardTensor, local: torch.Tensor) -> torch.Tensor:
    """A gradient of a tensor from that of its shard: in the tensor's layout, replicated where the tensor is partial."""
    at, engine = dual(x._layout), x._engine
    if torch.is_grad_enabled() and local.requires_grad:
        if at == engine.whole:
            return resharded(local, engine, tuple(x.shape), (at, at), (at, x._layout))
        return _Make.apply(local, at, engine, tuple(x.shape), x.stride(), x._layout)  # type: ignore[no-any-return]
    return local if at == engine.whole else ShardTensor(local, at, engine, tuple(x.shape), x.stride())


def linked(x: ShardTensor) -> torch.Tensor | None:
    """The shard with its own place in autograd, if it has one."""
    local = x._linked
    return local if local is not None and local.requires_grad == x.requires_grad and version(x) == x._made else None


def _state(x: torch.Tensor, engine: Any) -> tuple[torch.Tensor, Layout, bool]:
    """A tensor's shard and layout, and whether it is plain."""
    if isinstance(x, ShardTensor):
        return x._local, x._layout, False
    if isinstance(x, DTensor):
        weight = engine.weights.master(x)
        return weight._local_tensor.to(x.dtype), layout_of(weight), False
    return x, engine.whole, True


def local_of(x: torch.Tensor, engine: Any, layout: Layout) -> torch.Tensor:
    """A tensor's shard in a layout, without its gradient."""
    local, at, _ = _state(x, engine)
    with torch.no_grad():
        return engine.grid.reshard(local.detach(), tuple(x.shape), at, layout)


def read(x: torch.Tensor, engine: Any, layout: Layout, gradient: Layout) -> torch.Tensor:
    """A tensor's shard in a layout, with its gradient expected in another. Readers of equal layouts share one reshard."""
    with torch._C.DisableTorchFunctionSubclass():
        needs = x.requires_grad and torch.is_grad_enabled()
        if isinstance(x, DTensor) and (fetched := engine.weights.read(x, layout, gradient, needs)) is not None:
            return fetched
        local, at, plain = _state(x, engine)
        if layout == at:
            if not needs:
                return x if plain else local
            if gradient == dual(at):
                if plain:
                    return x
                if isinstance(x, ShardTensor) and (own := linked(x)) is not None:
                    return own
        key = (layout, gradient if needs else None)
        cache = engine.reads(x)
        if key not in cache:
            data = cache.get(layout)
            if data is None:
                data = cache[layout] = local_of(x, engine, layout)
            if needs:
                source = engine.weights.master(x)
                weight = source if isinstance(x, DTensor) else None
                if isinstance(x, ShardTensor) and (own := linked(x)) is not None:
                    source, plain = own, True
                back = _Back(engine, tuple(x.shape), x.stride(), at, layout, gradient, weight, plain)
                data = _Read.apply(source, back, [data])
            cache[key] = data
        return cache[key]


def settled(x: torch.Tensor, engine: Any) -> torch.Tensor:
    """The tensor without partial sums, with its gradient."""
    if not isinstance(x, ShardTensor) or not is_partial(x._layout):
        return x
    at = dual(x._layout)
    return make(read(x, engine, at, at), at, engine, tuple(x.shape), x.stride())


def whole(x: torch.Tensor, engine: Any) -> torch.Tensor:
    """The whole tensor on every process, with its gradient."""
    if not isinstance(x, (ShardTensor, DTensor)):
        return x
    if isinstance(x, DTensor) and x.device_mesh != engine.grid.mesh:
        return x.full_tensor()
    if isinstance(x, ShardTensor):
        engine = x._engine
    return read(x, engine, engine.whole, engine.whole)


# Below autograd.

_SAME = {aten.detach.default, aten.alias.default, aten.clone.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
_LIKE = {
    aten.ones_like.default, aten.zeros_like.default, aten.empty_like.default, aten.full_like.default,
}  # fmt: skip


def _below_autograd(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shards = [leaf for leaf in leaves if isinstance(leaf, ShardTensor)]
    first = shards[0]
    engine = first._engine
    mutable = func._schema.is_mutable
    target = args[0] if mutable and args and isinstance(args[0], ShardTensor) else None
    if func in _VIEWS and isinstance(args[0], ShardTensor) and list(args[1]) == list(first.shape):
        func, args = aten.alias.default, (args[0],)
    if func in _SAME and isinstance(args[0], ShardTensor):
        return _wrapped(func, func(args[0]._local, *args[1:], **kwargs), args[0]._layout, engine, args, kwargs)
    if func in _LIKE and not is_partial(first._layout):
        return _wrapped(func, func(first._local, *args[1:], **kwargs), first._layout, engine, args, kwargs)
    random = torch.Tag.nondeterministic_seeded in func.tags
    if (torch.Tag.pointwise in func.tags or func is aten._to_copy.default) and not random:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        lead = target if target is not None else next((t for t in shards if t.shape == shape), None)
        if lead is not None and lead.shape == shape:
            layout = dual(lead._layout)
            if target is not None and target._layout != layout:
                target._local, target._layout, target._sort = local_of(target, engine, layout), layout, None
            given = [
                local_of(leaf, engine, _aligned(leaf, shape, layout)) if isinstance(leaf, torch.Tensor) and leaf is not target
                else target._local if leaf is target and target is not None else leaf
                for leaf in leaves
            ]  # fmt: skip
            own, named = pytree.tree_unflatten(given, spec)
            result = func(*own, **named)
            if target is not None:
                target._reads = {}
                return target
            return _wrapped(func, result, layout, engine, args, kwargs)
    # Anything else: every process computes the whole.
    held = {id(t): _whole_data(t, engine) for t in leaves if isinstance(t, ShardTensor)}
    given = [held[id(leaf)] if isinstance(leaf, ShardTensor) else leaf for leaf in leaves]
    own, named = pytree.tree_unflatten(given, spec)
    result = func(*own, **named)
    if mutable:
        for t in shards:
            at = dual(t._layout)
            block = engine.grid.reshard(held[id(t)], tuple(t.shape), engine.whole, at)
            if at == t._layout:
                t._local.copy_(block)
            else:
                t._local, t._layout, t._sort = block, at, None
            t._reads = {}
        back = {id(held[id(t)]): t for t in shards}
        return pytree.tree_map(lambda r: back.get(id(r), r), result)
    return result


def _whole_data(t: ShardTensor, engine: Any) -> torch.Tensor:
    """A copy of the whole tensor with the strides that it has on one process."""
    data = engine.grid.reshard(t._local, tuple(t.shape), t._layout, engine.whole)
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return made.copy_(data)


def _aligned(t: torch.Tensor, shape: Any, layout: Layout) -> Layout:
    """The layout of an operand that broadcasts against a tensor of this layout."""
    skip = len(shape) - t.dim()

    def entry(at: str) -> str:
        if not at.startswith("S"):
            return at
        dim = int(at[1:]) - skip
        return f"S{dim}" if dim >= 0 and t.shape[dim] == shape[dim + skip] else "R"

    return tuple(entry(at) for at in layout)


def _wrapped(func: Any, result: Any, layout: Layout, engine: Any, args: Any, kwargs: Any) -> Any:
    def wrap(r: Any) -> Any:
        if not isinstance(r, torch.Tensor):
            return r
        like = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardTensor))
        shape = torch.broadcast_shapes(*(t.shape for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)))
        stride = like.stride() if like.shape == shape else torch.empty(shape, device="meta").stride()
        return ShardTensor(r, layout, engine, tuple(shape), tuple(stride))

    return pytree.tree_map(wrap, result)

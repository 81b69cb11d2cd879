"""Matrix products, and embedding tables."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

from .._graph import AtenCall
from ._table import X, Y, aten, binary, calls, require, translates

if TYPE_CHECKING:
    from .._translate import Translator

#: Letters of the leading dimensions, by their number: samples, then positions.
_LEADING = ["", "n", "ns", "nst", "nstu", "nstuv"]


def product(t: Translator, name: str, spec: str, x: int, y: int, call: AtenCall | None = None) -> int:
    """An einsum of two tensors."""
    operands, result = spec.split("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(operands.split(","), (x, y), strict=True):
        sizes.update(zip(letters, t.shape(tensor), strict=True))
    return t.emit(name, "contract", [x, y], tuple(sizes[letter] for letter in result), call=call, spec=spec)


def _leading(t: Translator, x: int) -> str:
    rank = len(t.shape(x)) - 1
    require(0 <= rank < len(_LEADING), f"an operand with {rank + 1} dimensions")
    return _LEADING[rank]


@translates(aten.linear.default)
def linear(t: Translator, x: Any, weight: Any, bias: Any = None) -> int:
    x, weight = t.tensor(x), t.tensor(weight)
    lead = _leading(t, x)
    y = product(t, "", f"{lead}c,oc->{lead}o", x, weight, calls(aten.linear.default, X, Y))
    return y if bias is None else binary(t, "add_bias", "add", y, t.tensor(bias))


@translates(aten.addmm.default)
def addmm(t: Translator, bias: Any, x: Any, weight: Any, beta: float = 1, alpha: float = 1) -> int:
    require(alpha == 1 and beta == 1, f"alpha={alpha}, beta={beta}")
    y = product(t, "", "nc,co->no", t.tensor(x), t.tensor(weight), calls(aten.mm.default, X, Y))
    return binary(t, "add_bias", "add", y, t.tensor(bias))


@translates(aten.mm.default, aten.bmm.default, aten.matmul.default)
def matmul(t: Translator, x: Any, y: Any) -> int:
    x, y = t.tensor(x), t.tensor(y)
    a, b = t.shape(x), t.shape(y)
    if len(b) == 2 and len(a) >= 1:
        lead = _leading(t, x)
        return product(t, "", f"{lead}c,co->{lead}o", x, y)
    require(len(a) == len(b) > 2 and a[:-2] == b[:-2], f"a product of shapes {list(a)} and {list(b)}")
    batch = string.ascii_lowercase[: len(a) - 2]
    return product(t, "", f"{batch}xy,{batch}yz->{batch}xz", x, y)


@translates(aten.einsum.default)
def einsum(t: Translator, spec: str, operands: list[Any], path: Any = None) -> int:
    spec = spec.replace(" ", "")
    require("." not in spec and "->" in spec and len(operands) == 2, f"einsum {spec} of {len(operands)} operands")
    return product(t, "", spec, t.tensor(operands[0]), t.tensor(operands[1]))


@translates(aten.embedding.default)
def embedding(
    t: Translator, table: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> int:
    require(not scale_grad_by_freq and not sparse, "gradients that are sparse or scaled by frequency")
    table, ids = t.tensor(table), t.tensor(ids)
    rows, *width = t.shape(table)
    return t.emit("", "gather", [table, ids], (*t.shape(ids), *width), axis=0, base=0, extent=rows)

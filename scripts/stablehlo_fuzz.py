#!/usr/bin/env python3
"""Compares random StableHLO programs with JAX.

    scripts/stablehlo_fuzz.py CHECK [--cases N] [--seed N] [--keep FOLDER]

CHECK is the built example `stablehlo_check` of the stablehlo crate. A program is a random composition of JAX functions on
random shapes, half of them with its gradient. JAX lowers it to text and computes its results; our importer and interpreter
have to give the same numbers or to refuse with a reason. The script prints every difference, keeps those cases in FOLDER, and
ends with status 1 if there is one. Needs the package jax.
"""

import argparse
import collections
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def unary(rng, x):
    functions = [jnp.tanh, jnp.sin, jnp.exp, jax.nn.relu, jax.nn.gelu, jnp.abs, jnp.square, jax.nn.sigmoid, jnp.floor]
    functions += [jax.nn.softmax, jax.nn.log_softmax, lambda v: v * 0.5 + 1, lambda v: -v, jnp.sign]
    return rng.choice(functions)(jnp.clip(x, -8, 8))


def binary(rng, x, other):
    functions = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lambda a, b: jnp.where(a > b, a, b)]
    return rng.choice(functions)(x, other)


def axis_of(rng, x):
    return rng.randrange(x.ndim)


def reduce(rng, x):
    function = rng.choice([jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.var])
    return function(x, axis=axis_of(rng, x), keepdims=rng.random() < 0.5)


def move(rng, x):
    axis = axis_of(rng, x)
    size = x.shape[axis]
    kind = rng.randrange(9)
    if kind == 0:
        return jnp.transpose(x, rng.sample(range(x.ndim), x.ndim))
    if kind == 1:
        return x.reshape(-1, size) if x.size % size == 0 else x
    if kind == 2:
        start = rng.randrange(size)
        return lax.slice_in_dim(x, start, rng.randrange(start, size) + 1, rng.choice([1, 1, 2]), axis)
    if kind == 3:
        return jnp.concatenate([x, x * 2], axis)
    if kind == 4:
        pads = [(rng.randrange(-1 if n > 2 else 0, 3), rng.randrange(3), rng.randrange(2)) for n in x.shape]
        return lax.pad(x, jnp.float32(0.5), pads)
    if kind == 5:
        return jnp.flip(x, axis)
    if kind == 6:
        return jnp.cumsum(x, axis)
    if kind == 7:
        ids = np.array([rng.randrange(size) for _ in range(rng.randrange(1, 5))], np.int32)
        return jnp.take(x, jnp.asarray(ids), axis=axis)
    return jnp.broadcast_to(x[None], (rng.randrange(1, 3), *x.shape))


def product(rng, numbers, x):
    weight = numbers.standard_normal((x.shape[-1], rng.randrange(1, 6))).astype(np.float32)
    return x @ jnp.asarray(weight)


def window(rng, numbers, x):
    x = x.reshape((1,) * max(0, 3 - x.ndim) + x.shape)[:, :, :] if x.ndim <= 3 else x.reshape(-1, *x.shape[-2:])
    kernel = min(rng.randrange(1, 4), x.shape[2])
    kind = rng.randrange(3)
    if kind == 0:
        weight = numbers.standard_normal((rng.randrange(1, 4), x.shape[1], kernel)).astype(np.float32)
        padding = [(rng.randrange(3), rng.randrange(3))]
        dilations = {"lhs_dilation": (rng.choice([1, 1, 2]),), "rhs_dilation": (rng.choice([1, 1, 2]),)}
        if (kernel - 1) * dilations["rhs_dilation"][0] + 1 > x.shape[2]:
            dilations = {}
        return lax.conv_general_dilated(x, jnp.asarray(weight), (rng.choice([1, 2]),), padding, **dilations)
    start, function = [(-jnp.inf, lax.max), (0.0, lax.add)][kind - 1]
    stride = rng.choice([1, 2])
    return lax.reduce_window(x, start, function, (1, 1, kernel), (1, 1, stride), rng.choice(["VALID", "SAME"]))


def program(seed):
    """A random function and its arguments. The seed draws the same choices in every trace."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
    arguments = [numbers.standard_normal(shape).astype(np.float32) for _ in range(2)]
    inner = rng.randrange(1 << 30)

    def function(x, y):
        rng, numbers = random.Random(inner), np.random.default_rng(inner)
        first = x
        for _ in range(rng.randrange(2, 9)):
            kind = rng.randrange(8)
            if kind <= 1:
                x = unary(rng, x)
            elif kind == 2:
                x = binary(rng, x, y if x.shape == y.shape else x * 0.5)
            elif kind == 3 and x.ndim > 1:
                x = reduce(rng, x)
            elif kind in (4, 5) and x.ndim:
                x = move(rng, x)
            elif kind == 6 and x.ndim:
                x = product(rng, numbers, x)
            elif kind == 7 and x.ndim:
                x = window(rng, numbers, x)
            if x.size > 1 << 14 or x.ndim > 5:
                x = x.reshape(-1)[:64]
        return x, first.sum() + x.sum()

    if rng.random() < 0.5:
        return jax.value_and_grad(lambda x, y: function(x, y)[1], argnums=(0, 1)), arguments
    return function, arguments


def flat(tree):
    return [np.asarray(leaf).astype(np.float64).ravel().tolist() for leaf in jax.tree.leaves(tree)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", type=pathlib.Path)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=pathlib.Path, default=None)
    options = parser.parse_args()
    keep = options.keep or pathlib.Path(tempfile.mkdtemp(prefix="stablehlo-fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.seed, options.seed + options.cases):
            try:
                function, arguments = program(number)
                text = jax.jit(function, keep_unused=True).lower(*arguments).as_text()
                results = jax.jit(function)(*arguments)
            except (TypeError, ValueError, ZeroDivisionError):
                continue  # a composition that JAX refuses
            case = pathlib.Path(folder) / f"{number:06}"
            case.with_suffix(".mlir").write_text(text)
            case.with_suffix(".json").write_text(json.dumps({"inputs": flat(arguments), "outputs": flat(results)}))
            written.append(str(case))
        done = subprocess.run([options.check], input="\n".join(written), capture_output=True, text=True)
        verdicts = [line.split("\t") for line in done.stdout.splitlines()]
        counts = collections.Counter(verdict[0] for verdict in verdicts)
        lost = len(written) - len(verdicts)
        wrong = [verdict for verdict in verdicts if verdict[0] == "differs"]
        for verdict in wrong + ([["crashed", written[len(verdicts)], done.stderr[-500:]]] if lost else []):
            for suffix in (".mlir", ".json"):
                source = pathlib.Path(verdict[1]).with_suffix(suffix)
                (keep / source.name).write_bytes(source.read_bytes())
            print(verdict[0], keep / pathlib.Path(verdict[1]).name, verdict[2])
        reasons = collections.Counter(verdict[2].split(": ", 1)[-1][:100] for verdict in verdicts if verdict[0] == "refused")
        for reason, count in reasons.most_common(8):
            print(f"refused {count}: {reason}")
    print(f"{len(written)} programs: {dict(counts)}")
    sys.exit(1 if wrong or lost else 0)


if __name__ == "__main__":
    main()

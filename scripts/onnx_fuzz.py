#!/usr/bin/env python3
"""Compares mutated ONNX node tests with onnxruntime: the long form of scripts/onnx_check.

    scripts/onnx_fuzz.py CHECK [--cases N] [--seed N] [--keep FOLDER]

CHECK is the built example `onnx_check` of the onnx crate. Each case is one of ONNX's own node tests with other attributes,
other shapes or other numbers. onnxruntime evaluates it; mutants that it refuses are left out. Our interpreter has to give the
same numbers or to refuse. The script prints every difference, keeps those cases in FOLDER, and ends with status 1 if there is
one. Needs the packages onnx, onnxruntime and numpy.
"""

import argparse
import collections
import pathlib
import random
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, helper, numpy_helper
from onnx_cases import is_tensor, write_case

# Results that depend on more than the inputs, or that onnxruntime documents as different.
LEFT_OUT = ("Random", "Bernoulli", "Multinomial", "Dropout", "training", "Optimizer", "Quantize", "QLinear", "Integer")


def seeds():
    """Node tests whose inputs and outputs are tensors of known types."""
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases(None):
        inputs, outputs = case.data_sets[0]
        plain = all(is_tensor(value) and not isinstance(value, onnx.TensorProto) for value in [*inputs, *outputs])
        ops = {node.op_type for node in case.model.graph.node}
        if plain and not any(word in op for word in LEFT_OUT for op in ops):
            yield case.name, case.model, [np.asarray(value) for value in inputs]


def mutate_attribute(rng, attribute):
    if attribute.type == AttributeProto.INT:
        attribute.i += rng.choice([-2, -1, 1, 2, 3])
    elif attribute.type == AttributeProto.INTS and attribute.ints:
        at = rng.randrange(len(attribute.ints))
        attribute.ints[at] = max(-4, attribute.ints[at] + rng.choice([-1, 1, 2]))
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = rng.choice([0.0, 0.5, 1.0, -1.0, attribute.f * 2, 1e-5])
    elif attribute.type == AttributeProto.STRING:
        words = [b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"NOTSET", b"constant", b"reflect", b"edge", b"wrap", b"linear"]
        words += [b"nearest", b"cubic", b"asymmetric", b"align_corners", b"half_pixel", b"none", b"mean", b"sum", b"tanh"]
        words += [b"floor", b"ceil", b"round_prefer_ceil", b"reverse", b"bidirectional", b"forward", b"CRD", b"DCR"]
        attribute.s = rng.choice(words)


def mutate_inputs(rng, numbers, inputs, indices):
    kind = rng.randrange(4 if indices else 3)
    if kind == 0 and inputs:
        # One dimension of all inputs that have it grows.
        size = rng.choice([n for array in inputs for n in array.shape] or [1])
        other = size + rng.choice([1, 2, 3])
        inputs = [resized(array, size, other) for array in inputs]
    floats = [i for i, array in enumerate(inputs) if array.dtype.kind == "f" and array.size]
    if kind in (1, 2) and floats:
        i = rng.choice(floats)
        scale = rng.choice([1.0, 1.0, 10.0, 0.01])
        inputs[i] = (numbers.standard_normal(inputs[i].shape) * scale).astype(inputs[i].dtype)
    whole = [i for i, array in enumerate(inputs) if array.dtype.kind == "i" and array.size]
    if kind == 3 and whole:
        i = rng.choice(whole)
        changed = inputs[i].copy()
        changed.flat[rng.randrange(changed.size)] += rng.choice([-2, -1, 1, 2])
        inputs[i] = changed
    return inputs


def resized(array, size, other):
    for axis, length in enumerate(array.shape):
        if length == size and size > 0:
            array = np.take(array, np.arange(other) % size, axis=axis)
    return array


def mutant(rng, numbers, model, inputs):
    """A changed copy of a node test, with the shapes of its inputs declared."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    inputs = list(inputs)
    # ONNX leaves the result of a scatter open where an index occurs twice.
    indices = not any(node.op_type.startswith("Scatter") for node in model.graph.node)
    for _ in range(rng.choice([1, 1, 2, 3])):
        attributes = [a for node in model.graph.node for a in node.attribute if a.type != AttributeProto.GRAPH]
        if attributes and rng.random() < 0.6:
            mutate_attribute(rng, rng.choice(attributes))
        else:
            inputs = mutate_inputs(rng, numbers, inputs, indices)
    for info, array in zip(model.graph.input, inputs):
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, array.shape))
    for info in model.graph.output:
        info.type.tensor_type.ClearField("shape")
    return model, inputs


def expected(model, inputs):
    """onnxruntime's results; none where it refuses the mutant."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        results = session.run(None, {info.name: array for info, array in zip(model.graph.input, inputs)})
    except Exception:  # onnxruntime has many types of errors
        return None
    plain = all(isinstance(result, np.ndarray) and result.dtype.kind in "fiub" for result in results)
    small = plain and sum(result.size for result in results) < 1 << 20
    # onnxruntime has the least float where others have minus infinity.
    finite = all((np.isfinite(r) & (np.abs(r) < 3e38)).all() for r in results if r.dtype.kind == "f")
    return results if small and finite else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", type=pathlib.Path)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=pathlib.Path, default=None)
    options = parser.parse_args()
    rng, numbers = random.Random(options.seed), np.random.default_rng(options.seed)
    known = list(seeds())
    keep = options.keep or pathlib.Path(tempfile.mkdtemp(prefix="onnx-fuzz-"))
    written = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.cases):
            name, model, inputs = rng.choice(known)
            try:
                model, inputs = mutant(rng, numbers, model, inputs)
            except (ValueError, OverflowError, TypeError):
                continue
            results = expected(model, inputs)
            if results is not None:
                case = pathlib.Path(folder) / f"{number:06}_{name}"
                write_case(case, model, inputs, results)
                written.append(str(case))
        lines = subprocess.run(
            [options.check], input="\n".join(written), capture_output=True, text=True
        )
        verdicts = [line.split("\t") for line in lines.stdout.splitlines()]
        counts = collections.Counter(verdict[0] for verdict in verdicts)
        wrong = [verdict for verdict in verdicts if verdict[0] == "differs"]
        lost = len(written) - len(verdicts)
        for verdict in wrong + ([["crashed", written[len(verdicts)], lines.stderr[-500:]]] if lost else []):
            case = pathlib.Path(verdict[1])
            kept = keep / case.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            if case.exists():
                subprocess.run(["cp", "-r", case, kept], check=True)
            print(verdict[0], kept, verdict[2])
    print(f"{len(written)} of {options.cases} mutants accepted by onnxruntime: {dict(counts)}")
    sys.exit(1 if wrong or lost else 0)


if __name__ == "__main__":
    main()

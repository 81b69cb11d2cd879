#!/usr/bin/env python3
"""Writes ONNX test cases into a folder: ONNX's own node tests, and models with onnxruntime's results.

    scripts/onnx_cases.py OUT [nodes|models]

Each case is a folder with model.onnx, input_0.pb, ..., output_0.pb, ...; `onnx_check` (an example of the onnx
crate) runs them through our interpreter. Needs the packages onnx, numpy and, for models, onnxruntime.
"""

import pathlib
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write_case(folder, model, inputs, outputs):
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(folder / "model.onnx"))
    for kind, arrays, infos in (("input", inputs, model.graph.input), ("output", outputs, model.graph.output)):
        for i, (array, info) in enumerate(zip(arrays, infos)):
            named = isinstance(array, onnx.TensorProto)
            tensor = array if named else numpy_helper.from_array(np.asarray(array), info.name)
            (folder / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())


def is_tensor(value):
    return isinstance(value, (np.ndarray, np.generic, onnx.TensorProto))


def nodes(out):
    """ONNX's own node tests, those whose inputs and outputs are tensors."""
    from onnx.backend.test.case.node import collect_testcases

    written = skipped = 0
    for case in collect_testcases(None):
        inputs, outputs = case.data_sets[0]
        if not all(is_tensor(value) for value in [*inputs, *outputs]):
            skipped += 1
            continue
        try:
            write_case(out / case.name, case.model, inputs, outputs)
            written += 1
        except (TypeError, ValueError):
            skipped += 1
    print(f"{written} node tests; {skipped} of sequences, strings and the like left out", file=sys.stderr)


class Builder:
    """Builds models the way exporters write them, with random weights."""

    def __init__(self, name, seed, opset=18):
        self.name, self.opset = name, opset
        self.random = np.random.default_rng(seed)
        self.nodes, self.weights, self.inputs, self.count = [], [], [], 0

    def fresh(self, hint):
        self.count += 1
        return f"{hint}_{self.count}"

    def input(self, name, shape, dtype=np.float32, below=None):
        if below is None:
            array = self.random.standard_normal(shape).astype(dtype)
        else:
            array = self.random.integers(0, below, shape).astype(dtype)
        self.inputs.append((name, array))
        return name

    def constant(self, array, hint="const"):
        name = self.fresh(hint)
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape, scale=None, positive=False):
        scale = scale if scale is not None else 1.0 / max(1.0, float(np.prod(shape[1:]))) ** 0.5
        array = (self.random.standard_normal(shape) * scale).astype(np.float32)
        return self.constant(np.abs(array) + 0.5 if positive else array, "weight")

    def op(self, kind, *inputs, outputs=1, **attributes):
        names = [self.fresh(kind.lower()) for _ in range(outputs)]
        node = helper.make_node(kind, list(inputs), names, name=self.fresh(f"node_{kind}"), **attributes)
        self.nodes.append(node)
        return names[0] if outputs == 1 else names

    def ints(self, *values):
        return self.constant(np.array(values, np.int64), "shape")

    def number(self, value):
        return self.constant(np.array(value, np.float32), "number")

    def finish(self, out, *outputs):
        import onnxruntime

        info = lambda n, a: helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [info(n, a) for n, a in self.inputs],
            [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        expected = session.run(None, dict(self.inputs))
        write_case(out / self.name, model, [a for _, a in self.inputs], expected)


def conv_bn(b, x, inputs, outputs, kernel, stride=1, groups=1, act="Relu"):
    pad = kernel // 2
    w = b.weight(outputs, inputs // groups, kernel, kernel)
    x = b.op("Conv", x, w, kernel_shape=[kernel] * 2, pads=[pad] * 4, strides=[stride] * 2, group=groups)
    mean, var = b.weight(outputs, scale=0.1), b.weight(outputs, scale=0.1, positive=True)
    x = b.op("BatchNormalization", x, b.weight(outputs, positive=True), b.weight(outputs), mean, var)
    return b.op(act, x) if act else x


def resnet(out):
    b = Builder("resnet", 1)
    x = conv_bn(b, b.input("x", (2, 3, 32, 32)), 3, 8, 7, 2)
    x = b.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    y = conv_bn(b, x, 8, 16, 3, 2)
    y = conv_bn(b, y, 16, 16, 3, act=None)
    x = b.op("Relu", b.op("Add", y, conv_bn(b, x, 8, 16, 1, 2, act=None)))
    x = b.op("Flatten", b.op("GlobalAveragePool", x), axis=1)
    b.finish(out, b.op("Gemm", x, b.weight(10, 16), b.weight(10), transB=1))


def densenet(out):
    b = Builder("densenet", 2)
    x = conv_bn(b, b.input("x", (2, 3, 16, 16)), 3, 8, 3)
    for i in range(3):
        x = b.op("Concat", x, conv_bn(b, x, 8 + 4 * i, 4, 3), axis=1)
    x = b.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = b.op("ReduceMean", x, b.ints(2, 3), keepdims=0)
    b.finish(out, b.op("Gemm", x, b.weight(20, 10), b.weight(10)))


def efficientnet(out):
    b = Builder("efficientnet", 3)
    silu = lambda x: b.op("Mul", x, b.op("Sigmoid", x))
    x = silu(conv_bn(b, b.input("x", (2, 3, 32, 32)), 3, 8, 3, 2, act=None))
    y = silu(conv_bn(b, x, 8, 16, 1, act=None))
    y = silu(conv_bn(b, y, 16, 16, 5, groups=16, act=None))
    s = b.op("GlobalAveragePool", y)
    s = silu(b.op("Conv", s, b.weight(4, 16, 1, 1), b.weight(4)))
    s = b.op("Sigmoid", b.op("Conv", s, b.weight(16, 4, 1, 1), b.weight(16)))
    y = conv_bn(b, b.op("Mul", y, s), 16, 8, 1, act=None)
    x = b.op("Add", x, y)
    x = b.op("Flatten", b.op("GlobalAveragePool", x))
    b.finish(out, b.op("Gemm", x, b.weight(8, 10), b.weight(10)))


def layer_norm(b, x, width, decomposed=False, eps=1e-6):
    scale, shift = b.weight(width, positive=True), b.weight(width)
    if not decomposed:
        return b.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=eps)
    mean = b.op("ReduceMean", x, b.ints(-1))
    d = b.op("Sub", x, mean)
    var = b.op("ReduceMean", b.op("Pow", d, b.number(2.0)), b.ints(-1))
    root = b.op("Sqrt", b.op("Add", var, b.number(eps)))
    return b.op("Add", b.op("Mul", b.op("Div", d, root), scale), shift)


def linear(b, x, inputs, outputs):
    return b.op("Add", b.op("MatMul", x, b.weight(inputs, outputs)), b.weight(outputs))


def gelu_erf(b, x):
    e = b.op("Erf", b.op("Div", x, b.number(2**0.5)))
    return b.op("Mul", b.op("Mul", x, b.op("Add", e, b.number(1.0))), b.number(0.5))


def attend(b, q, k, v, heads, size, tokens, causal=False, samples=2):
    split = lambda x: b.op("Transpose", b.op("Reshape", x, b.ints(samples, tokens, heads, size)), perm=[0, 2, 1, 3])
    q, k, v = split(q), split(k), split(v)
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Div", scores, b.number(size**0.5))
    if causal:
        ones = b.op("ConstantOfShape", b.ints(tokens, tokens), value=helper.make_tensor("v", 1, [1], [1.0]))
        seen = b.op("Cast", b.op("Trilu", ones, upper=0), to=TensorProto.BOOL)
        scores = b.op("Where", seen, scores, b.number(-1e9))
    weights = b.op("Softmax", scores, axis=-1)
    y = b.op("Transpose", b.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    return b.op("Reshape", y, b.ints(samples, tokens, heads * size))


def vit(out):
    b = Builder("vit", 4)
    x = b.op("Conv", b.input("x", (2, 3, 16, 16)), b.weight(24, 3, 4, 4), b.weight(24), strides=[4, 4])
    x = b.op("Transpose", b.op("Reshape", x, b.ints(2, 24, 16)), perm=[0, 2, 1])
    token = b.op("Expand", b.constant(b.random.standard_normal((1, 1, 24)).astype(np.float32)), b.ints(2, 1, 24))
    x = b.op("Add", b.op("Concat", token, x, axis=1), b.weight(1, 17, 24))
    y = layer_norm(b, x, 24)
    # timm's fused projection: one product, heads and the three roles split by a reshape.
    y = b.op("Reshape", linear(b, y, 24, 72), b.ints(2, 17, 3, 4, 6))
    y = b.op("Transpose", y, perm=[2, 0, 3, 1, 4])
    q, k, v = (b.op("Gather", y, b.constant(np.array(i, np.int64)), axis=0) for i in range(3))
    w = b.op("Softmax", b.op("MatMul", b.op("Mul", q, b.number(6**-0.5)), b.op("Transpose", k, perm=[0, 1, 3, 2])))
    y = b.op("Reshape", b.op("Transpose", b.op("MatMul", w, v), perm=[0, 2, 1, 3]), b.ints(2, 17, 24))
    x = b.op("Add", x, linear(b, y, 24, 24))
    y = gelu_erf(b, linear(b, layer_norm(b, x, 24), 24, 96))
    x = b.op("Add", x, linear(b, y, 96, 24))
    x = b.op("Gather", x, b.constant(np.array(0, np.int64)), axis=1)
    b.finish(out, linear(b, x, 24, 10))


def gpt(out):
    b = Builder("gpt", 5)
    tokens = b.input("tokens", (2, 8), np.int64, below=50)
    table = b.weight(50, 24)
    shape = b.op("Shape", tokens)
    length = b.op("Gather", shape, b.constant(np.array(1, np.int64)))
    positions = b.op("Range", b.constant(np.array(0, np.int64)), length, b.constant(np.array(1, np.int64)))
    x = b.op("Add", b.op("Gather", table, tokens), b.op("Gather", b.weight(16, 24), positions))
    y = layer_norm(b, x, 24, decomposed=True)
    flat = b.op("Reshape", y, b.ints(-1, 24))
    fused = b.op("Gemm", flat, b.weight(24, 72), b.weight(72))
    fused = b.op("Reshape", fused, b.op("Concat", shape, b.ints(72), axis=0))
    q, k, v = b.op("Split", fused, outputs=3, axis=2, num_outputs=3)
    y = linear(b, attend(b, q, k, v, 4, 6, 8, causal=True), 24, 24)
    x = b.op("Add", x, y)
    y = linear(b, layer_norm(b, x, 24), 24, 96)
    cube = b.op("Mul", b.op("Pow", y, b.number(3.0)), b.number(0.044715))
    t = b.op("Tanh", b.op("Mul", b.op("Add", y, cube), b.number(0.7978845608)))
    y = b.op("Mul", b.op("Mul", y, b.number(0.5)), b.op("Add", t, b.number(1.0)))
    x = b.op("Add", x, linear(b, y, 96, 24))
    b.finish(out, b.op("MatMul", layer_norm(b, x, 24), b.op("Transpose", table, perm=[1, 0])))


def bert(out):
    b = Builder("bert", 6)
    tokens = b.input("tokens", (2, 8), np.int64, below=50)
    x = b.op("Add", b.op("Gather", b.weight(50, 24), tokens), b.weight(1, 8, 24))
    x = layer_norm(b, x, 24)
    q, k, v = (linear(b, x, 24, 24) for _ in range(3))
    x = layer_norm(b, b.op("Add", x, linear(b, attend(b, q, k, v, 4, 6, 8), 24, 24)), 24)
    y = linear(b, gelu_erf(b, linear(b, x, 24, 96)), 96, 24)
    b.finish(out, layer_norm(b, b.op("Add", x, y), 24))


def llama(out):
    b = Builder("llama", 7)
    x = b.op("Gather", b.weight(50, 24), b.input("tokens", (2, 8), np.int64, below=50))

    def rms(x):
        mean = b.op("ReduceMean", b.op("Pow", x, b.number(2.0)), b.ints(-1))
        root = b.op("Sqrt", b.op("Add", mean, b.number(1e-5)))
        return b.op("Mul", b.op("Mul", x, b.op("Reciprocal", root)), b.weight(24, positive=True))

    angles = np.outer(np.arange(8), 1e4 ** (-np.arange(3) / 3)).astype(np.float32)
    cos, sin = (b.constant(np.tile(f(angles), (1, 2))[None, None]) for f in (np.cos, np.sin))

    def rotated(x):
        first = b.op("Slice", x, b.ints(0), b.ints(3), b.ints(3))
        second = b.op("Slice", x, b.ints(3), b.ints(2**62), b.ints(3))
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
        return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))

    y = rms(x)
    heads = lambda x, n: b.op("Transpose", b.op("Reshape", x, b.ints(2, 8, n, 6)), perm=[0, 2, 1, 3])
    q = rotated(heads(b.op("MatMul", y, b.weight(24, 24)), 4))
    k = rotated(heads(b.op("MatMul", y, b.weight(24, 12)), 2))
    v = heads(b.op("MatMul", y, b.weight(24, 12)), 2)
    repeat = lambda x: b.op(
        "Reshape", b.op("Expand", b.op("Unsqueeze", x, b.ints(2)), b.ints(2, 2, 2, 8, 6)), b.ints(2, 4, 8, 6)
    )
    scores = b.op("MatMul", q, b.op("Transpose", repeat(k), perm=[0, 1, 3, 2]))
    mask = b.constant(np.triu(np.full((8, 8), -1e9, np.float32), 1))
    w = b.op("Softmax", b.op("Add", b.op("Mul", scores, b.number(6**-0.5)), mask))
    y = b.op("Reshape", b.op("Transpose", b.op("MatMul", w, repeat(v)), perm=[0, 2, 1, 3]), b.ints(2, 8, 24))
    x = b.op("Add", x, b.op("MatMul", y, b.weight(24, 24)))
    y = rms(x)
    gate = b.op("MatMul", y, b.weight(24, 48))
    gate = b.op("Mul", gate, b.op("Sigmoid", gate))
    y = b.op("MatMul", b.op("Mul", gate, b.op("MatMul", y, b.weight(24, 48))), b.weight(48, 24))
    b.finish(out, b.op("MatMul", rms(b.op("Add", x, y)), b.weight(24, 50)))


def convnext(out):
    b = Builder("convnext", 8)
    x = b.op("Conv", b.input("x", (2, 3, 16, 16)), b.weight(8, 3, 4, 4), b.weight(8), strides=[4, 4])
    y = b.op("Conv", x, b.weight(8, 1, 7, 7), b.weight(8), pads=[3] * 4, group=8)
    y = layer_norm(b, b.op("Transpose", y, perm=[0, 2, 3, 1]), 8)
    y = linear(b, gelu_erf(b, linear(b, y, 8, 32)), 32, 8)
    y = b.op("Transpose", b.op("Mul", y, b.weight(8)), perm=[0, 3, 1, 2])
    x = b.op("ReduceMean", b.op("Add", x, y), b.ints(-2, -1), keepdims=1)
    x = b.op("Flatten", x)
    b.finish(out, b.op("Gemm", x, b.weight(10, 8), b.weight(10), transB=1))


def swin(out):
    b = Builder("swin", 9)
    x = b.input("x", (2, 8, 8, 12))
    y = layer_norm(b, x, 12)
    # A shifted window: rolled by slices and joins, then cut into windows of four by four.
    roll = lambda y, axis: b.op(
        "Concat",
        b.op("Slice", y, b.ints(2), b.ints(2**62), b.ints(axis)),
        b.op("Slice", y, b.ints(0), b.ints(2), b.ints(axis)),
        axis=axis,
    )
    y = roll(roll(y, 1), 2)
    y = b.op("Transpose", b.op("Reshape", y, b.ints(2, 2, 4, 2, 4, 12)), perm=[0, 1, 3, 2, 4, 5])
    y = b.op("Reshape", y, b.ints(8, 16, 12))
    q, k, v = (linear(b, y, 12, 12) for _ in range(3))
    y = attend(b, q, k, v, 3, 4, 16, samples=8)
    y = b.op("Transpose", b.op("Reshape", y, b.ints(2, 2, 2, 4, 4, 12)), perm=[0, 1, 3, 2, 4, 5])
    x = b.op("Add", x, b.op("Reshape", y, b.ints(2, 8, 8, 12)))
    # Patch merging: every other row and column.
    pick = lambda r, c: b.op("Slice", x, b.ints(r, c), b.ints(8, 8), b.ints(1, 2), b.ints(2, 2))
    x = b.op("Concat", pick(0, 0), pick(1, 0), pick(0, 1), pick(1, 1), axis=-1)
    b.finish(out, linear(b, layer_norm(b, x, 48), 48, 24))


def unet(out):
    b = Builder("unet", 10)
    x = conv_bn(b, b.input("x", (2, 3, 16, 16)), 3, 8, 3)
    y = conv_bn(b, b.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), 8, 16, 3)
    y = b.op("ConvTranspose", y, b.weight(16, 8, 2, 2), b.weight(8), strides=[2, 2])
    z = b.op("Resize", x, "", b.constant(np.array([1, 1, 2, 2], np.float32)), mode="nearest",
             coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    z = b.op("Resize", z, "", "", b.ints(2, 8, 16, 16), mode="linear", coordinate_transformation_mode="half_pixel")
    x = b.op("Concat", x, y, z, axis=1)
    x = b.op("InstanceNormalization", x, b.weight(24, positive=True), b.weight(24))
    b.finish(out, b.op("Conv", b.op("Pad", x, b.ints(0, 0, 1, 1, 0, 0, 1, 1), mode="reflect"), b.weight(2, 24, 3, 3)))


def picks(out):
    """A gate that picks: the largest and smallest scores, what lies there, and whole numbers."""
    b = Builder("picks", 11)
    x = b.op("MatMul", b.input("x", (4, 5, 6)), b.weight(6, 8))
    most, at = b.op("TopK", x, b.ints(3), outputs=2, axis=-1)
    least, _ = b.op("TopK", x, b.ints(2), outputs=2, axis=1, largest=0)
    first = b.op("GatherElements", x, b.op("ArgMax", x, axis=2, keepdims=1), axis=2)
    last = b.op("Cast", b.op("ArgMin", x, axis=0, keepdims=0), to=TensorProto.FLOAT)
    fewer = b.op("GatherElements", x, b.constant(np.array([[[7, -8, 3]]], np.int64)), axis=2)
    whole = b.op("Add", b.op("Floor", x), b.op("Mul", b.op("Ceil", x), b.number(10.0)))
    whole = b.op("Add", whole, b.op("Mul", b.op("Round", b.op("Mul", x, b.number(4.0))), b.op("Sign", x)))
    b.finish(out, most, b.op("Cast", at, to=TensorProto.FLOAT), least, first, last, fewer, whole)


def models(out):
    for build in (resnet, densenet, efficientnet, vit, gpt, bert, llama, convnext, swin, unet, picks):
        build(out)


if __name__ == "__main__":
    destination = pathlib.Path(sys.argv[1])
    kinds = sys.argv[2:] or ["nodes", "models"]
    for kind in kinds:
        {"nodes": nodes, "models": models}[kind](destination / kind)

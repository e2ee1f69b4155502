"""Read ONNX files as models: each operator against onnxruntime in float, whole networks in integers, and refusals."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_static
from torch import Tensor, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.frontend.onnx_files import example_inputs, read_onnx
from fxquant.frontend.onnx_operators import OPERATORS
from tests.cli.test_cli import called
from tests.shared.networks import Network, members
from tests.shared.onnx_files import batch, conv, residual, run

KINDS = {torch.float32: TensorProto.FLOAT, torch.int64: TensorProto.INT64, torch.bool: TensorProto.BOOL}
X, W, LINE = "f:2,4,6,6", "c:3,4,3,3", "f:2,4,6"
RECURRENT = ("c:1,{},5", "c:1,{},4", "c:1,{}")
SHAPE, UNARY = (
    (("Shape", "x", "s"),),
    "Abs Ceil Cos Erf Exp Floor HardSwish Identity IsNaN Neg Reciprocal Relu Round Sigmoid Sign Sin Softplus",
)
UNARY += " Softsign Tanh Atan GlobalAveragePool GlobalMaxPool Dropout HardSigmoid LeakyRelu Elu Selu Softmax LogSoftmax"
BINARY, REDUCED = (
    "Add Sub Mul Div Max Min Sum",
    "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp",
)

# Of each operator: its inputs, its attributes and an opset other than 17. An input is "f:" (a float input), "c:" (a constant of floats)
# or "i:" (an input of integers below 2) with a shape, "h:" with the same shape is a constant of positive floats; or numbers, a constant.
CASES: list[tuple[Any, ...]] = [
    *((name, (X,)) for name in UNARY.split()), *((name, (X, "c:4,1,1")) for name in BINARY.split()),
    *((name, (X, 2.0)) for name in BINARY.split()),
    *((name, (X,), {"axes": [1, -1], "keepdims": 0}, 13 if name != "ReduceSum" else 11) for name in REDUCED.split()),
    *((name, (X, 0.25)) for name in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")),
    *((name, ("h:2,5",)) for name in ("Log", "Sqrt")), *((name, ("b:2,5", "b:2,5")) for name in ("And", "Or", "Xor")), ("Not", ("b:2,5",)),
    ("Pow", (X, 2.0)), ("Pow", ("h:2,5", 1.5)), ("Pow", (X, 3.0)), ("Where", ("b:2,5", "f:2,5", 0.0)), ("Div", ("i:2,5", 2)),
    ("Mod", ("i:2,5", 2)), ("Cast", ("i:2,5",), {"to": 1}), ("CastLike", ("i:2,5", X)), ("Clip", (X, 0.0, 6.0)), ("Clip", (X, -0.5)),
    ("Gelu", (X,), {"approximate": "tanh"}, 20), ("PRelu", (X, "c:4,1,1")), ("PRelu", (X, "c:1,6")),
    ("Conv", (X, W, "c:3"), {"pads": [1, 1, 1, 1], "strides": [2, 2]}), ("Conv", (X, W), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", (X, "c:4,1,3,3"), {"pads": [0, 1, 2, 1], "group": 4}), ("Conv", (LINE, "c:3,4,3"), {"dilations": [2]}),
    ("ConvTranspose", (X, "c:4,3,3,3", "c:3"), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ("MatMul", (LINE, "c:6,3")), ("MatMul", (LINE, "f:2,6,3")), ("Gemm", ("f:2,4", "c:4,3", "c:3")),
    ("Gemm", ("f:2,4", "f:3,4"), {"transB": 1}), ("Gemm", ("f:2,4", "c:3,4", "c:1,3"), {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Einsum", (LINE, "f:2,4,6"), {"equation": "bij,bkj->bik"}), ("BatchNormalization", (X, "c:4", "c:4", "c:4", "h:4")),
    ("InstanceNormalization", (X, "c:4", "c:4")), ("LayerNormalization", (X, "c:6", "c:6"), {"axis": -1}),
    ("Softmax", (X,), {"axis": 2}, 11), ("Softmax", (X,), {"axis": 1}),
    ("LSTM", ("f:7,2,5", *(each.format(size) for each, size in zip(RECURRENT, (16, 16, 32), strict=True))), {"hidden_size": 4}),
    ("GRU", ("f:7,2,5", "c:2,12,5", "c:2,12,4", "c:2,24"), {"hidden_size": 4, "linear_before_reset": 1, "direction": "bidirectional"}),
    ("RNN", ("f:7,2,5", "c:1,4,5", "c:1,4,4"), {"hidden_size": 4}), ("TopK", (X, [3]), {"largest": 0}),
    ("MaxPool", (X,), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
    ("MaxPool", (X,), {"kernel_shape": [2, 2], "ceil_mode": 1}),
    ("AveragePool", (X,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("AveragePool", (LINE,), {"kernel_shape": [2]}), ("ArgMax", (X,), {"axis": 1}), ("ArgMin", (X,), {"axis": -1, "keepdims": 0}),
    ("Reshape", (X, [0, -1])), ("Transpose", (X,), {"perm": [0, 2, 3, 1]}), ("Flatten", (X,), {"axis": 2}), ("Squeeze", ("f:2,1,3", [1])),
    ("Unsqueeze", (X, [0, -1])), ("Unsqueeze", (X,), {"axes": [1]}, 11), ("Concat", (X, "c:2,1,6,6"), {"axis": 1}),
    ("Split", (X, [1, 3]), {"axis": 1}), ("Slice", (X, [1, 0], [4, -1], [2, 3], [2, 1])), ("Slice", (X, [-1], [-(2**63)], [3], [-1])),
    ("Gather", (X, 1), {"axis": 2}), ("Gather", (X, [0, -1]), {"axis": 1}), ("Gather", ("c:5,3", "i:2,4")), ("GatherND", (X, "i:3,2")),
    ("GatherElements", (LINE, "i:2,4,6"), {"axis": 2}), ("ScatterElements", (LINE, "i:2,4,1", "f:2,4,1"), {"axis": 2}),
    ("Expand", ("f:2,1,3", [2, 4, 3])), ("Tile", (LINE, [1, 2, 1])), ("Trilu", (LINE,), {"upper": 0}), ("CumSum", (LINE, 1)),
    ("DepthToSpace", (X,), {"blocksize": 2, "mode": "CRD"}), ("DepthToSpace", (X,), {"blocksize": 2}),
    ("Pad", (X, [0, 0, 1, 0, 0, 0, 0, 2], 1.5)), ("Pad", (X, [0, 0, 1, 1, 0, 0, 1, 1]), {"mode": "reflect"}),
    ("Resize", (X, None, [1.0, 1.0, 2.0, 2.0]), {"mode": "linear"}), ("Resize", (X, None, [1.0, 1.0, 2.0, 2.0])),
    ("Resize", (X, None, None, [2, 4, 9, 9]), {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Mish", (X,), {}, 18), ("Upsample", (X, [1.0, 1.0, 2.0, 2.0]), {}, 9), ("GridSample", (X, "f:2,3,3,2"), {}, 16), ("Shape", (X,)),
    ("Size", (X,)), ("ConstantOfShape", ("s:2,3",), {"value": helper.make_tensor("value", TensorProto.FLOAT, [1], [2.0])}),
    ("Range", ("n:2", 9, 3)),
]  # fmt: skip


def given(text: Any) -> tuple[str, Tensor]:
    """Return how an input is given, f, c, i, b, h, s or n, and its values."""
    if not isinstance(text, str):
        return "c", torch.tensor(text)
    kind, _, sizes = text.partition(":")
    shape = [int(size) for size in sizes.split(",")]
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(text)))
    values = {"h": drawn.abs() + 0.1, "i": (drawn > 0).long(), "b": drawn > 0, "s": torch.tensor(shape), "n": torch.tensor(shape[0])}
    return ("c" if kind in "hsn" and text != "h:2,5" else "f" if kind in "ibh" else kind), values.get(kind, drawn)


def one_node(operator: str, inputs: tuple[Any, ...], attributes: Any = None, opset: int = 17) -> tuple[onnx.ModelProto, list[Tensor]]:
    names = ["" if each is None else f"in_{index}" for index, each in enumerate(inputs)]
    values = {name: given(each) for name, each in zip(names, inputs, strict=True) if name}
    outputs = ["y", "z"] if operator in ("Split", "TopK") else ["y"]
    nodes = [helper.make_node(operator, names, outputs, name="/block/node", **(attributes or {}))]
    declared = [
        helper.make_tensor_value_info(name, KINDS[value.dtype], value.shape) for name, (kind, value) in values.items() if kind == "f"
    ]
    fed = [value for kind, value in values.values() if kind == "f"]
    if not fed:  # a file has an input
        declared, fed = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])], [torch.ones(2)]
        nodes += [helper.make_node("Identity", ["x"], ["unchanged"])]
    constants = [numpy_helper.from_array(value.numpy(), name) for name, (kind, value) in values.items() if kind == "c"]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "one", declared, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), fed


def in_float(file: str | bytes, inputs: list[Tensor]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, {each.name: value.numpy() for each, value in zip(session.get_inputs(), inputs, strict=True)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_an_operator_computes_what_onnxruntime_computes(case: tuple[Any, ...]) -> None:
    proto, inputs = one_node(*case)
    results = read_onnx(proto)(*inputs)
    mine = results if len(proto.graph.output) > 1 else [results]
    for ours, theirs in zip(map(torch.as_tensor, mine), in_float(proto.SerializeToString(), inputs), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-5)


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(OPERATORS)


LAYERS = {"stem": nn.Conv2d(3, 8, 3, 2, 1, bias=False), "norm": nn.BatchNorm2d(8), "body": nn.Conv2d(8, 8, 3, padding=1)}


@members(lambda: dict(LAYERS, head=nn.Linear(8, 5)))
def Residual(self, x: Tensor) -> Tensor:
    x = torch.relu(self.norm(self.stem(x)))
    return self.head(torch.relu(x + self.body(x)).reshape(x.shape[0], 8, -1).mean(2))


@members(lambda: dict(norm=nn.LayerNorm(16), project=nn.Linear(16, 48), out=nn.Linear(16, 16)))
def Attention(self, x: Tensor) -> Tensor:
    b, n, c = x.shape
    q, k, v = self.project(self.norm(x)).view(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


@members(lambda: dict(layer=nn.LSTM(6, 8, batch_first=True), head=nn.Linear(8, 3)))
def Recurrent(self, x: Tensor) -> Tensor:
    return self.head(self.layer(x)[0])


NETWORKS: dict[Any, tuple[int, ...]] = {Residual: (1, 3, 8, 8), Attention: (1, 5, 16), Recurrent: (2, 7, 6)}


def exported(network: Any, path: Path, opset: int = 17, **options: Any) -> tuple[str, Tensor]:
    """Write a network as a file of a fixed batch size, if the options do not name the batch; return the path and an example."""
    torch.manual_seed(0)
    example = torch.randn(NETWORKS[network])
    torch.onnx.export(network().eval(), (example,), str(path), opset_version=opset, input_names=["x"], dynamo=False, **options)
    return str(path), example


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("network", "target", "opset"), [(Residual, "x86", 11), (Attention, "bayes-e", 17), (Recurrent, "nash-e", 14)])
def test_a_file_becomes_an_integer_model_of_any_batch_size(network: Any, target: str, opset: int, tmp_path: Path) -> None:
    path, example = exported(network, tmp_path / "float.onnx", opset, **({"dynamic_axes": {"x": {0: "batch"}}} if opset == 14 else {}))
    np.testing.assert_allclose(read_onnx(path)(example).detach().numpy(), in_float(path, [example])[0], rtol=1e-4, atol=1e-5)
    batches = [torch.randn(6, *example.shape[1:]) for _ in range(2)]
    result = fxq.quantize(path, batches, target)
    assert result.verify(result.export(tmp_path / "integer.onnx"), [batches[0][:3]])
    assert fxq.verify(result.prepared, result.integer, batches)
    assert all(layer.integer for layer in fxq.inspect.layers(result.prepared) if layer.operator in ("conv2d", "linear", "lstm", "matmul"))
    assert any(parameter.requires_grad for parameter in result.prepared.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_nodes_keep_their_names_and_shapes_come_from_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, example = exported(Residual, tmp_path / "float.onnx")
    prepared = fxq.prepare(path, None, "bayes-e", fxq.QConfigMapping().set_module_name("body", None))
    held = {layer.module: layer for layer in fxq.inspect.layers(prepared) if not layer.boundary}
    assert [held[name].integer for name in ("body.Conv", "stem.Conv")] == [False, True]
    assert "float.onnx: Conv /stem/Conv" in str(held["stem.Conv"].source)
    (drawn,) = example_inputs(read_onnx(onnx.load(path))) or ()
    assert drawn.shape == example.shape
    assert fxq.check(onnx.load(path), target="bayes-e")
    assert called(capsys, "check", path, "--target", "bayes-e")[0] == 0
    np.save(tmp_path / "x.npy", torch.randn(12, 3, 8, 8).numpy())
    shown = called(capsys, "quantize", path, "--data", str(tmp_path / "x.npy"), "--out", str(tmp_path / "out"), "--no-report")[1]
    assert re.search(r"mismatching elements\s*│?\s*0", shown)


@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8])
def test_a_file_that_onnxruntime_quantized_keeps_its_grids_and_weights(kind: QuantType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Network(lambda s, x: residual(s.b, F.relu(s.a(x))), a=conv(3, 8), b=conv(8, 8)).eval()
    batches, path = [batch(8), batch(8, 2)], tmp_path / "qdq.onnx"
    feeds = iter([{"x": each.numpy()} for each in batches])
    written = fxq.export_onnx(net, tmp_path / "float.onnx", example_inputs=batches[0])
    quantize_static(written, path, SimpleNamespace(get_next=lambda: next(feeds, None)), per_channel=True, activation_type=kind)
    result = fxq.quantize(path, batches, target="x86", options=fxq.Options(correct_bias=False, without_vnni=False))
    held = {each.name: numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}
    ours = [value.numpy() for name, value in result.integer.named_buffers() if name.endswith(".weight")]
    assert all(map(np.array_equal, ours, (value for name, value in held.items() if name.endswith("weight_quantized"))))
    steps = [float(value) for name, value in held.items() if name in ("relu_1/relu_scale", "relu_1_scale")]
    assert all(f"uint8  {step:.6g}, zero point 0" in fxq.explain(result.prepared) for step in steps)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    apart = result.integer(batches[0]) - run(path, batches[0], options=plain)[0]
    assert apart.abs().max() <= 1.01 * max(steps)  # a float sum next to a tie may be rounded to either side
    assert (apart != 0).float().mean() < 0.001


def test_a_bias_that_is_computed_from_constants_is_a_tensor() -> None:
    proto, inputs = one_node("Conv", (X, "c:8,4,3,3", "c:8"))
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.arange(8), "whole"))
    proto.graph.node.insert(0, helper.make_node("Cast", ["whole"], ["in_2"], to=TensorProto.FLOAT))
    theirs = in_float(proto.SerializeToString(), inputs)[0]
    np.testing.assert_allclose(read_onnx(proto)(*inputs).detach().numpy(), theirs, rtol=1e-4, atol=1e-5)


def refusal(model: Any, *example: Any) -> str:
    with pytest.raises(fxq.FxQuantError) as caught:
        fxq.prepare(model, *example)
    return str(caught.value)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Det is not read\n  at       the ONNX model: Det /block/node" in refusal(one_node("Det", ("f:2,2",))[0])
    assert "is quantized already" in refusal(one_node("QLinearMatMul", (X, 0.5))[0])
    exact = fxq.quantize(nn.Conv2d(3, 4, 3), [torch.randn(2, 3, 8, 8)], "x86").export(tmp_path / "exact.onnx", style="exact")
    assert "fxquant wrote it in style 'exact'" in refusal(exact)
    assert "only tensors of bytes with one scale" in refusal(one_node("QuantizeLinear", (X, "h:4"))[0])
    assert "auto_pad" in refusal(one_node("ConvTranspose", (X, "c:4,3,3,3"), {"auto_pad": "SAME_UPPER"})[0])
    assert "cannot be read" in refusal(tmp_path / "nothing.onnx")
    assert "the path of an ONNX file" in refusal("model.pt")
    proto = one_node("Relu", (X,))[0]
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    assert "no numbers for all sizes of its input in_0: 2, 4, ?, 6" in refusal(proto)
    assert "--shape" in called(capsys, "check", "torch.nn:ReLU")[2]


def test_sizes_that_are_converted_stay_sizes() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]), helper.make_node("Cast", ["shape"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["real"], ["whole"], to=TensorProto.INT64), helper.make_node("Slice", ["whole", "zero", "one"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["sizes"], axis=0), helper.make_node("Reshape", ["x", "sizes"], ["y"]),
    ]  # fmt: skip
    constants = [numpy_helper.from_array(np.array([value]), name) for name, value in (("zero", 0), ("one", 1), ("rest", 12))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *sizes]) for name, sizes in (("x", [3, 4]), ("y", [12]))]
    traced = fxq.trace(helper.make_model(helper.make_graph(nodes, "sizes", ends[:1], ends[1:], constants)))
    assert traced(torch.ones(5, 3, 4)).shape == (5, 12)

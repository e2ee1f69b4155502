"""The vendor's compiler and simulator themselves, where they are installed: `make test-vendor`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.silicon.networks import live
from benchmarks.zoo import MobileNetV2, ResNet18
from benchmarks.zoo.sequence import ViT
from tests.backends.test_horizon_camera import of_gray
from tests.backends.test_horizon_program import CAUSAL, SHUFFLED
from tests.shared.networks import Network, descend, members, to_train

INSTALLED = bool(os.environ.get("FXQUANT_HORIZON")) or shutil.which("hb_mapper") is not None
pytestmark = [pytest.mark.vendor, pytest.mark.skipif(not INSTALLED, reason="the vendor's tool is not installed: make vendor")]


def layers(forward: Callable[..., Any]) -> nn.Module:
    """A function of two layers, whose tensors are cubes: their order of dimensions cannot be seen by their shapes."""
    members = {"a": nn.Conv2d(8, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1), "fc": nn.Linear(8, 6)}
    return Network(forward, **members)


def two() -> nn.Module:
    return layers(lambda m, x: (y := torch.relu(m.a(x)), z := m.b(y), m.fc(z[:, :, 0, 0])))


def batches() -> list[Tensor]:
    return [2 * torch.randn(2, 8, 8, 8) for _ in range(2)]


def converted(model: nn.Module, target: str = "bayes-e", qconfig: fxq.QConfig | None = None) -> torch.fx.GraphModule:
    return fxq.quantize(model.eval(), batches(), target, qconfig).integer


def verified(integer: torch.fx.GraphModule, folder: Path, actual: list[Any] | None = None, **options: Any) -> tuple[Any, Path]:
    """Compile a model and hold the program to it; return the report of `verify` and the program's path."""
    binary = fxq.board.compile_horizon(fxq.board.export_horizon(integer, folder / "net", **options))
    report = fxq.verify(integer, binary, batches() if actual is None else actual)
    assert report, str(report)
    assert report.elements > 0
    return report, binary


def programs(integer: torch.fx.GraphModule, binary: Path) -> list[int]:
    """Return the number of layers of each program."""
    return [len(cost.layers) for cost in fxq.estimate(integer, compiled=binary).compiled]


@pytest.mark.parametrize("target", ["bayes-e", "bayes", "bernoulli2"])
def test_the_program_of_two_layers_computes_the_integer_graph(target: str, tmp_path: Path) -> None:
    integer = converted(two(), target)
    report, binary = verified(integer, tmp_path)
    assert report.names >= {"a", "b", "fc"}
    assert report.unseen == {}
    costs = fxq.estimate(integer, compiled=binary).compiled
    assert len(costs) >= 1
    assert all(cost.microseconds > 0 and cost.bytes > 0 and cost.layers for cost in costs)


@pytest.mark.parametrize("weight", [fxq.WeightConfig(training="tqt"), fxq.WeightConfig(training="learned"), fxq.WeightConfig("int4")])
def test_scales_that_the_compiler_does_not_find_are_carried(weight: fxq.WeightConfig, tmp_path: Path) -> None:
    verified(converted(two(), qconfig=fxq.QConfig(weight=weight)), tmp_path)


def test_a_planted_difference_is_located_inside_of_the_program(tmp_path: Path) -> None:
    integer = converted(layers(lambda self, x: self.b(torch.relu(self.b(torch.relu(self.a(x)))))))
    binary = fxq.board.compile_horizon(fxq.board.export_horizon(integer, tmp_path / "net"))
    for name, value in integer.state_dict().items():
        if name.endswith("a.multiplier"):
            value += 200
    report = fxq.verify(integer, binary, batches())
    assert not report
    assert (report.first.name, report.first.inputs_equal) == ("a", True)
    assert "self.a(x)" in report.first.source


def test_the_upper_limit_that_the_compiler_drops_is_dropped(tmp_path: Path) -> None:
    prepared = fxq.calibrate(fxq.prepare(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU6()).eval(), batches()[0], "bayes-e"), batches())
    fxq.set_qparams(prepared, {next(layer.name for layer in fxq.inspect.layers(prepared) if layer.integer and layer.macs): 0.06})
    verified(fxq.convert(prepared), tmp_path, [20 * batch for batch in batches()])


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
def test_uneven_margins_of_zeros_cost_no_layer(target: str, tmp_path: Path) -> None:
    layers = nn.Conv2d(8, 8, 3), nn.ReLU(), nn.ZeroPad2d((0, 1, 2, 4)), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()
    integer = converted(nn.Sequential(*layers, nn.Conv2d(8, 8, 2, padding="same")), target)
    assert programs(integer, verified(integer, tmp_path)[1]) == [3]


@members(lambda: dict(rows=nn.LSTM(8, 8, batch_first=True), a=nn.Linear(8, 6), b=nn.Linear(6, 4)))
def Recurrent(self, x: Tensor) -> Tensor:
    """An LSTM over the rows of an image, and a hard swish between vectors."""
    return self.b(nn.functional.hardswish(self.a(self.rows(x.squeeze(1))[0][:, -1])))


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
def test_an_lstm_and_layers_of_vectors_are_one_program(target: str, tmp_path: Path) -> None:
    model, rows = Recurrent().eval(), [torch.randn(2, 1, 3, 8) for _ in range(2)]
    qconfig = fxq.QConfig(fxq.ActivationConfig("int8"))
    integer = fxq.quantize(model, rows, target, qconfig).integer
    assert len(programs(integer, verified(integer, tmp_path, rows)[1])) == 1


def test_a_transformer_is_one_program(tmp_path: Path) -> None:
    images = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    model, _ = live(lambda: ViT(6, size=32, width=24, depth=2, heads=2), 3, 32)()
    integer = fxq.quantize(model, images, "bayes-e").integer
    assert len(programs(integer, verified(integer, tmp_path, images)[1])) == 1


@pytest.mark.parametrize(("network", "target"), [(SHUFFLED, "bayes-e"), (SHUFFLED, "bernoulli2"), (CAUSAL, "bayes-e")])
def test_channel_shuffles_and_layers_of_sequences_are_one_program(network: nn.Module, target: str, tmp_path: Path) -> None:
    x = [torch.randn(2, 8, 8, 8) if network is SHUFFLED else torch.randn(2, 8, 24) for _ in range(2)]
    integer = fxq.quantize(network, x, target).integer
    (costs,) = fxq.estimate(integer, compiled=verified(integer, tmp_path, x)[1]).compiled
    assert not [layer for layer in costs.layers if "Transpose" in layer.layer and "LayoutConvert" not in layer.layer]


OTHERWISE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "a stride that padding does not halve": (nn.Sequential(nn.ConvTranspose2d(8, 8, 8, 4, 1), nn.ReLU()), (8, 6, 6)),
    "a shuffle of pixels": (nn.Sequential(nn.Conv2d(8, 16, 3), nn.PixelShuffle(2), nn.Conv2d(4, 4, 1)), (8, 8, 8)),
    "a sequence, transposed": (nn.Sequential(nn.ConvTranspose1d(8, 8, 7, 3, 1, 1, 8), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3)), (8, 24)),
    "a sequence, padded and resized": (
        nn.Sequential(nn.Conv1d(8, 8, 3), nn.Upsample(scale_factor=2, mode="linear"), nn.ConstantPad1d((2, 1), 0.0), nn.ReLU()), (8, 24),
    ),
    "a sequence, dilated, of 16 bits": (nn.Conv1d(8, 16, 2, dilation=2), (8, 24)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), [*((name, "bayes-e") for name in OTHERWISE), *((n, "bernoulli2") for n in [*OTHERWISE][:2])])
def test_what_the_compiler_computes_otherwise_is_written_otherwise(name: str, target: str, tmp_path: Path) -> None:
    model, shape = OTHERWISE[name]
    x = [torch.randn(2, *shape) for _ in range(2)]
    assert fxq.check(model, x[0], target), "its remedy is applied without the option adapt"
    integer = fxq.quantize(model.eval(), x, target).integer
    assert len(programs(integer, verified(integer, tmp_path, x)[1])) == 1


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
def test_a_program_takes_gray_beside_a_vector_and_several_samples_channels_last(target: str, tmp_path: Path) -> None:
    integer, _, taken = of_gray(target)
    verified(fxq.board.with_camera(integer, "gray", mean=[120], std=[60], swing="gray"), tmp_path / "gray", [taken], camera="gray")
    options = fxq.board.HorizonOptions(input_layout="NHWC", input_batch=3)
    verified(converted(layers(lambda m, x: torch.relu(m.a(x))), target), tmp_path / "many", options=options)


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
def test_a_program_that_returns_integers_channels_last_is_compared(target: str, tmp_path: Path) -> None:
    integer = converted(layers(lambda m, x: (y := torch.relu(m.a(x)), m.b(y))), target)
    options = fxq.board.HorizonOptions(outputs="integer", layout="NHWC", jobs=2)
    report, _ = verified(integer, tmp_path, output_names=["low", "high"], options=options)
    assert report.names >= {"a", "b"}
    assert (tmp_path / "net" / "hb_mapper.log").read_text().count("_HzDequantize' is removed") == 2


def test_what_stays_in_float_runs_on_the_processor(tmp_path: Path) -> None:
    model = layers(lambda m, x: m.a(torch.tanh(m.b(torch.relu(m.a(x)))))).eval()
    hosted = fxq.QConfigMapping().set_module_name("b", None).set_object_type(torch.tanh, None)
    result = fxq.quantize(model, batches(), "bayes-e", hosted)
    assert verified(result.integer, tmp_path, batches()[:1])[0].tensors == 2


@pytest.mark.parametrize(
    "function",
    [lambda x: x * torch.sigmoid(x), lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)), lambda x: x * torch.relu(x + 3).clamp(max=6) / 6],
    ids=["silu", "gelu", "hard swish"],
)
def test_a_function_by_hand_is_one_table_of_one_program(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    integer = converted(layers(lambda m, x: m.b(function(m.a(x)))))
    assert len(programs(integer, verified(integer, tmp_path)[1])) == 1


@pytest.mark.parametrize("target", ["bayes-e", "bernoulli2"])
@pytest.mark.parametrize("network", [ResNet18, MobileNetV2])
def test_a_network_that_was_trained_with_learned_scales_is_compiled(
    network: Callable[[int], nn.Module], target: str, tmp_path: Path
) -> None:
    images = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    learned = fxq.QConfig(fxq.ActivationConfig(training="learned"), fxq.WeightConfig(training="learned"))
    model, _ = live(lambda: network(10), 3, 32)()  # with statistics of its own activations
    prepared = fxq.calibrate(fxq.prepare(model, images[0], target, learned), images)
    descend(to_train(prepared), images * 2, 1e-3)
    integer = fxq.convert(prepared.eval())
    verified(integer, tmp_path, [images[0][:1]], options=fxq.board.HorizonOptions(optimize_level="O0"))

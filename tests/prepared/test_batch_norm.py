"""Batch norm after every layer and in every mode: live, frozen, folded; tiny weights; layers and norms that are shared."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.prepared.operators import quantized_operators
from tests.ops.test_weighted_operators import COVERING, Case, assert_contract, built, layer, left_in_float, weights
from tests.shared import contract
from tests.shared.networks import descend, to_train, to_validate, written

MODES = ("live", "frozen", "folded")

LAYERS: dict[str, Callable[[], Case]] = {
    "conv1d": lambda: layer((8, 3, 9), nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)),
    "conv2d": lambda: layer((4, 3, 6, 6), nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)),
    "conv2d, groups": lambda: layer((4, 4, 6, 6), nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "conv2d, reflect": lambda: layer((4, 3, 6, 6), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4)),
    "conv3d": lambda: layer((4, 2, 4, 4, 4), nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4)),
    "conv_transpose1d": lambda: layer((8, 4, 7), nn.ConvTranspose1d(4, 6, 4, 2, groups=2), nn.BatchNorm1d(6)),
    "conv_transpose2d": lambda: layer((4, 4, 5, 5), nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, bias=False), nn.BatchNorm2d(6)),
    "conv_transpose3d": lambda: layer((4, 2, 3, 3, 3), nn.ConvTranspose3d(2, 4, 2, 2, groups=2), nn.BatchNorm3d(4)),
    "linear": lambda: layer((16, 8), nn.Linear(8, 5), nn.BatchNorm1d(5)),
    "linear, no affine": lambda: layer((16, 8), nn.Linear(8, 5, bias=False), nn.BatchNorm1d(5, affine=False)),
}


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def with_room(prepared: fx.GraphModule) -> fx.GraphModule:
    """With scales twice as large: what batch statistics put beyond the calibrated range is not cut off."""
    fxq.set_qparams(prepared, {name: 2 * scale for name, scale in fxq.qparams(prepared).items()})
    return prepared


def optimise(prepared: fx.GraphModule, batch: Tensor, steps: int = 2) -> None:
    descend(to_train(prepared), [batch] * steps, 1e-2)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_contract_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    """Before training and after two steps, which move weights, norms and statistics."""
    model, batches = built(LAYERS[name])
    batch = batches[0][0]
    prepared = contract.compiled(model, batches, "bayes-e", COVERING, batch_norm=mode).prepared
    assert left_in_float(prepared) == []
    assert [operator.operator.name for operator in quantized_operators(prepared).values()].count("batch_norm") == 0
    prepared.eval()
    for state in (fxq.State.FLOAT, fxq.State.CALIBRATE):
        fxq.set_state(prepared, state)
        torch.testing.assert_close(prepared(batch), model(batch), rtol=1e-5, atol=1e-5)
    optimise(prepared, batch)
    prepared.eval()
    assert_contract(contract.Compiled(prepared, fxq.convert(prepared)), tmp_path / "model.onnx", batches)


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("default_outputs")
@pytest.mark.parametrize("name", LAYERS)
def test_live_is_what_the_float_model_does_in_training(name: str) -> None:
    model, batches = built(LAYERS[name], 1)
    prepared = to_train(with_room(contract.compiled(model, batches, qconfig=COVERING, batch_norm="live").prepared))
    model.train()
    actual, expected = prepared(*batches[0]), model(*batches[0])
    assert (actual - expected).square().mean() < 0.005 * expected.var()
    for statistic in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(prepared.norm, statistic), getattr(model.norm, statistic), rtol=1e-2, atol=1e-2)
    assert torch.equal(prepared.norm.num_batches_tracked, model.norm.num_batches_tracked)
    incoming = torch.randn(actual.shape)
    for output in (actual, expected):
        (output * incoming).sum().backward()
    own, wanted = (each.get_parameter("layer.weight").grad.flatten() for each in (prepared, model))
    assert F.cosine_similarity(own, wanted, 0) > 0.99


def of_instances(norm: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    """Return a factory of a model that calls a function of instance norms with buffers."""
    return lambda: written(
        lambda m, x: norm(m, x, m.training), mean=torch.full((3,), 0.3), var=torch.full((3,), 2.0), weight=nn.Parameter(torch.rand(3))
    )


INSTANCE_NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (9,)),
    "2d": (lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True, momentum=0.3), (6, 6)),
    "3d": (lambda: nn.InstanceNorm3d(3, track_running_stats=True, momentum=None), (4, 3, 3)),
    "F": (of_instances(lambda m, x, own: F.instance_norm(x, m.mean, m.var, m.weight, None, own, 0.2)), (6, 6)),
    "torch": (of_instances(lambda m, x, own: torch.instance_norm(x, m.weight, None, m.mean, m.var, own, 0.2, 1e-5, False)), (6, 6)),
    "never its own": (of_instances(lambda m, x, own: F.instance_norm(x, m.mean, m.var, m.weight, None, False)), (6, 6)),
}


@pytest.mark.parametrize("name", INSTANCE_NORMS)
def test_instance_norms_normalize_by_each_sample_in_train_mode_and_move_statistics(name: str) -> None:
    make, sizes = INSTANCE_NORMS[name]
    model = nn.Sequential(make())
    x = torch.randn(8, 3, *sizes) * torch.arange(1.0, 9.0).reshape(-1, 1, *[1] * len(sizes)) + 2
    prepared, integer = contract.compiled(model.eval(), [x])
    contract.assert_validate_is_integer(prepared, integer, x)
    buffers = [key for key, _ in model.named_buffers()]
    actual, expected = to_train(prepared)(x), model.train()(x)
    assert (actual - expected).square().mean() < 0.005 * expected.var()
    for key in buffers:
        torch.testing.assert_close(prepared.get_buffer(key), model.get_buffer(key), rtol=0.02, atol=0.02)
    fxq.freeze(prepared)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), x)
    assert torch.equal(to_train(prepared)(x), to_validate(prepared)(x))


@pytest.mark.parametrize("form", ["function", "module"])
def test_an_instance_norm_that_moves_statistics_in_eval_mode_stays_in_float(form: str) -> None:
    model = of_instances(lambda m, x, own: F.instance_norm(x, m.mean, m.var, m.weight, None, True))()
    if form == "module":
        model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True))
        model[0].track_running_stats = False
    assert "moves its running statistics in eval mode" in str(fxq.explain(fxq.prepare(model.eval(), torch.randn(2, 3, 6, 6))))


# ---- folded once ----------------------------------------------------------------------------------------------------
@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", LAYERS)
def test_folded_and_frozen_are_equal_bit_for_bit(name: str) -> None:
    model, batches = built(LAYERS[name])
    frozen, folded = (contract.compiled(model, batches, "nash-e", batch_norm=mode) for mode in ("frozen", "folded"))
    assert fxq.qparams(frozen.prepared) == fxq.qparams(folded.prepared)
    for batch in batches:
        assert torch.equal(frozen.prepared(*batch), folded.prepared(*batch))
        assert torch.equal(frozen.integer(*batch), folded.integer(*batch))


def test_the_parameters_of_a_folded_model_are_the_layers_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)).eval()
    before = copy.deepcopy(model.state_dict())
    prepared = fxq.prepare(model, (torch.randn(2, 3, 6, 6),), options=fxq.Options(batch_norm="folded"))
    keys = {name for name in prepared.state_dict() if not name.startswith("quantized.")}
    assert keys == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert set(dict(prepared.named_parameters())) == keys
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(prepared.get_parameter("3.weight"), model[3].weight)


def test_a_norm_that_nothing_absorbs_stays_when_the_others_are_folded(tmp_path: Path) -> None:
    model, batches = built(
        lambda: Case(
            (4, 3, 6, 6),
            lambda s, x: s.alone(s.after(s.conv(x)).relu()),
            conv=nn.Conv2d(3, 4, 3),
            after=nn.BatchNorm2d(4),
            alone=nn.BatchNorm2d(4),
        )
    )
    compiled = contract.compiled(model, batches, batch_norm="folded")
    assert not hasattr(compiled.prepared, "after")
    statistics = compiled.prepared.alone.running_mean.clone()
    optimise(compiled.prepared, batches[0][0])
    assert torch.equal(statistics, compiled.prepared.alone.running_mean)
    compiled.prepared.eval()
    assert_contract(contract.Compiled(compiled.prepared, fxq.convert(compiled.prepared)), tmp_path / "model.onnx", batches)


def test_functional_norms_and_computed_weights_are_folded(tmp_path: Path) -> None:
    def forward(s: Case, x: Tensor) -> Tensor:
        x = F.conv2d(x, s.w * s.gain, s.b)
        return F.batch_norm(x, s.mean, s.var.exp(), s.scale, s.shift)

    model, batches = built(
        lambda: Case(
            (4, 3, 6, 6), forward, w=weights(4, 3, 2, 2), gain=weights(4, 1, 1, 1), b=weights(4), mean=torch.randn(4), var=torch.randn(4),
            scale=weights(4), shift=weights(4),
        )
    )  # fmt: skip
    compiled = contract.compiled(model, batches, "nash-e", COVERING, batch_norm="folded")
    assert set(dict(compiled.prepared.named_parameters())) == {"conv2d_weight", "conv2d_bias"}
    assert_contract(compiled, tmp_path / "model.onnx", batches)
    fxq.set_state(compiled.prepared, fxq.State.FLOAT)
    torch.testing.assert_close(compiled.prepared(*batches[0]), model(*batches[0]), rtol=1e-5, atol=1e-5)


def functional(statistics: Tensor) -> nn.Module:
    """A batch norm whose statistics are parts of a tensor."""
    return written(
        lambda m, x: F.batch_norm(x, m.statistics[0], m.statistics[1], m.scale, m.shift),
        scale=nn.Parameter(torch.randn(3)),
        shift=nn.Parameter(torch.randn(3)),
        statistics=statistics,
    )


def test_statistics_of_functional_norms_follow_the_batches_unless_they_are_parameters() -> None:
    start, batch = torch.rand(2, 3) + 0.5, torch.randn(4, 3, 6, 6)
    prepared = contract.compiled(functional(start.clone()).eval(), [batch]).prepared
    optimise(prepared, batch, 60)
    assert bool(((prepared.statistics[0] - batch.mean((0, 2, 3))).abs() < 0.02).all())
    assert bool(((prepared.statistics[1] - batch.var((0, 2, 3))).abs() < 0.02).all())
    to_validate(prepared)
    contract.assert_validate_is_integer(prepared, fxq.convert(prepared), batch)
    prepared = to_train(contract.compiled(functional(nn.Parameter(start.clone())), [batch]).prepared)
    prepared(batch).square().mean().backward()
    assert torch.equal(prepared.statistics, start)


def test_a_weight_that_is_a_buffer_or_frozen_stays_so_when_folded() -> None:
    model, batches = built(LAYERS["linear"])
    model.layer.weight.requires_grad_(False)
    prepared = contract.compiled(model, batches, batch_norm="folded").prepared
    assert not prepared.get_parameter("layer.weight").requires_grad
    weight = model.layer.weight.detach()
    del model.layer.weight
    model.layer.register_buffer("weight", weight)
    prepared = contract.compiled(model, batches, batch_norm="folded").prepared
    assert [name for name, _ in prepared.named_parameters()] == []
    assert {"layer.weight", "layer.bias"} <= {name for name, _ in prepared.named_buffers()}


def test_a_folded_model_is_saved(tmp_path: Path) -> None:
    model, batches = built(lambda: Case((4, 3, 6, 6), lambda s, x: s.shared(x), shared=shared_layer()))
    compiled = contract.compiled(model, batches, batch_norm="folded")
    loaded = fxq.load(fxq.save(compiled.prepared, tmp_path / "model.fxq"))
    assert contract.same_state(loaded, compiled.prepared)
    assert torch.equal(loaded(*batches[0]), compiled.prepared(*batches[0]))
    assert torch.equal(fxq.convert(loaded)(*batches[0]), compiled.integer(*batches[0]))


# ---- small weights --------------------------------------------------------------------------------------------------
@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [0.0, 1e-30, -1e-30])
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "linear", "conv3d"])
def test_nothing_is_divided_by_a_small_weight(name: str, gamma: float, mode: str, tmp_path: Path) -> None:
    model, batches = built(LAYERS[name])
    with torch.no_grad():
        model.norm.weight[1] = gamma
    compiled = contract.compiled(model, batches, "bayes-e", COVERING, batch_norm=mode)
    assert (compiled.integer(*batches[0]) - model(*batches[0])).square().mean() < 0.005 * model(*batches[0]).var()
    assert torch.allclose(compiled.integer(*batches[0])[:, 1], model.norm.bias[1], atol=0.02)
    trained = copy.deepcopy(compiled.prepared)
    optimise(trained, batches[0][0], 1)
    assert all(bool(parameter.isfinite().all()) for parameter in trained.parameters())
    assert mode != "live" or gamma != 0 or trained.norm.running_var[1] == model.norm.running_var[1]
    contract.assert_validate_is_integer(*compiled, *batches[0])
    contract.assert_integer_is_onnx(compiled.integer, tmp_path / "model.onnx", [batches[0]])
    contract.assert_train_is_validate(compiled.prepared, *batches[0])
    compiled.prepared(*batches[0]).square().mean().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in compiled.prepared.parameters())
    if mode != "folded":
        assert bool((compiled.prepared.norm.weight.grad != 0).all()), "a weight of zero can never grow again"


# ---- sharing --------------------------------------------------------------------------------------------------------
def convolution() -> nn.Module:
    return nn.Conv2d(3, 4, 3, bias=False)


def shared_layer() -> nn.Module:
    """One convolution, called twice, with a batch norm for each call."""
    return written(
        lambda m, x: m.one(m.conv(x)) - m.other(m.conv(x.flip(-1))).relu(),
        conv=convolution(),
        one=nn.BatchNorm2d(4),
        other=nn.BatchNorm2d(4),
    )


def shared_norm() -> nn.Module:
    """Two convolutions with one batch norm after both."""
    return written(
        lambda m, x: m.norm(m.one(x)) - m.norm(m.other(x)).relu(), one=convolution(), other=convolution(), norm=nn.BatchNorm2d(4)
    )


def read_twice() -> nn.Module:
    """One convolution, called once, whose output goes to two batch norms; nothing can be folded."""
    return written(
        lambda m, x: m.one(y := m.conv(x)) - m.other(y).relu(), conv=convolution(), one=nn.BatchNorm2d(4), other=nn.BatchNorm2d(4)
    )


SHARED: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # and how many convolutions there are, and batch norms that are not folded
    "layer": (shared_layer, 2, 0),
    "norm": (shared_norm, 2, 0),
    "read twice": (read_twice, 1, 2),
}


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", contract.TARGETS)
@pytest.mark.parametrize("name", SHARED)
def test_what_is_shared_is_not_merged(name: str, target: str, mode: str, tmp_path: Path) -> None:
    make, convolutions, alone = SHARED[name]
    model, batches = built(lambda: Case((4, 3, 6, 6), lambda s, x: s.shared(x), shared=make()))
    batch = batches[0][0]
    compiled = contract.compiled(model, batches, target, COVERING, batch_norm=mode)
    kinds = [operator.operator.name for operator in quantized_operators(compiled.prepared).values()]
    assert (kinds.count("conv2d"), kinds.count("batch_norm")) == (convolutions, alone)
    expected = model(batch)
    assert (compiled.integer(batch) - expected).square().mean() < 0.005 * expected.var()
    assert_contract(compiled, tmp_path / "model.onnx", batches)
    compiled.prepared.eval()
    for state in (fxq.State.FLOAT, fxq.State.CALIBRATE):
        fxq.set_state(compiled.prepared, state)
        torch.testing.assert_close(compiled.prepared(batch), expected, rtol=1e-5, atol=1e-5)
    if mode == "folded" and name == "layer":
        own = {key for key in compiled.prepared.state_dict() if not key.startswith("quantized.")}
        assert own == {
            "shared.conv.weight_shared_conv",
            "shared.conv.bias_shared_conv",
            "shared.conv.weight_shared_conv_1",
            "shared.conv.bias_shared_conv_1",
        }


@pytest.mark.parametrize("name", SHARED)
def test_live_statistics_of_what_is_shared(name: str) -> None:
    model, batches = built(lambda: Case((4, 3, 6, 6), lambda s, x: s.shared(x), shared=SHARED[name][0]()), 1)
    prepared = to_train(with_room(contract.compiled(model, batches, qconfig=COVERING, batch_norm="live").prepared))
    model.train()
    actual, expected = prepared(*batches[0]), model(*batches[0])
    assert (actual - expected).square().mean() < 0.01 * expected.var()
    assert len(norms(prepared)) == len(norms(model))
    for ours, theirs in zip(norms(prepared), norms(model), strict=True):
        for statistic in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(ours, statistic), getattr(theirs, statistic), rtol=2e-2, atol=2e-2)
        assert torch.equal(ours.num_batches_tracked, theirs.num_batches_tracked)

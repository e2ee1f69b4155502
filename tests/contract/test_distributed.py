"""Several ranks: equal scales from different shards, training in DistributedDataParallel, copies and pickles of a prepared model."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import fxquant as fxq
from fxquant.accuracy.checkpoint import Checkpoint
from fxquant.accuracy.measure import FloatOutputs
from fxquant.accuracy.weights import _Layer as Layer
from fxquant.quantization.observers import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer, PercentileObserver
from tests.shared.contract import same_state
from tests.shared.networks import descend, mean_square, to_train

pytestmark = pytest.mark.nightly

RANKS = 2
OBSERVERS: dict[str, Any] = {
    "minmax": MinMaxObserver,
    "average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers)


def shards() -> list[Tensor]:
    """Five batches; rank 0 has three, with the largest values, and rank 1 two."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 2, 6, 6, generator=generator) * scale for scale in (3.0, 1.0, 2.0, 0.5, 0.25)]


def shard(rank: int) -> list[Tensor]:
    return shards()[rank::RANKS]


def prepare(observer: type[Observer] = MovingAverageMinMaxObserver, **options: Any) -> fx.GraphModule:
    config = fxq.QConfig(output=fxq.ActivationConfig(observer=observer))
    return fxq.prepare(network(), shards()[0], "bayes-e", config, **options)


def observations(prepared: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prepared.state_dict().items() if "quantizer" in name}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


# ---- what the ranks do; each writes down what it has found --------------------------------------------------------------
def work(rank: int, directory: str, pickled: fx.GraphModule) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    try:
        sensitivity = {
            "calibrated": {name: calibrated(rank, observer) for name, observer in OBSERVERS.items()},
            "again": again(rank),
            "rounded": rounded(rank),
            "one without": fxq.qparams(fxq.calibrate(prepare(), shards() if rank == 0 else [])),
            "failed": failed(rank),
            "trained": trained(rank, pickled),
            "frozen": frozen(rank),
            "learned": learned(rank),
            "searched": searches(Metric()),
            "lost": lost(rank, directory),
            "other batches": refused(lambda: fxq.search.sensitivity(network(), shard(rank))),
            "other weights": refused(lambda: fxq.calibrate(other_weights(rank), shard(rank))),
            "tuned": {name: tuned(name) for name in METHODS},
            "apart": tuned("distill", steps=4 + rank),
            "taken over": taken_over(rank),
            "of rank 0": of_rank_0(rank),
            "kept": tuned("round_weights", options=fxq.Options(checkpoint=f"{directory}/rounding")),
        }
        torch.save(sensitivity, f"{directory}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def calibrated(rank: int, observer: type[Observer]) -> Any:
    prepared = fxq.calibrate(prepare(observer), shard(rank))
    return fxq.qparams(prepared), observations(prepared)


def again(rank: int) -> Any:
    """Calibrate twice: observations of all ranks are counted once when a second calibration goes on."""
    prepared = fxq.calibrate(fxq.calibrate(prepare(HistogramObserver), shard(rank)), shard(rank))
    return fxq.qparams(prepared), observations(prepared)


def rounded(rank: int) -> Any:
    """Weights of four bits, and biases after them, by the samples of the first rank."""
    prepared = fxq.prepare(network(), shards()[0], "bernoulli", fxq.QConfig(weight=fxq.WeightConfig("int4")))
    fxq.calibrate(prepared, 4 * shard(rank))  # 48 samples here and 32 there: only together are there enough for biases
    return {name: value.clone() for name, value in prepared.state_dict().items() if name.endswith(("offset", "correction.value"))}


def failed(rank: int) -> Any:
    """One rank has bad data: all ranks raise the error, and keep their observations."""
    prepared = fxq.calibrate(prepare(), shard(rank))
    before = observations(prepared)
    batches = shard(rank) if rank == 0 else [shard(rank)[0], shard(rank)[1] * float("nan")]
    try:
        fxq.calibrate(prepared, batches)
    except fxq.errors.CalibrationError as error:
        after = observations(prepared)
        return str(error), same_state(before, {name: after[name] for name in before})
    return "no error", False


def trained(rank: int, prepared: fx.GraphModule) -> Any:
    """Three steps with live statistics, each rank on its own shard."""
    model = DistributedDataParallel(to_train(prepared))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    grads, start = [], {name: value.clone() for name, value in prepared.state_dict().items()}
    for batch in shard(rank)[:2] + shard(rank)[:1]:
        optimizer.zero_grad()
        mean_square(model(batch)).backward()
        grads.append(gradients(prepared))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        result = model(shards()[0])
    integer = fxq.convert(prepared)
    state = prepared.state_dict()
    return {
        "gradients": grads,
        "state": state,
        "moved": [name for name, value in state.items() if not torch.equal(value, start[name])],
        "validate is integer": torch.equal(result, integer(shards()[0])),
        "result": result,
    }


def frozen(rank: int) -> Any:
    """One step without statistics: the gradient is that of the ranks' batches together."""
    prepared = to_train(calibrated_alone())
    fxq.freeze(prepared)
    model = DistributedDataParallel(prepared)
    mean_square(model(shard(rank)[0])).backward()
    return gradients(prepared)


LEARNED = fxq.QConfig(fxq.ActivationConfig("int4", training="learned"), fxq.WeightConfig("int4", training="tqt"))


def learner() -> fx.GraphModule:
    prepared = fxq.prepare(network(), shards()[0], "bayes-e", LEARNED, options=fxq.Options(batch_norm="frozen"))
    fxq.calibrate(prepared, shards(), options=fxq.Options(distributed=False))
    return to_train(prepared)


def three_steps(model: nn.Module, rank: int | None) -> None:
    """Train on a rank's half of each batch, or on the whole batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    mine = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    descend(model, [batch[mine] for batch in shards()[:3]], optimizer=optimizer)


def learned(rank: int) -> Any:
    """Scales are learned by ranks that have half of each batch."""
    prepared = learner()
    three_steps(DistributedDataParallel(prepared), rank)
    return dict(prepared.named_parameters())


class Metric:
    """The loss of a model with its sign changed; `calls` counts the evaluations, and from `last` on they raise."""

    def __init__(self, last: int = 10**9) -> None:
        self.calls, self.last = 0, last

    def __call__(self, model: nn.Module) -> float:
        self.calls += 1
        if self.calls > self.last:
            raise RuntimeError("this rank is lost")
        return -float(mean_square(model(shards()[1])))


def searches(metric: Metric) -> dict[str, Any]:
    """The result of each search and how often this process evaluated the metric."""
    model, batches = network(), shards()[:2]
    budget = fxq.search.Budget(weight_bits=6)
    calls: dict[str, Any] = {
        "sensitivity": lambda: fxq.search.sensitivity(model, batches, metric=metric).tensors,
        "mixed_precision": lambda: fxq.search.mixed_precision(model, batches, budget=budget, metric=metric).candidates,
        "tune": lambda: [step.score for step in fxq.tune(model, batches, metric=metric, steps=2, tolerance=0.0).steps],
    }
    by_name = {}
    for name, call in calls.items():
        before = metric.calls
        by_name[name] = repr(call()), metric.calls - before
    return by_name


def lost(rank: int, directory: str) -> Any:
    """A rank raises in the middle of a search: the other one says so, and both have written their checkpoints."""
    options = fxq.Options(checkpoint=f"{directory}/search")
    try:
        fxq.search.sensitivity(network(), shards()[:2], metric=Metric(3 if rank else 10**9), options=options)
    except (fxq.errors.ConfigurationError, RuntimeError) as error:
        return str(error)
    return "no error"


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except fxq.errors.ConfigurationError as error:
        return str(error)
    return "no error"


def other_weights(rank: int) -> fx.GraphModule:
    prepared = prepare()
    torch.nn.init.constant_(prepared.get_parameter("3.bias"), rank)
    return prepared


METHODS: dict[str, dict[str, Any]] = {
    "round_weights": {}, "correct_bias": {}, "adaround": {"steps": 3}, "reconstruct": {"steps": 3}, "distill": {"steps": 4}
}  # fmt: skip


def four_bits() -> fx.GraphModule:
    """Calibrated without any method of tuning."""
    options = fxq.Options(correct_bias=False, round_weights=False, choose_ranges=False, distributed=False)
    prepared = fxq.prepare(network(), shards()[0], "bayes-e", fxq.QConfig(weight=fxq.WeightConfig("int4")))
    return fxq.calibrate(prepared, shards(), options=options)


def taken_over(rank: int) -> Any:
    """Rank 0 alone rounds weights; then both agree."""
    prepared = four_bits()
    if rank == 0:
        fxq.tuning.round_weights(prepared, 4 * shards(), options=fxq.Options(distributed=False))
    with mock.patch("fxquant.accuracy.checkpoint.logger.info") as told:
        agreed = Checkpoint(None, {"method": "own"}, True, divided=False).agreed(prepared, f"of rank {rank}")
    assert "each rank does all of the work" in str(told.call_args)
    return agreed, {name: value.clone() for name, value in prepared.state_dict().items()}


def counted(owner: type, name: str) -> Any:
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def of_rank_0(rank: int) -> Any:
    """Choices, roundings and corrections by the samples of rank 0; how often this process measured outputs and rounded a layer."""
    prepared = fxq.prepare(network(), shards()[0], "bayes-e", fxq.QConfig(weight=fxq.WeightConfig("int4")))
    options = fxq.Options(correct_bias=False)
    with counted(Layer, "best") as best, counted(FloatOutputs, "measure") as measure:
        fxq.calibrate(prepared, 4 * shards() if rank == 0 else [], options=options)
    return {name: value.clone() for name, value in prepared.state_dict().items()}, best.call_count, measure.call_count


def tuned(name: str, **settings: Any) -> Any:
    """Return a model's state after a method of `fxq.tuning`, the method's result, and how many layers this process rounded by samples."""
    prepared = four_bits()
    with counted(Layer, "best") as best:
        try:
            result = getattr(fxq.tuning, name)(prepared, 4 * shards(), **METHODS[name] | settings)
        except fxq.errors.ConfigurationError as error:
            return str(error)
    return {name: value.clone() for name, value in prepared.state_dict().items()}, repr((result.layers, result.losses)), best.call_count


def calibrated_alone() -> fx.GraphModule:
    return fxq.calibrate(prepare(), shards(), options=fxq.Options(distributed=False))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    mp.spawn(work, (str(directory), calibrated_alone()), RANKS)  # type: ignore[no-untyped-call,attr-defined]
    return [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


# ---- calibration --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OBSERVERS)
def test_every_rank_has_the_same_scales_and_statistics(ranks: list[dict[str, Any]], name: str) -> None:
    (scales, seen), (others, others_seen) = (rank["calibrated"][name] for rank in ranks)
    assert scales == others
    assert same_state(seen, others_seen)
    assert all(0 < scale < float("inf") for scale in scales.values())
    single = fxq.calibrate(prepare(OBSERVERS[name]), shards())
    exact = name == "minmax"
    assert scales == pytest.approx(fxq.qparams(single), rel=0 if exact else 2e-2 if name in ("histogram", "percentile") else 1e-6, abs=0)
    counts = {name: int(value) for name, value in seen.items() if name.endswith(".count")}
    assert set(counts.values()) == {len(shards())}
    assert fxq.qparams(fxq.calibrate(prepare(OBSERVERS[name]), shard(1))) != scales, "one shard alone has other scales"


def test_a_second_calibration_goes_on(ranks: list[dict[str, Any]]) -> None:
    (scales, seen), (others, others_seen) = (rank["again"] for rank in ranks)
    assert scales == others
    assert same_state(seen, others_seen)
    assert {int(value) for name, value in seen.items() if name.endswith(".count")} == {2 * len(shards())}
    once = ranks[0]["calibrated"]["histogram"][1]
    total = next(name for name in once if name.endswith(".counts"))
    assert float(seen[total].sum()) == 2 * float(once[total].sum())


def test_ranks_round_weights_and_correct_biases_alike_and_a_rank_may_have_no_batch(ranks: list[dict[str, Any]]) -> None:
    decided = ranks[0]["rounded"]
    assert {name.rpartition(".")[2] for name in decided} == {"offset", "value"}
    assert same_state(decided, ranks[1]["rounded"])
    assert ranks[0]["one without"] == ranks[1]["one without"] == fxq.qparams(calibrated_alone())


def test_a_failure_reaches_all_ranks(ranks: list[dict[str, Any]]) -> None:
    (told, kept), (own, kept_too) = (rank["failed"] for rank in ranks)
    assert "the calibration of rank 1 failed" in told
    assert "batch 1 does not fit the model" in own
    assert kept
    assert kept_too


# ---- training -----------------------------------------------------------------------------------------------------------
def test_gradients_parameters_scales_and_statistics_are_equal_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for one, other in zip(*(rank["trained"]["gradients"] for rank in ranks), strict=True):
        assert same_state(one, other)
        assert len(one) == 8
        assert all(bool(value.abs().sum() > 0) for name, value in one.items() if "0.bias" not in name and "1.bias" not in name)
    one, other = (rank["trained"] for rank in ranks)
    assert same_state(one["state"], other["state"])
    assert any(name.endswith("scale") for name in one["moved"])
    assert {"0.weight", "1.running_mean", "3.weight", "5.bias"} <= set(one["moved"])
    assert torch.equal(one["result"], other["result"])
    assert one["validate is integer"]
    assert other["validate is integer"]


def test_the_gradient_is_that_of_all_shards_together(ranks: list[dict[str, Any]]) -> None:
    prepared = to_train(calibrated_alone())
    fxq.freeze(prepared)
    mean_square(prepared(torch.cat([shard(rank)[0] for rank in range(RANKS)]))).backward()
    assert same_state(ranks[0]["frozen"], ranks[1]["frozen"])
    for name, value in gradients(prepared).items():
        torch.testing.assert_close(ranks[0]["frozen"][name], value)


def test_scales_are_learned_as_by_one_process(ranks: list[dict[str, Any]]) -> None:
    """From the same data: a sum over ranks is in another order than one over a batch, and nothing else differs."""
    one, other = (rank["learned"] for rank in ranks)
    assert same_state(one, other)
    single = learner()
    three_steps(single, None)
    assert len([name for name in one if name.endswith("_change")]) == 7
    for name, value in single.named_parameters():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-6)
        assert not name.endswith("_change") or not torch.equal(value, torch.zeros_like(value)), name


# ---- searches -----------------------------------------------------------------------------------------------------------
def test_ranks_share_the_trials_of_a_search_and_have_the_results_of_one_process(ranks: list[Any]) -> None:
    alone, one, other = searches(Metric()), ranks[0]["searched"], ranks[1]["searched"]
    for name, (result, calls) in alone.items():
        assert one[name][0] == other[name][0] == result, name
        if name != "tune":  # its remedies are tried in turn, and only the searches among them are shared
            assert max(one[name][1], other[name][1]) < 0.7 * calls, name
            assert one[name][1] + other[name][1] == calls, name


def test_one_process_goes_on_after_a_rank_was_lost(ranks: list[Any], directory: Path) -> None:
    assert "failed on another rank" in ranks[0]["lost"]
    assert "this rank is lost" in ranks[1]["lost"]
    metric, (whole, calls) = Metric(), ranks[0]["searched"]["sensitivity"]
    resumed = fxq.search.sensitivity(network(), shards()[:2], metric=metric, options=fxq.Options(checkpoint=directory / "search"))
    assert repr(resumed.tensors) == whole
    assert 0 < metric.calls < calls, "the files of both ranks are read"


def test_ranks_with_other_batches_are_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "the ranks call this with different model and samples" in rank["other batches"]
        assert "the ranks call this with different steps" in rank["apart"]
        assert "the model of rank 1 has other parameters or statistics than that of rank 0" in rank["other weights"]


# ---- tuning -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_ranks_tune_alike_and_as_one_process_does(ranks: list[dict[str, Any]], name: str) -> None:
    (state, rows, calls), (other, other_rows, other_calls) = (rank["tuned"][name] for rank in ranks)
    alone, alone_rows, alone_calls = tuned(name)
    assert same_state(state, other)
    assert same_state(state, alone)
    assert rows == other_rows == alone_rows
    assert calls + other_calls == alone_calls
    assert max(calls, other_calls) == -(-alone_calls // 2)


def test_one_process_goes_on_from_the_layers_of_all_ranks(ranks: list[dict[str, Any]], directory: Path) -> None:
    (state, rows, _), (_, _, calls) = ranks[0]["kept"], ranks[1]["kept"]
    assert calls == 1
    again, again_rows, calls = tuned("round_weights", options=fxq.Options(checkpoint=str(directory / "rounding")))
    assert same_state(state, again)
    assert (rows, 0) == (again_rows, calls)


def test_ranks_divide_what_calibration_chooses_by_the_samples_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    (state, rounded, measured), (other, other_rounded, other_measured) = (rank["of rank 0"] for rank in ranks)
    alone, alone_rounded, alone_measured = of_rank_0(0)
    assert same_state(state, other)
    assert same_state(state, alone)
    assert (rounded, other_rounded, alone_rounded) == (2, 1, 3)
    assert measured < alone_measured
    assert other_measured < alone_measured


def test_a_rank_that_computed_other_numbers_takes_over_those_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    (agreed, state), (other, other_state) = (rank["taken over"] for rank in ranks)
    assert agreed == other == "of rank 0"
    assert any(name.endswith("rounding.offset") for name in state)
    assert same_state(state, other_state)


# ---- merging, without any process -------------------------------------------------------------------------------------
def test_an_observer_that_cannot_be_joined_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxquant.accuracy import ranks

    class Own(MinMaxObserver):
        merge = Observer.merge

    own = Own()
    own.observe(torch.randn(4))

    def gather(into: list[Any], value: Any) -> None:
        into[:] = [value, value]

    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(fxq.errors.ConfigurationError, match="cannot be merged") as caught:
        ranks.merge({"own": own}, 1)
    assert "distributed=False" in caught.value.remedy


# ---- copies -------------------------------------------------------------------------------------------------------------
def test_a_deep_model_can_be_pickled() -> None:
    prepared = fxq.prepare(nn.Sequential(*(nn.Sigmoid() for _ in range(400))), torch.randn(2, 4))
    again = pickle.loads(pickle.dumps(prepared))
    assert fxq.text(again) == fxq.text(prepared)

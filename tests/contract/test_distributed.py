"""Several ranks: equal scales from different shards, training in DistributedDataParallel, copies and pickles of a prepared model."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import fxquant as fxq
from fxquant.accuracy.ranks import agree
from fxquant.errors import CalibrationError
from fxquant.quantization.observers import HistogramObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer, PercentileObserver
from tests.shared.contract import same_state
from tests.shared.networks import descend, mean_square, to_train

pytestmark = pytest.mark.nightly

RANKS = 2
ALONE = fxq.Options(distributed=False)
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
            "rounded": rounded((4 * shards())[rank::RANKS]),
            "one without": fxq.qparams(fxq.calibrate(prepare(), shards() if rank == 0 else [])),
            "failed": failed(shard(rank) if rank == 0 else [shard(rank)[0], shard(rank)[1] * float("nan")]),
            "unread": failed(unreadable(rank)),
            "trained": trained(rank, pickled),
            "frozen": frozen(rank),
            "learned": learned(rank),
            "other weights": refused(lambda: fxq.calibrate(other_weights(rank), shard(rank))),
            "alone": [refused(call) for call in alone()],
            "taken over": taken_over(rank),
        }
        torch.save(sensitivity, f"{directory}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def calibrated(rank: int, observer: type[Observer]) -> Any:
    prepared = fxq.calibrate(prepare(observer), shard(rank))
    return fxq.qparams(prepared), observations(prepared)


def again(rank: int) -> Any:
    """Calibrate twice: the second calibration goes on with the observations of all ranks."""
    prepared = fxq.calibrate(fxq.calibrate(prepare(HistogramObserver), shard(rank)), shard(rank))
    return fxq.qparams(prepared), observations(prepared)


def rounded(batches: list[Tensor]) -> Any:
    """Weights of four bits, and biases after them, by the samples of all ranks: each has 40, and biases ask for 64."""
    prepared = fxq.prepare(network(), shards()[0], "bernoulli", fxq.QConfig(weight=fxq.WeightConfig("int4")))
    fxq.calibrate(prepared, batches)
    return {name: value.clone() for name, value in prepared.state_dict().items() if name.endswith(("offset", "correction.value"))}


def unreadable(rank: int) -> Iterator[Tensor]:
    """Rank 1 cannot read its second batch."""
    yield shard(rank)[0]
    if rank:
        raise CalibrationError("no file", because="it is lost", remedy="find it")
    yield shard(rank)[1]


def failed(batches: Iterable[Tensor]) -> Any:
    """Calibrate a calibrated model with batches, one of which is bad; return the error, and whether the scales stayed."""
    prepared = fxq.calibrate(prepare(), shards(), options=ALONE)
    before = fxq.qparams(prepared)
    try:
        fxq.calibrate(prepared, batches)
    except CalibrationError as error:
        return str(error), before == fxq.qparams(prepared)
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
    fxq.calibrate(prepared, shards(), options=ALONE)
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


def alone() -> list[Callable[[], Any]]:
    """Return the calls that each rank makes by itself."""
    tunings = (partial(method, calibrated_alone(), shards()) for method in (fxq.tuning.adaround, fxq.tuning.correct_bias))
    searches = (partial(search, network(), shards()) for search in (fxq.search.sensitivity, fxq.tune))
    return [partial(fxq.tuning.equalize, prepare(), shards()), *tunings, *searches]


def taken_over(rank: int) -> dict[str, Tensor]:
    """Rank 1 computes other numbers than rank 0, and then they agree."""
    prepared = other_weights(rank)
    agree(prepared)
    return dict(prepared.named_parameters())


def calibrated_alone() -> fx.GraphModule:
    return fxq.calibrate(prepare(), shards(), options=ALONE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    mp.spawn(work, (str(directory), calibrated_alone()), RANKS)  # type: ignore[no-untyped-call,attr-defined]
    return [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


# ---- calibration --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OBSERVERS)
def test_every_rank_has_the_scales_and_statistics_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    (scales, seen), (others, others_seen) = (rank["calibrated"][name] for rank in ranks)
    single = fxq.calibrate(prepare(OBSERVERS[name]), shards())
    assert scales == others == fxq.qparams(single)
    assert same_state(seen, others_seen)
    assert same_state(seen, observations(single))
    assert fxq.qparams(fxq.calibrate(prepare(OBSERVERS[name]), shard(1))) != scales, "one shard alone has other scales"


def test_a_second_calibration_goes_on(ranks: list[dict[str, Any]]) -> None:
    (scales, seen), (others, others_seen) = (rank["again"] for rank in ranks)
    single = fxq.calibrate(fxq.calibrate(prepare(HistogramObserver), shards()), shards())
    assert scales == others == fxq.qparams(single)
    assert same_state(seen, others_seen)
    assert same_state(seen, observations(single))


def test_ranks_round_weights_and_correct_biases_as_one_process_and_a_rank_may_have_no_batch(ranks: list[dict[str, Any]]) -> None:
    decided = ranks[0]["rounded"]
    assert {name.rpartition(".")[2] for name in decided} == {"offset", "value"}
    assert same_state(decided, ranks[1]["rounded"])
    assert same_state(decided, rounded(4 * shards()))
    assert ranks[0]["one without"] == ranks[1]["one without"] == fxq.qparams(calibrated_alone())


def test_a_failure_reaches_all_ranks(ranks: list[dict[str, Any]]) -> None:
    (told, kept), (own, kept_too) = (rank["failed"] for rank in ranks)
    assert told == own
    assert "batch 3 does not fit the model" in told
    assert kept
    assert kept_too
    assert "rank 1 cannot read its next batch" in ranks[0]["unread"][0]
    assert "no file" in ranks[1]["unread"][0]


def test_ranks_with_other_weights_and_what_each_rank_does_by_itself_are_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "the model of rank 1 has other parameters or statistics than that of rank 0" in rank["other weights"]
        assert all("2 ranks search and tune nothing together" in told for told in rank["alone"])
        assert len(rank["alone"]) == 5


def test_a_rank_that_computed_other_numbers_takes_over_those_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    assert same_state(ranks[0]["taken over"], ranks[1]["taken over"])
    assert same_state(ranks[0]["taken over"], dict(other_weights(0).named_parameters()))


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


# ---- copies -------------------------------------------------------------------------------------------------------------
def test_a_deep_model_can_be_pickled() -> None:
    prepared = fxq.prepare(nn.Sequential(*(nn.Sigmoid() for _ in range(400))), torch.randn(2, 4))
    again = pickle.loads(pickle.dumps(prepared))
    assert fxq.text(again) == fxq.text(prepared)

"""Several threads at once: a trace is its own thread's affair, and leaves nothing behind."""

import builtins
import gc
import math
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxquant as fxq
from fxquant.errors import TraceError
from fxquant.frontend import trace
from fxquant.frontend.environment import Snapshot
from tests.shared.networks import members


@members(lambda width: dict(layer=nn.Linear(6, width), norm=nn.BatchNorm1d(width), drop=nn.Dropout(0.5)))
def Sized(self, x: torch.Tensor) -> torch.Tensor:
    """Python's `int`, `len`, `range` and `math` beside a layer, and what behaves differently in train mode."""
    if len(x) > 0 and isinstance(x.shape[1], int):
        for _ in range(int(x.shape[1] / 6)):
            x = self.layer(x) * math.sqrt(4.0)
    return self.drop(self.norm(x))


def together(*works: Callable[[], None]) -> None:
    """Run all at once, each in a thread of its own; raise the error of one thread."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def of_the_process():
    """Return the state that every thread of the process sees."""
    mine = {name: value for name, value in vars(sys.modules[__name__]).items() if name != "__warningregistry__"}
    settings = (gc.isenabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads())
    return nn.Module.__call__, mine, dict(vars(builtins)), dict(vars(math)), settings


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = of_the_process()
    yield
    assert of_the_process() == before
    assert vars(sys.modules[__name__])["math"] is math


def test_a_model_that_is_served_while_it_is_prepared_returns_its_tensors():
    model, x, done = Sized(3).eval(), torch.ones(5, 6), threading.Event()
    wanted, kinds = model(x).detach(), set()

    def serve() -> None:
        while not done.is_set():
            result = model(x)
            kinds.add((type(result), torch.equal(result, wanted), type(math.sqrt(2)), range(2) == range(2), int("3")))
            done.wait(0.0002)

    def prepare() -> None:
        try:
            for _ in range(3):
                trace(model, x)
        finally:
            done.set()

    together(serve, prepare)
    assert kinds == {(torch.Tensor, True, float, True, 3)}


def test_traces_that_fail_in_several_threads_leave_nothing_either():
    def fail() -> None:
        for _ in range(3):
            with pytest.raises(TraceError):
                trace(Sized(3), torch.ones(2, 5))

    together(fail, fail, fail)


def test_a_trace_keeps_what_another_library_replaced_meanwhile(monkeypatch):
    original = nn.Module.__call__

    def theirs(module, *args, **kwargs):
        return original(module, *args, **kwargs)

    class Replacing(nn.Module):
        def forward(self, x):
            nn.Module.__call__ = theirs
            return x + 1

    monkeypatch.setattr(nn.Module, "__call__", original)  # put back at the end
    trace(Replacing(), torch.ones(2, 3), check=False)
    assert nn.Module.__call__ is theirs
    nn.Module.__call__ = original


# ---- random numbers --------------------------------------------------------------------------------------------------
@members(lambda: dict(generator=torch.Generator().manual_seed(1)))
def Random(self, x: torch.Tensor) -> torch.Tensor:
    """Draws numbers in every way there is."""
    torch.empty(3).uniform_(generator=self.generator)
    return F.dropout(x + torch.randn_like(x) * torch.rand(3), 0.5, training=True)


def test_tracing_a_model_that_draws_numbers_moves_no_generator():
    model = Random()
    before = torch.get_rng_state(), model.generator.get_state()
    trace(model, torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(model.generator.get_state(), before[1])


def test_other_threads_draw_the_numbers_they_would_have_drawn():
    model, x = Sized(3), torch.ones(2, 6)
    torch.manual_seed(3)
    wanted = torch.rand(300)
    torch.manual_seed(3)
    drawn: list[torch.Tensor] = []

    def draw() -> None:
        while len(drawn) < 300:
            drawn.append(torch.rand(1))
            threading.Event().wait(0.0003)

    def compile_() -> None:
        while len(drawn) < 300:
            trace(model, x)

    together(draw, compile_)
    assert torch.equal(torch.cat(drawn), wanted)


# ---- settings --------------------------------------------------------------------------------------------------------
def test_attention_layers_are_traced_by_their_code_and_the_fast_path_stays_on():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    traced = trace(model, torch.ones(2, 5, 8))
    assert "self_attn" in {node.target for node in traced.graph.nodes}
    assert set(seen) == {True}


def test_an_attention_layer_is_found_also_where_it_is_not_registered():
    model = nn.Sequential(nn.Linear(8, 8))
    model.hidden = [nn.MultiheadAttention(8, 2)]
    assert any(isinstance(module, nn.MultiheadAttention) for module in Snapshot(model).modules)
    assert not any(isinstance(module, nn.MultiheadAttention) for module in Snapshot(nn.Sequential(nn.Linear(8, 8))).modules)


def test_a_tensor_of_a_trace_in_another_thread_is_refused():
    class Pooled(nn.Module):
        def forward(self, x):
            results = []
            together(lambda: results.append(x + 1))
            return results[0]

    with pytest.raises(TraceError, match="a tensor of a trace is used where nothing is traced"):
        trace(Pooled(), torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prepare_inside_autocast_is_prepare(dtype):
    model, x = Sized(3).eval(), torch.randn(4, 6)
    wanted = fxq.prepare(model, x)
    with torch.autocast("cpu", dtype=dtype):
        prepared = fxq.prepare(model, x)
        assert torch.is_autocast_enabled("cpu")
    assert fxq.text(prepared) == fxq.text(wanted)

"""Padded sequences whose lengths `pack_padded_sequence` is given: recurrent layers read no padding, in any form of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import fxquant as fxq
from fxquant.errors import TraceError
from fxquant.ir import functional
from tests.shared.networks import Network

LENGTHS = [[6, 2, 5, 1], [6], [3, 6, 6, 4, 2, 1]]


def padded(model: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Pack, run a recurrent layer, and pad with 0.5; return the outputs, the lengths and the last states."""
    first = model.layer.batch_first
    packed = pack_padded_sequence(x if first else x.transpose(0, 1), lengths, first, enforce_sorted=False)
    output, state = model.layer(packed, model.state(x))
    result, same = pad_packed_sequence(output, first, 0.5, model.total(x))
    return (result if first else result.transpose(0, 1), same, *(state if isinstance(state, tuple) else (state,)))


def batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(len(lengths), max(lengths), 8, generator=torch.Generator().manual_seed(seed)), torch.tensor(lengths)


def network(kind: type[nn.RNNBase], total: Any = lambda x: None, initial: bool = False, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = kind(8, 12, **settings)
    count = layer.num_layers * (1 + layer.bidirectional)
    one = (lambda x: x[:, 0, :1].expand(count, -1, 12)) if initial else (lambda x: None)
    state = (lambda x: (one(x), one(x)) if initial else None) if kind is nn.LSTM else one
    return Network(padded, layer=layer, state=state, total=total).eval()


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("x86", network(nn.LSTM, bidirectional=True, num_layers=2, batch_first=True)),
        ("bayes-e", network(nn.LSTM, initial=True, batch_first=True)),
        ("nash-e", network(nn.GRU, bidirectional=True, total=lambda x: 9)),
        ("bayes-e", network(nn.GRU, initial=True, num_layers=2)),
        ("x86", network(nn.RNN, bidirectional=True, nonlinearity="relu", bias=False)),
    ],
)
def test_padding_is_not_read(target: str, model: nn.Module, tmp_path: Path) -> None:
    batches = [batch(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    result = fxq.quantize(model, batches * 4, target)
    fxq.set_state(result.prepared, fxq.State.VALIDATE)
    assert result.verify(result.export(tmp_path / "model.onnx", style="exact"), batches)
    fxq.export.export_pt2(result.integer, tmp_path / "model.pt2")
    assert "SQNR" in str(result.verify(result.export(tmp_path / "qdq.onnx", style="qdq", opset=21), batches))
    for x, lengths in batches:
        outputs, wanted = result.integer(x, lengths), [each.detach() for each in model(x, lengths)]
        assert all(map(torch.equal, outputs, result.prepared(x, lengths)))
        assert torch.equal(outputs[0] == 0.5, wanted[0] == 0.5)
        assert all(float((got - of_float).abs().max()) < 0.05 for got, of_float in zip(outputs, wanted, strict=True))
        with_other_padding = x.masked_fill((torch.arange(x.shape[1]) >= lengths[:, None])[..., None], 3.0)
        assert all(map(torch.equal, outputs, result.integer(with_other_padding, lengths)))


def test_the_number_of_steps_varies(tmp_path: Path) -> None:
    model = network(nn.GRU, lambda x: x.shape[1], bidirectional=True, batch_first=True)
    batches = [batch(lengths) for lengths in ([6, 2, 5], [15, 20, 1, 4], [1, 1])]
    result = fxq.quantize(model, batches, "x86")
    assert result.integer.graph.find_nodes(op="call_function", target=functional.over_lengths) == []  # all of it is integer
    assert result.verify(result.export(tmp_path / "model.onnx", style="fast", opset=17), batches)
    for one in batches:
        assert all(float((got - of_float).abs().max()) < 0.05 for got, of_float in zip(result.integer(*one), model(*one), strict=True))


def of_data(function: Any) -> nn.Module:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Any:
        output, _ = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return function(self, output, self.linear(output.data))

    return Network(forward, layer=nn.GRU(8, 12, batch_first=True), linear=nn.Linear(12, 4)).eval()


def test_a_layer_computes_with_packed_data() -> None:
    model = of_data(lambda self, packed, data: pad_packed_sequence(packed._replace(data=data), batch_first=True)[0])
    batches = [batch(lengths) for lengths in LENGTHS]
    result = fxq.quantize(model, batches, "x86")
    assert all(float((result.integer(*one) - model(*one)).abs().max()) < 0.05 for one in batches)
    with pytest.raises(TraceError, match="reads all data of a packed sequence"):
        fxq.trace(of_data(lambda self, packed, data: data.mean()), batch([4, 4, 4]))


def test_a_packed_sequence_from_elsewhere_is_refused() -> None:
    model = Network(lambda s, x, sizes: s.layer(PackedSequence(x, sizes))[1], layer=nn.GRU(8, 4))
    with pytest.raises(TraceError, match="did not make of padded ones"):
        fxq.trace(model, (torch.randn(6, 8), torch.tensor([3, 2, 1])))

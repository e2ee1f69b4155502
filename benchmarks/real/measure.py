"""One cell of the table: a network quantized by fxquant for a target, or by a peer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.accuracy import environments
from benchmarks.accuracy.floats import sqnr
from benchmarks.accuracy.peers import PEERS, Peer
from benchmarks.accuracy.settings import CALIBRATION, SETTINGS, Setting
from benchmarks.real.networks import BATCH, Network

COMPARED = ("torch.ao", "torch.ao reduced", "onnxruntime", "onnxruntime affine", "NNCF")  # of the peers, those that this table has
LAYERS = nn.Conv1d | nn.Conv2d | nn.Linear


@dataclass(frozen=True)
class Cell:
    """The figures of one network: dB, percent, seconds, and dB of each part of the output; or the reason why there are none."""

    sqnr: float = 0.0
    agreement: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "–" if self.reason else f"{self.sqnr:.1f} dB, {self.agreement:.1f} %"


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in torch.split(inputs, BATCH)])


def ours(network: Network, expected: Tensor, target: str, setting: Setting) -> Cell:
    """Calibrate with fxquant's defaults; raises AssertionError where the integer model and the prepared one differ in a bit."""
    start, data = time.perf_counter(), network.data
    example = data.calibration[0]
    options = fxq.Options(without_vnni=False)  # the same weights on every processor
    prepared = fxq.prepare(network.load(), example, target, mapping(network.load(), setting), options=options)
    fxq.calibrate(prepared, data.calibration, show_progress=False)
    integer = fxq.convert(prepared)
    outputs = outputs_of(integer, data.test_inputs)
    with torch.no_grad():
        assert torch.equal(prepared(data.test_inputs[:BATCH]), outputs[:BATCH]), "integer and prepared model differ"
    return _cell(network, expected, outputs, start)


def mapping(network: nn.Module, setting: Setting) -> fxq.QConfigMapping:
    """Return the setting's weights for all layers, and 8 bits for the first and the last."""
    few, eight = (fxq.QConfig(weight=fxq.WeightConfig(f"int{bits}")) for bits in (setting.weights, 8))
    rules = fxq.QConfigMapping(few)
    layers = [name for name, module in network.named_modules() if isinstance(module, LAYERS)]
    for name in (layers[0], layers[-1]) if setting.weights < 8 else ():
        rules = rules.set_module_name(name, eight)
    return rules


def theirs(network: Network, expected: Tensor, peer: str, setting: Setting, cache: Path) -> Cell:
    """Quantize with a peer. A refusal, an environment that is missing, or an error of the peer is a reason in place of figures."""
    start, chosen = time.perf_counter(), PEERS[peer]
    reason = chosen.refuses(setting, CALIBRATION)
    if reason is None and not environments.version(chosen, cache):
        reason = f"not installed: python -m benchmarks.accuracy --install {peer}"
    if reason is not None:
        return Cell(reason=reason)
    try:
        return _cell(network, expected, _outputs(network, chosen, setting, cache), start)
    except Exception as error:  # whatever a toolkit raises is printed in its place
        return Cell(reason=" ".join(f"{type(error).__name__}: {error}".split())[:120])


def _outputs(network: Network, peer: Peer, setting: Setting, cache: Path) -> Tensor:
    if not peer.requires:
        return outputs_of(peer.quantize(network, setting, CALIBRATION), network.data.test_inputs)
    names = (network.name, setting.name, str(network.tested))
    outputs = environments.apart(peer, "benchmarks.real.process", names, cache)
    if isinstance(outputs, str):
        raise RuntimeError(outputs)
    return outputs


def _cell(network: Network, expected: Tensor, actual: Tensor, start: float) -> Cell:
    seconds = time.perf_counter() - start
    parts = {name: sqnr(expected[:, channels], actual[:, channels]) for name, channels in network.parts.items()}
    return Cell(sqnr(expected, actual), network.agrees(actual, expected), seconds, parts=parts)


__all__ = ["COMPARED", "SETTINGS", "Cell", "mapping", "ours", "outputs_of", "theirs"]

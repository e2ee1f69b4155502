"""Other toolkits, a module each: their quantized models of the same checkpoint, from the same calibration samples.

Each module has `refuses(setting, mode)`, the reason why the toolkit cannot do such a row, or None, and `quantize(checkpoint,
setting, mode)`, the quantized model as a function of a batch. The module imports its toolkit inside, so that all can be named where
none is installed.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.accuracy.floats import Checkpoint
from benchmarks.accuracy.settings import Setting

Quantized = Callable[[Tensor], Tensor]


class Peer(NamedTuple):
    """A toolkit in one of its ways of use.

    module        in this package; its functions take the options as keywords
    requires      what pip is to install, in an environment of its own; nothing: it comes with fxquant's
    shares        the module whose environment it shares
    """

    name: str
    module: str
    options: dict[str, object]
    package: str
    requires: tuple[str, ...] = ()
    shares: str = ""

    @property
    def environment(self) -> str:
        """The folder of its environment."""
        return self.shares or self.module

    def refuses(self, setting: Setting, mode: str) -> str | None:
        reason: str | None = self._module.refuses(setting, mode, **self.options)
        return reason

    def quantize(self, checkpoint: Checkpoint, setting: Setting, mode: str) -> Quantized:
        quantized: Quantized = self._module.quantize(checkpoint, setting, mode, **self.options)
        return quantized

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"{__name__}.{self.module}")


TORCHAO = ("torchao==0.18.0",)
AIMET = ("aimet-torch==2.42.0", "torchvision==0.28.0")
MCT = ("model-compression-toolkit==2.6.1", "torchvision==0.28.0")
PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch.ao", "torch_ao", {"reduce_range": False}, "torch"),
        Peer("torch.ao reduced", "torch_ao", {"reduce_range": True}, "torch"),
        Peer("PT2E", "pt2e", {}, "torchao", TORCHAO),
        Peer("onnxruntime", "ort", {"affine": False}, "onnxruntime"),
        Peer("onnxruntime affine", "ort", {"affine": True}, "onnxruntime"),
        Peer("onnxruntime entropy", "ort", {"affine": False, "method": "Entropy"}, "onnxruntime"),
        Peer("NNCF", "nncf", {}, "nncf", ("nncf==3.4.0",)),
        Peer("AIMET", "aimet", {"equalization": False}, "aimet_torch", AIMET),
        Peer("AIMET equalized", "aimet", {"equalization": True}, "aimet_torch", AIMET),
        Peer("AIMET AdaRound", "aimet_adaround", {"iterations": 2000}, "aimet_torch", AIMET, "aimet"),
        Peer("MCT", "mct", {}, "model_compression_toolkit", MCT),
        Peer("Brevitas", "brevitas", {}, "brevitas", ("brevitas==0.13.4", "tqdm")),
    )
}

"""Options that are rarely needed, in one record that every function passes on unchanged."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fxquant.support.arguments import FILE, FLAG, NUMBER, Kind, checked_class, choice

WIDTHS = (4, 8, 16)


def _widths(value: Any) -> tuple[int, ...]:
    widths = (value,) if isinstance(value, int) else tuple(value)
    if not widths or not all(type(width) is int and width in WIDTHS for width in widths):
        raise ValueError
    return tuple(sorted(set(widths)))


@checked_class(
    accuracy=NUMBER.or_none("the qconfig's dtypes"),
    batch_norm=choice("live", "frozen", "folded"),
    checkpoint=FILE.or_none("nothing is kept, and each call starts from the beginning"),
    measured=FLAG,
    widths=Kind("some of 4, 8 and 16", _widths),
)
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the functions that take `options=`; each function uses the options of the steps it runs, and ignores the others.

    Of tracing and preparing: `trace`, `prepare`, `check`, `convert`, `quantize` and the searches.

    dynamic_shapes   the sizes of inputs that vary. None: the batch, dimension 0; True: each that can without a loss, and `explain` says
                     what fixes the others; {} or False: every size is the example's; otherwise as `torch.export` takes it:
                     ({0: Dim("batch"), 2: Dim("height", max=512)},) or {"x": {1: Dim("batch")}}
    leaf             modules that are not traced into, besides PyTorch's layers, and run as Python, in float: a class, a module's path, a
                     list of these, or a function of a module and its path that decides for every module. For functions see `fxq.wrap`
    preserve         attributes, methods and modules ("head.strides", "head.decode") that the prepared and the integer model must have
                     under the same names. Values are also in files that `save` writes; a method is not, since files hold no code. A module
                     named here stays unchanged, in float, next to the graph
    training_branch  True: `prepared.train()` returns what the float model does in train mode. The part of forward under `self.training`
                     (auxiliary heads, raw outputs for a loss) is computed in float, from the quantized tensors that it reads, and trains.
                     Elsewhere it is absent. A layer may not be called on other tensors in train mode than in eval mode (TraceError). Such a
                     prepared model cannot be saved as a file, but its `state_dict` can
    batch_norm       the mode of batch norms in training. "live": they use and update batch statistics. "frozen": they keep their running
                     statistics; their weight and bias are trained. "folded": those after a layer are multiplied into its weight and bias
                     once, and others are frozen. The layer's parameters keep their names in `state_dict`, a bias that was missing is new,
                     and the batch norm's are removed. A layer called several times has parameters for each call (`conv.weight_conv_1`)
    adapt            True: operators that break a limit of the target (see `check`) are replaced by equivalent ones: a large kernel or too
                     many channels by a sum of convolutions, a linear layer by a 1×1 convolution, a large pooling by two. If that is not
                     possible, the operator runs on the host, in float. `explain` names each, with the limit
    integer_tail     whether functions that saturate between last layers and outputs, as a softmax, a sigmoid or a tanh, are integer. False:
                     float functions of the layers' sums; on a chip up to 65,536 elements for each item, by its processor. None: True on
                     a chip, and False on other targets
    without_vnni     whether weights have scales so large that onnxruntime's kernels for x86 processors without VNNI are exact, which add
                     two products in 16 bits: at most twice those of 8 bits, for each channel as little as its weights need. None: on such
                     a processor, for the target x86
    passes           the user's own passes: {"canonical.rewrite": fuse} runs `fuse(graph_module, context)`, or several functions in order,
                     right after that pass. Each rewrites the graph in place and returns how many changes it made
    debug, dump      how much is printed (0 to 3), and the folder for the graph after each pass; None: FXQUANT_DEBUG and FXQUANT_DUMP

    Of calibrating: `calibrate`, `quantize`, `equalize` and the searches.

    distributed      False: this rank calibrates with its own batches alone, although torch.distributed is in use. Searches and
                     `fxq.tuning`, which each rank does by itself, ask for it there
    equalize         whether channels whose ranges in the first batch differ much are multiplied by powers of two before observation, if
                     that clearly reduces the error of weights and activations (`fxq.tuning.equalize`)
    round_weights    whether weights are rounded so that their errors cancel on the first 64 samples and in the model's outputs
                     (`fxq.tuning.round_weights`). None: weights of less than 8 bits; True: all, each kept if the outputs gain 0.2 dB
    correct_bias     whether biases compensate the mean shift of outputs by rounding (`fxq.tuning.correct_bias`); None: from 16 samples on
    choose_ranges    whether ranges are chosen by the method with which the outputs have the least noise: the squared error of all samples,
                     the noise of each, the smallest and the largest value, or a percentile. None: from 16 samples on. Unless it is False,
                     the range of an input, or of tensors of 16 bits, many of whose values round to 0 is divided by a power of two, if the
                     outputs are nearer to float with it
    accuracy         of `quantize`: the SQNR in dB that every output, and every part of one, is to have. Tensors and weights get 16 bits,
                     as few as it takes by their cost; `Result.widened` names them. None: all have the qconfig's dtypes

    Of functions that take batches, of `fxq.tuning` and of the searches.

    batch_fn         a function from a batch to the model's inputs; None: a batch holds the inputs
    batch_size       samples in a step of `fxq.tuning`
    seed             of random choices; no global generator is used. The same seed, model and batches give the same bits, on one machine
                     with one number of threads
    checkpoint       the path of a file: after a kill the same call continues from it, and ends with the bits of one that was not killed
    widths           the numbers of bits that the searches try
    measured         False: `sensitivity` and `mixed_precision` only estimate losses
    """

    dynamic_shapes: Any = None
    leaf: Any = None
    preserve: Sequence[str] = ()
    training_branch: bool = False
    batch_norm: str = "live"
    adapt: bool = False
    integer_tail: bool | None = None
    without_vnni: bool | None = None
    passes: Mapping[str, Any] | None = None
    debug: int | None = None
    dump: str | os.PathLike[str] | None = None
    distributed: bool = True
    equalize: bool = True
    round_weights: bool | None = None
    correct_bias: bool | None = None
    choose_ranges: bool | None = None
    accuracy: float | None = None
    batch_fn: Callable[[Any], Any] | None = None
    batch_size: int = 16
    seed: int = 0
    checkpoint: str | None = None
    widths: Sequence[int] = WIDTHS
    measured: bool = True

    def __repr__(self) -> str:
        """Return the call that constructs the object, without options that have their default."""
        chosen = [f"{each.name}={value!r}" for each in fields(self) if (value := getattr(self, each.name)) != each.default]
        return f"Options({', '.join(chosen)})"

    def inputs(self, batch: Any) -> Any:
        """Return the model's inputs of a batch: `batch_fn(batch)`, or the batch itself."""
        return batch if self.batch_fn is None else self.batch_fn(batch)


DEFAULTS = Options()

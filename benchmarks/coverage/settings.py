"""The qconfig, and calibration."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxquant as fxq
from benchmarks.coverage.record import Here, Network, State, chapter, part, refused, sure
from fxquant.compat import horizon, torch_ao
from fxquant.prepared.operators import quantized_operators

DOCS = Path(__file__).parents[2] / "docs"
A, W, Q, M = fxq.ActivationConfig, fxq.WeightConfig, fxq.QConfig, fxq.QConfigMapping


def dtypes(here: Here, target: str, activation: str | None = None, weight: str | None = None) -> set[str]:
    """The dtypes of layers with weights, of a model prepared so, whose bits are equal."""
    config = Q(A(activation) if activation else A(), weight=W(weight) if weight else W())
    prepared = here.prepared(target, config)
    here.exact(prepared)
    return {layer.dtype for layer in fxq.inspect.layers(prepared) if layer.macs}


def marked_float16(here: Here) -> State:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(6)).eval()
    result = here.quantized(model, "nash-p", qconfig=M().set_host(nn.LayerNorm))
    sure("in float16" in fxq.explain(result.prepared) and "in float16" not in fxq.explain(fxq.prepare(model, here.x, "nash-e")))
    sure(result.integer(here.x).dtype is torch.float32)
    return part("a mark for the vendor's compiler: the values are computed in float32")


def output_sums(here: Here) -> None:
    prepared = here.prepared(qconfig=M().set_module_name("head", Q(A("int32"))))
    here.exact(prepared)
    sure(next(layer.dtype for layer in fxq.inspect.layers(prepared) if layer.name == "head") == "int32")


def nearest(here: Here) -> None:
    mapping = M().set_object_type(nn.Conv2d, Q(A("int16"))).set_module_name("deep", Q(A("int8")))
    by_layer = {layer.name: layer.dtype for layer in fxq.inspect.layers(here.prepared(qconfig=mapping))}
    sure((by_layer["stem_0"], by_layer["deep"]) == ("int16", "int8"), str(by_layer))


def of_fused(here: Here) -> None:
    layers = {layer.name: layer.dtype for layer in fxq.inspect.layers(here.prepared(qconfig=M().set_module_name("stem.2", Q(A("int16")))))}
    sure(layers["stem_0"] == "int16", str(layers))


def as_dict(here: Here) -> None:
    horizon.set_march("nash-e")
    prepared = horizon.prepare_qat_fx(
        here.model, {"": horizon.default_qat_8bit_fake_quant_qconfig, "module_name": [("head", None)]}, example_inputs=(here.x,)
    )
    sure(any(layer.name == "head" and not layer.integer for layer in fxq.inspect.layers(prepared)))


def setters(here: Here) -> None:
    horizon.set_march("nash-e")
    chosen = horizon.QconfigSetter(horizon.get_qconfig(), [horizon.ModuleNameTemplate({"stem": torch.int16})])
    by_layer = {layer.name: layer.dtype for layer in fxq.inspect.layers(horizon.prepare(here.model, (here.x,), chosen))}
    sure((by_layer["stem_0"], by_layer["deep"]) == ("int16", "int8"), str(by_layer))


class Own(fxq.observers.Observer):
    """An observer of a user's: twice the largest magnitude."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def observe(self, value: Tensor) -> None:
        self.largest = torch.maximum(self.largest, value.abs().max())
        self.count += 1

    def scale(self, dtype: Any) -> Tensor:
        return 2 * self.largest / dtype.high


class Down(fxq.tuning.Rounding):
    """A rounding of a user's."""

    def integers(self, real: Tensor, low: int, high: int) -> Tensor:
        return real + (real.detach().floor().clamp(low, high) - real.detach())


def observer(here: Here, chosen: Any, **options: Any) -> None:
    prepared = here.prepared(qconfig=Q(A(observer=chosen, **options)))
    here.exact(prepared)


def input_of_an_inner_operator(here: Here) -> None:
    prepared = here.prepared(qconfig=M().set_module_name("deep", Q(input=A("int16"))))
    here.exact(prepared)
    by_layer = {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}
    sure(by_layer["stem_0_requantize"] == "int16", str(by_layer))


def by_order(here: Here) -> None:
    mapping = torch.ao.quantization.QConfigMapping().set_global(torch.ao.quantization.default_qconfig)
    mapping.set_module_name_object_type_order("", nn.Conv2d, 0, None)
    prepared = torch_ao.prepare_fx(here.model, mapping, (here.x,))
    sure([layer.name for layer in fxq.inspect.layers(prepared) if layer.operator == "conv2d" and not layer.integer] == ["deep"])
    rules = fxq.QConfigMapping().set_module_name_object_type_order("", nn.Conv2d, 0, fxq.QConfig(fxq.ActivationConfig("int16")))
    here.exact(here.prepared(qconfig=rules))


def operands(here: Here) -> None:
    mapping = M(Q(A("int16"))).set_object_type(nn.Conv2d, Q(A("int16"), W("int8"), A("int8")))
    prepared = here.prepared(qconfig=mapping)
    types = {layer.name: layer.dtype for layer in fxq.inspect.layers(prepared)}
    sure(
        (types["x_quantize"], types["stem_0"], types["stem_0_requantize"], types["deep"]) == ("int8", "int16", "int8", "int16"), str(types)
    )
    here.exact(prepared)


chapter(
    "qconfig",
    ("int8 by default, and the last layer's sum as int32", lambda h: sure(dtypes(h, "bayes-e") == {"int8", "int32"})),
    ("int16 activations, int8 weights", lambda h: sure(dtypes(h, "bayes-e", "int16") == {"int16"})),
    ("a dtype the march does not have is an error", lambda h: refused(lambda: dtypes(h, "bernoulli2", "int16"), "int16")),
    ("int16 weights", lambda h: sure(dtypes(h, "nash-e", "int16", "int16") == {"int16"})),
    ("int4 activations and weights", lambda h: sure(dtypes(h, "bernoulli2", "int4", "int4") == {"int4"})),
    ("uint8, with a zero point", lambda h: sure(dtypes(h, "x86") == {"uint8", "int32"})),
    ("what stays in float is marked float16 on the marches that have it", marked_float16),
    ("a 32-bit output of the last layer", output_sums),
    ("a given scale or threshold", lambda h: observer(h, fxq.observers.MinMaxObserver, scale=0.05)),
    ("global, type, name, pattern, attribute: the nearest goes first", nearest),
    ("rules for parts that are fused", of_fused),
    ("the form of a dict, as Horizon has it", as_dict),
    ("by type, place and order of calls, as PyTorch has it", by_order),
    ("a function's qconfig, without a module around it", lambda h: h.prepared(qconfig=M().set_object_type(torch.relu, Q(A("int16"))))),
    ("the input of an operator, in a dtype of its own", input_of_an_inner_operator),
    (
        "a part in float",
        lambda h: sure(
            any(
                layer.name == "deep" and not layer.integer
                for layer in fxq.inspect.layers(h.prepared(qconfig=M().set_module_name("deep", None)))
            )
        ),
    ),
    ("weights per tensor or per channel", lambda h: [h.exact(h.prepared(qconfig=Q(weight=W(per_channel=c)))) for c in (True, False)]),
    ("weights that cover less than their largest number", lambda h: h.exact(h.prepared(qconfig=Q(weight=W("int4", p=2.4))))),
    (
        "observers with arguments, as instance, partial or name",
        lambda h: [
            observer(h, chosen)
            for chosen in (fxq.observers.PercentileObserver(99.9), functools.partial(fxq.observers.PercentileObserver, 99.9), "percentile")
        ],
    ),
    ("an observer of one's own", lambda h: observer(h, Own)),
    ("a fake quantizer or rounding of one's own", lambda h: h.exact(h.prepared(qconfig=Q(weight=W(rounding=Down))))),
    ("templates and setters of the plugin", setters),
    ("dtypes of output, weight and input, each by itself", operands),
    ("what was set, and what became of it", lambda h: sure("int8" in fxq.explain(h.prepared()))),
    ("suspicious settings listed", lambda h: fxq.inspect.suspicious_settings(h.prepared(qconfig=Q(A(scale=10.0))))),
    (
        "a file of settings, to be edited",
        lambda h: sure(
            fxq.load_qconfig(fxq.save_qconfig(M().set_module_name("head", None), h.folder / "q.json")) == M().set_module_name("head", None)
        ),
    ),
)


# ---- calibration ------------------------------------------------------------------------------------------------------


class Masked(Network):
    """Attention with a mask of -1e9."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        mask = torch.full((64, 64), -1e9).triu(1)
        return (x @ x.transpose(1, 2) + mask).softmax(-1) @ x


def another_without_batches(here: Here) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Sigmoid()).eval()  # functions, whose inputs have scales too
    for first, second in (("int8", "int16"), ("int16", "int8")):
        observed = fxq.observers.observations(here.quantized(model, qconfig=Q(A(first))).prepared)
        again = fxq.prepare(model, here.x, "nash-e", Q(A(second, observer="percentile")), observations=observed)
        sure(second in {layer.dtype for layer in fxq.inspect.layers(again)})
        here.exact(again)


def left_out(here: Here) -> None:
    prepared = fxq.prepare(here.model, here.x, "nash-e")
    fxq.set_state(prepared, "float", "stem")
    fxq.calibrate(prepared, here.batches, show_progress=False)
    states = {name: operator.state for name, operator in quantized_operators(prepared).items()}
    sure({name for name, state in states.items() if state is fxq.State.FLOAT} == {"stem_0"}, str(states))
    results: list[Tensor] = []
    operator = quantized_operators(prepared)["stem_0"]
    operator.register_forward_hook(lambda module, args, result: results.append(result.detach()))
    prepared(here.x)
    steps = results[0] / operator.output.scale.detach()
    sure(float((steps - steps.round()).abs().max()) > 0.1, "its result is on a grid")


def not_finite(here: Here) -> None:
    refused(lambda: fxq.calibrate(fxq.prepare(here.model, here.x), [here.x * float("inf")], show_progress=False), "batch")


def distributed(here: Here) -> None:
    """One process of a group of one; tests/contract/test_distributed.py has several."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{here.folder / 'group'}", rank=0, world_size=1)
    try:
        shard = fxq.calibrate(fxq.prepare(here.model, here.x, "nash-e"), here.batches, show_progress=False)
    finally:
        dist.destroy_process_group()
    sure(fxq.qparams(shard) == fxq.qparams(here.prepared()))


def per_channel_activations(here: Here) -> State:
    refused(lambda: A(**{"per_channel": True}), "per_channel")
    sure(fxq.tuning.equalize(fxq.prepare(here.model, here.x, "nash-e"), here.batches, show_progress=False) is not None)
    return part("one scale for a tensor; channels get powers of two by equalization instead, and sums of 32 bits a scale each")


chapter(
    "Calibration",
    ("states for calibration, training, validation", lambda h: [fxq.set_state(h.prepared(), s) for s in fxq.State]),
    *(
        (f"{name}", lambda h, name=name: observer(h, name))
        for name in ("min_max", "moving_average", "percentile", "mse", "kl", "clip_std", "lp")
    ),
    ("bounds, and a fixed threshold",
     lambda h: (observer(h, fxq.observers.ClipObserver(-2, 2)), observer(h, fxq.observers.FixedScaleObserver(threshold=4.0)))),
    ("scales for each channel of an activation", per_channel_activations),
    ("calibration on several devices: shards, one result", distributed),
    ("another observer or dtype without new batches", another_without_batches),
    ("a part left out of calibration", left_out),
    ("NaN and infinity found, with the batch", not_finite),
    ("masks of -1e9 that poison no scale",
     lambda h: sure(float((h.quantized(Masked()).integer(h.x) - Masked().eval()(h.x)).abs().mean()) < 1)),
    ("advice on batches, methods, observers: a page", lambda h: sure((DOCS / "guide" / "calibrate.md").exists())),
)  # fmt: skip

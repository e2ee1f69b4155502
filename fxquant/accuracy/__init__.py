"""Choose numbers: `STEPS`, the table of what calibration, `fxq.tune` and the searches do to scales, weights and biases, in this order.

`calibrate` takes the steps that its options leave on, `fxq.tune` tries each with its option turned on or off and the steps that learn, and
a search takes those by samples again for each mapping. A new way to choose a number is one file and one row here.
"""

from fxquant.accuracy import bias, distill, equalize, learn, observe, ranges, weights
from fxquant.accuracy.step import FEW, Run, Step, has_layers

STEPS = (
    Step(
        name="equalization", because="factors of channels change what is observed",
        find=equalize.find, apply=equalize.apply, option="equalize", sampled=False, remedies=equalize.remedies,
    ),
    Step(
        name="observation", because="it reads every batch; all later steps know the first samples alone",
        find=observe.find, apply=observe.apply, sampled=False,
    ),
    Step(
        name="ranges", because="they are judged on layers as they are before the samples change them",
        find=ranges.find_method, apply=ranges.apply_method, option="choose_ranges", least=FEW,
    ),
    Step(
        name="narrowing", because="it divides the ranges that the method before has chosen",
        find=ranges.find_factors, apply=ranges.apply_factors, option="choose_ranges",
    ),
    Step(
        name="rounding of weights", because="biases take back what it leaves",
        find=weights.find, apply=weights.apply, undo=Run.take_back, option="round_weights", has_work=weights.has_work,
        remedies=weights.remedies,
    ),
    Step(
        name="bias correction", because="it takes back the mean of all errors before it",
        find=bias.find, apply=bias.apply, undo=Run.take_back, option="correct_bias", least=FEW, has_work=has_layers,
        remedies=bias.remedies, learn=bias.correct_bias,
    ),
    Step(name="distillation", because="a step learns for the whole model, which is cheaper than for each layer", learn=distill.distill),
    Step(name="AdaRound", because="it learns in steps for each layer", learn=learn.adaround),
    Step(name="reconstruction", because="it learns in steps for each block, scales too", learn=learn.reconstruct),
)  # fmt: skip
BY_SAMPLES = tuple(step for step in STEPS if step.sampled)

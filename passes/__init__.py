"""The compiler's table of contents: every pass, in order, with a reason wherever the order matters."""

if __name__ != "fxquant.passes":
    raise ImportError("import this package as fxquant.passes: under another name every class would exist twice")

from fxquant.passes import (
    activation,
    adapt,
    batchnorm,
    boundary,
    canonical,
    composite,
    gradients,
    integer,
    layerscale,
    masks,
    outputs,
    padding,
    parts,
    pointwise,
    precision,
    quantizers,
    residual,
    rules,
    scales,
    specs,
)
from fxquant.pipeline import Pass
from fxquant.prepared.stage import Stage

PIPELINE = (
    Pass(gradients.mark, Stage.TRACED),  # first: stops that every reader shares must not prevent canonical forms and fusions
    Pass(canonical.rewrite, Stage.CANONICAL),  # one call form per operator, which every later pass may assume
    Pass(gradients.move, Stage.CANONICAL),  # on canonical clamps, before anything is fused
    Pass(rules.match, Stage.CANONICAL),  # before the fusions: a rule is about what the user wrote, and may keep it apart
    Pass(rules.quantize_stubs, Stage.CANONICAL),  # after the rules, which are about stubs as well; before fusions, which read past them
    Pass(parts.read_directly, Stage.CANONICAL),  # after the rules, which may name a concatenation; before what reads a part is rewritten
    Pass(masks.recognise, Stage.CANONICAL),  # after the rules, which are about what was written; before a softmax is its parts
    Pass(pointwise.to_table, Stage.CANONICAL),  # after masks, which are not functions of scores; before what widens single operators
    Pass(precision.widen, Stage.CANONICAL),  # after masks, which are not scores; a composite's last part is as wide as the whole
    Pass(outputs.keep_float, Stage.CANONICAL),  # after pointwise, whose functions may saturate; before a softmax is its parts
    Pass(composite.expand, Stage.CANONICAL),  # after the rules, which are about the whole operator; before fusions, which meet its parts
    Pass(composite.choose_dynamic, Stage.CANONICAL),  # after the parts of recurrent layers; before fusions, which fuse nothing with these
    Pass(padding.fuse, Stage.CANONICAL),  # after the rules, which may be about a pad alone; before limits, which are about what runs
    Pass(batchnorm.fold, Stage.CANONICAL),  # before the fusions: conv-bn-add-relu must become conv-add-relu
    Pass(layerscale.fold, Stage.CANONICAL),  # after batch norms, which a layer absorbs alone; before residuals, which are added later
    Pass(residual.fuse, Stage.CANONICAL),  # before clamps: a relu after the addition belongs to the fused layer
    Pass(activation.fuse, Stage.CANONICAL),  # a fused clamp needs no separate scale
    Pass(specs.annotate, Stage.ANNOTATED),  # on what is left after fusion: one decision per operator
    Pass(adapt.apply, Stage.ANNOTATED),  # limits are about what runs, fused and of known dtype; before the boundary, which the host moves
    Pass(adapt.keep_islands, Stage.ANNOTATED),  # when all that is in float is known, what the host takes of a target's work among it
    Pass(outputs.separate, Stage.ANNOTATED),  # after islands, since it creates none; before the boundary, which it moves
    Pass(outputs.keep_sums, Stage.ANNOTATED),  # after outputs, which says what the host concatenates; before the boundary, which it moves
    Pass(boundary.insert, Stage.BOUNDED),  # where a decision changes, values cross between float and integer
    Pass(boundary.requantize, Stage.BOUNDED),  # after the boundary, which says what integers read; before scales are shared
    Pass(scales.share, Stage.BOUNDED),  # after the boundary, whose nodes take part in sharing
    Pass(quantizers.insert, Stage.PREPARED),  # here the prepared model is calibrated and trained
    Pass(gradients.attach, Stage.PREPARED),  # between operators that train; integers have no gradients
    Pass(integer.lower, Stage.INTEGER),  # operators become integer primitives with the weights of this moment
    Pass(integer.find_kernels, Stage.FUSED),  # on primitives, which define a kernel's result; they are not changed
)

PREPARE = tuple(step for step in PIPELINE if step.reaches <= Stage.PREPARED)
CONVERT = tuple(step for step in PIPELINE if step.reaches > Stage.PREPARED)

"""How tensors are quantized: what is asked for, and how scales are chosen and learned.

A `quantizer.Quantizer` holds the grid of one tensor, or of the group that shares it, and its observer. A `weights.WeightQuantizer` makes
the integers of a weight, and holds what is learned of its scale and rounding, and what is added to the bias. A method that learns a scale
is a class of `learning`: its parameters, the scale they give, their gradients. `weights.ChannelFactors` hold the powers of two
that `equalize` chose for channels; an operator applies them to its parameters at every call, by `layer.rescaled` of its record.
"""

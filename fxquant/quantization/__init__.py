"""Quantization of tensors: configs, observers that choose scales, and methods that learn them.

A `quantizer.Quantizer` holds the scale, zero point and dtype of one tensor, or of a group that shares them, and its observer. A
`weights.WeightQuantizer` computes the integers of a weight, and holds its learned scale, its rounding and the bias correction. A method
that learns a scale is a class of `learning`: its parameters, the scale as a function of them, and their gradients.
`weights.ChannelFactors` hold the powers of two that `equalize` chose for channels; an operator multiplies its parameters by them at every
call, with `layer.rescaled` of its record.
"""

"""The float16 operators of Nash-p and Nash-h: every operator of their export that has no integer form, except sums of products.

Source: the table of operators that Horizon's export for Nash publishes, and its advice for these marches: sums of products in integers,
all else in float16. Such an operator runs on the march, so no tensor is transferred to the host for it. Its values are not covered by the
integer contract: PyTorch and ONNX compute it in float32 here.
"""

_NAMES = """
abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil cos cosh erf exp floor log maximum minimum
neg negative reciprocal rsqrt sigmoid sign sin sinh sqrt tan tanh pow add sub subtract rsub mul multiply div divide true_divide truediv
remainder fmod eq ne lt le gt ge greater greater_equal less less_equal logical_and logical_or logical_not zeros_like ones_like full_like
relu relu6 hardtanh hardsigmoid elu gelu leaky_relu prelu silu softplus softmax log_softmax clamp clip clamp_min clamp_max
batch_norm batch_norm1d batch_norm2d batch_norm3d layer_norm instance_norm instance_norm1d instance_norm2d instance_norm3d normalize norm
scale_channels avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d interpolate
upsample grid_sample affine_grid pad pixel_shuffle pixel_unshuffle all argmax argmin max min amax amin mean sum cumsum topk sort argsort
cat concat concatenate stack split chunk unbind reshape view flatten squeeze unsqueeze permute transpose t expand expand_as repeat tile flip
roll gather index_select getitem setitem slice_scatter scatter scatter_add scatter_reduce masked_fill where tril triu dropout identity
embedding contiguous clone detach to float
"""
FLOAT16 = frozenset(_NAMES.split())

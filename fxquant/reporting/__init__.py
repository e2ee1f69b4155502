"""Show a model, or two of its forms: how far tensors are apart, why, what to do about it; pages.

`verify` compares the bits of two forms, `compare` their statistics. It pairs tensors by provenance: the names that were fused,
and the exponents that `equalize` chose. It keeps a `statistics.TensorStatistics` of each tensor, whose size does not depend on the batches.
`advice` is a table of rules, a function each, that state cause, cure and the error that the cure would leave. `effects.Effects`
measures what that error does to the outputs, so that rules need no thresholds. A page is data as JSON and one file of HTML.
"""

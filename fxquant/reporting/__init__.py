"""Reports on a model, or on the differences of two forms of it, with causes and advice, as text and as HTML.

`verify` compares the bits of two forms, `compare` their statistics. It pairs tensors by provenance: the names that were fused,
and the exponents that `equalize` chose. It keeps a `statistics.TensorStatistics` of each tensor, whose size does not depend on the batches.
`advice` is a table of rules, a function each, that state cause, cure and the error after the cure. `effects.Effects`
measures the effect of an error on the outputs, so that rules need no thresholds. A page is one HTML file with its data as JSON.
"""

"""Rewrite operators that break a limit of the target into equivalent operators within the limit.

A remedy is a function of a `Rewriting`, registered for operators and measures of limits. The pass `adapt.apply` asks for it.

A target's limits are rows of data: an operator, a measure (`analysis.measures`), the values allowed, and what the user can do.
`analysis.explain` compares one operator with them, and `check` reports the result. A remedy builds operators as a composite's `expand`
does; each of these is compared with the limits again. An operator that still breaks one runs on the host. The pass runs
after `specs.annotate`, since limits are about fused operators of known dtype; `adapt.keep_islands` then leaves more to the host.
"""

from fxquant.remedies import convolution, elementwise, pooling
from fxquant.remedies.rewriting import REMEDIES, Rewriting

__all__ = ["REMEDIES", "Rewriting", "convolution", "elementwise", "pooling"]

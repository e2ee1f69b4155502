"""Shared by the operator files: the record, its traits, call forms, type promotion, weighted sums, composites and user operators.

A record's `demand` is the grid that its result asks for: `Own()` a grid of its own, `Own("int16")` one of that dtype, `Same()` that
of its operands, `Fixed(scale, dtype)` a given one. `otherwise=` is for targets without that dtype. `headroom=` is how far the grid
reaches beyond the calibrated range: inner tensors of norms, softmaxes and quotients take twice that range, since one saturated
statistic spoils a whole sample. `specs.annotate` reads the demand for the dtype, `scales.share` for what is on one scale, and
`quantizers.insert` for how the scale is found. `dtypes` is what an operator prefers of its operands; that preference is passed on
up to the next operator with weights, and a rule of the qconfig overrides it.

A composite has no `lower` but `expand(build, **arguments)`: it calls other operators, with demands on inner tensors, which can be
tied to one grid (the state of a recurrence). `composite.expand` runs after `rules.match`, since rules name what the user wrote, and
before the fusions, which see the parts. If one part cannot be integer on the target, the composite stays whole and in float.
Its float function is the one reference, and a test compares the parts with it.

A layer that is quantized at run time (`Trait.DYNAMIC`) is float to all passes, and nothing fuses with it. It has a weight
quantizer and no other, and lowers to one primitive of the kind "dynamic", which has its integers inside.
"""

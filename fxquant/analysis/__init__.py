"""Facts about models: reasons for integer or float, limits of targets, and graphs as text.

`layers` gathers the facts of a node, its quantizer and its cost once, at any stage; `explain`, `check`, `inspect` and the logged summary
read the result. `recording` alone reads the values of tensors: a `Form` runs a batch, and `verify`, `compare` and `record`
read what it returns.

`layers.segments` assigns every operator to the first segment of its device after its operands; the primitives of one operator stay
together.
"""

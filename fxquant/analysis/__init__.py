"""Facts about models: why a node is integer, what a target allows, and graphs as text.

`layers` gathers the facts of a node, its quantizer and its cost once, at any stage; `explain`, `check`, `inspect` and the logged summary
read the result. `recording` alone reads the values of tensors: a `Form` runs a batch, and `verify`, `compare` and `record`
read what it returns.

`partition` puts every operator into the first segment of its device after everything it reads; what an operator was lowered to stays
together.
"""

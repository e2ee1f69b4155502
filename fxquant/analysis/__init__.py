"""Facts about models: why a node is integer, what a target allows, where two forms differ, and graphs as text.

`layers` gathers the facts of a node, its quantizer and its cost once, at any stage; `explain`, `check`, `inspect` and the logged summary
read the result. `recording` alone reads the values of tensors, whatever form the model has; `verify` and the benchmarks compare what
it returns.

`partition` puts every operator into the first segment of its device after everything it reads; what an operator was lowered to stays
together. Exposing inner values can keep a runtime from fusing, so `verify` compares the outputs of the unchanged file, too. Where float
operators run between integer segments, each segment of a file is fed from PyTorch. What the float operators flip when the file
runs alone is counted separately.
"""

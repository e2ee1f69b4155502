"""Try every call form of every operator that a user may bring: `python -m benchmarks.operators`.

The spellings are data, a line for each operator, in the files of `rows`. Each becomes a model of its own, which is compiled on
live random input and held to the contract.
"""

"""Represent models: FX graphs with facts and annotations, generated code, copies, and the user's class behind a graph.

`graph` defines every key of `node.meta`; the other modules read and write them through it.
"""

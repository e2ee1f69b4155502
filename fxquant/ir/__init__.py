"""Represent models: FX graphs with facts and annotations, generated code, copies, and the class and attributes of the float model.

`graph` and `integer` define every key of `node.meta`: of all nodes and parts of composites, and of integer graphs. Other modules read
and write the keys through them.
"""

"""Record on each result node the kernel that may compute it, and the primitives that it covers; the graph is not changed.

    %y_convolution = convolution(%x, …)
    %y = requantize_real(%y_convolution, …)     →     %y is computed by the kernel "sum of products", with %y_convolution

The kernels that are used are chosen on the machine that runs the model: see `fxquant.kernels.runner`.
"""

from __future__ import annotations

from torch import fx

from fxquant.ir.integer import set_kernel
from fxquant.pipeline import Context


def fuse(gm: fx.GraphModule, context: Context) -> int:
    """Write the kernel and the other nodes that it computes on every node that a kernel matches."""
    changes = 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        for kernel in context.kernels:
            match = kernel.match(node)
            if match is not None and not isinstance(match, str):
                covers, results = (tuple(each.name for each in nodes) for nodes in (match.covers, match.results))
                set_kernel(node, kernel.name, covers, results)
                context.say(f"%{node.name}: {kernel.name} of {', '.join(covers)}")
                changes += 1
                break
    return changes

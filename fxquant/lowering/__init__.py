"""Turn an operator into integer primitives: once for training, as values (`eager`), and once for deployment, as a graph (`passes.integer`).

`lowering` is the protocol of both. Two more lowerings read `lower` for other ends: `tuning.walk.RealLowering` leaves accumulators
unrounded, so that roundings can be learned, and `prepared.copied` copies float elements by primitives that only move.
An `Epilogue` states how an accumulator is requantized: its scale, its bounds, and the quantizer of the result.

An operator's `lower` does not handle zero points: it computes with centred integers q - zero_point, where 0 is 0.0. Padding
stays 0, and only bounds differ. Integers are stored as q. `GraphLowering.call` converts between the two: a primitive that
computes reads its operand through `centre`, and one that moves or compares takes q. A requantization adds the zero point.

Float kernels are exact on integers while every partial sum stays below 2^24, which `prove` shows per channel from the actual weights.
Beyond that a matrix product is formed in float64, and a convolution from parts of the bits of operand and weight. An int16
operand whose sum would exceed the accumulator gives up bits, and `explain` reports it; any other is refused. The proof is about the
sizes and dtypes of the example, at any batch size, so every form of a model checks its inputs (`frontend.inputs`). A loaded graph is
proved again from its constants (`primitives.proof`).
"""

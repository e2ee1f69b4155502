"""Run an integer graph fast: kernels, each proved equal to the primitives it stands for, on the machine it runs on.

A `kernel.Kernel` is a pattern of primitives (`patterns`), which are its reference, and implementations, the fastest first. The pass
`passes.integer.find_kernels` notes on a node which kernel computes it. The graph still consists of primitives, which files, exports,
`record` and `proof` read. Patterns are equal on every machine; the machine decides which implementation runs.

A `runner.Runner` is called by the `forward` of an integer model, unless that was converted or loaded with `kernels="reference"`. The
first call with inputs of some sizes and strides runs the primitives and notes the layout of every tensor. The second makes a
`program.Program`, which later calls run. In a program 8-bit tensors are bytes, channels last: byte b is the centred integer b - zero.
The zero is 0 where no integer is negative, 128 for other int8 tensors, and the zero point for uint8. Padding is bytes of `zero`, whose
part of a sum is in the bias. A chain of elementwise primitives is computed in one pass by steps on registers, and reads and writes
tensors of any dtype and strides. So are a recurrence, all of whose steps are one program, and a norm or a softmax, which is a program on
rows between tensors of bytes. A tensor that a primitive or the host reads is
written with the strides that the primitives gave it. Tensors that do not live at once share memory; each thread has its own. A changed
constant, graph or copy gets new programs.

An implementation is admitted (`admission`) by conditions on constants and proved bounds, and then by a comparison with the
primitives on this machine: on operands of the whole range; for a requantization on both sides of every step, for each channel,
which is a proof, since both functions are monotonic; for a table on every byte or pair of bytes. A backend may keep the
digests of proofs (`runner.PROOFS`), so that no later process makes them again. If one is not applicable or disagrees,
the next is tried, and the primitives at last; `explain` gives the reason. One that computed other bits is also logged and reported.
"""

"""The prepared model: the module of one operator, the stages of a graph, channel labels, hooks, and batches.

The user's modules stay in the tree of a prepared model, with their parameters and without their computation; parameters keep their names.
An operator obeys the `training` flag of the module of its call, and of its batch norm. Hooks on modules run from a
record of what each call read and returned in the trace (`hooks`); a hook on a tensor inside a fused operator cannot be registered.
`stage` holds the rules of each stage. `channels` finds the powers of two that `equalize` may multiply channels by. `through_time` trains
loops with all steps at once.

`torch.compile` leaves these operators to eager mode: a compiler that contracts or reorders float operations would first have to be
proved exact. A forward that activation checkpointing runs again starts from the buffers of the first run (`ir.model.run_pass`).
"""

"""The integer model as a C99 program that needs nothing else.

`export_c` walks the integer graph at one batch size, so that every size is a number. Each primitive has a form, which names the calls that
compute it, and C functions in the folder functions, which are instantiated for the element types that occur. They are a second
implementation of every primitive, on integers, written from ARITHMETIC.md and not from PyTorch's kernels. Tensors of one C type share
an array, whose places are reused once nothing reads them; a reshape is not a call.
"""

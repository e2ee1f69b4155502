"""Compute scales, integer grids, multipliers and shifts, with float32 and rational arithmetic that is the same on every device.

A `grids.Grid` is one value: the type of a tensor's integers, their scale and their zero point. Whatever quantizes, clamps or proves
asks it.
"""

"""Compute scales, integer grids, multipliers and shifts, with float32 and rational arithmetic that is the same on every device."""

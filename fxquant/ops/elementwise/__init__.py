"""Operators that compute each element by itself: arithmetic, comparisons, activations and lookup tables, choices, losses."""

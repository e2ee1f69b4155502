"""Reductions and scans along dimensions: extrema, moments, norms, cumulative sums and products, distances."""

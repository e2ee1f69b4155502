"""Recurrent layers and cells, unrolled over time."""

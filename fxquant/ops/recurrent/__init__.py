"""Recurrent layers and cells, as loops over time."""

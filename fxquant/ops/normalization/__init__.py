"""Normalizations that are not folded: batch norm by channel, and layer norm."""

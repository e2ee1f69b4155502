"""Pooling over windows, and its inverse."""

"""Damaged files: an error each time, and nothing else."""

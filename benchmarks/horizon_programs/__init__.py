"""Programs written for Horizon's plugin, run without edits, and the expected outcome of each program."""

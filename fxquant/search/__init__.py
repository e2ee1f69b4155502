"""Searches over whole configurations: sensitivity, mixed precision, observers, and `tune`. They prepare and calibrate models themselves."""

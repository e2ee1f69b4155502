"""Operators that move elements and compute nothing: views, concatenation, padding, sliding windows, pixel shuffles."""

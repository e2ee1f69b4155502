"""Operators with a weight: convolutions, linear layers, contractions, and their forms with computed weights."""

"""Attention, softmax and masks: composites."""

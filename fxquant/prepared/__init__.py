"""The prepared model: the module that stands for one operator, its stages, channel labels, hooks, and what is copied in."""

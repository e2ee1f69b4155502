"""The prepared model: the module of one operator, its stages, channel labels, hooks, and what is copied in."""

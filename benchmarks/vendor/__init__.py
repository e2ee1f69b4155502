"""The vendor's compiler and simulator, as an external peer: how it is installed."""

"""Reports on a model and on two of its forms: how far tensors are apart, why, and what to do about it; pages and pictures."""

"""What is shown of a model and of two of its forms: how far tensors are apart, why, what to do about it; pages and pictures."""

"""How tensors are quantized: what is asked for, how scales are found and learned, and the operators of a prepared model."""

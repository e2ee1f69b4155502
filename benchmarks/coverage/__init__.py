"""What the documents of Horizon's plugin and of PyTorch's quantization describe, each capability tried: works, part, absent."""

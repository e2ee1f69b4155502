"""Try each capability in the documents of Horizon's plugin and of PyTorch's quantization: works, part, absent."""

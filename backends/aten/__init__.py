"""PyTorch's own files: programs of plain ATen operators, which load where there is no fxquant."""

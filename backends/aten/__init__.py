"""PyTorch's own file formats: programs of plain ATen operators, which load without fxquant."""

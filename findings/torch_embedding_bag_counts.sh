#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: nn.EmbeddingBag(scale_grad_by_freq=True) divides the gradient of a row by how often another row occurs.
#
# The indices are 3 3 1 2 3 0 3 5 1 3: row 3 occurs five times, row 1 twice, rows 0, 2 and 5 once. Each row's gradient of a sum is its
# number of occurrences, divided by that number: 1. nn.Embedding returns 1 for these rows. EmbeddingBag returned
#     [1.0, 1.0, 0.5, 5.0, 0.0, 0.2, 0.0, 0.0, 0.0]
# A model that trains such a bag trains rare rows by up to the count of a frequent one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PROGRAM'
import torch

indices = torch.tensor([[3, 3, 1, 2, 3], [0, 3, 5, 1, 3]])
gradients = {}
for layer in (torch.nn.Embedding(9, 4, scale_grad_by_freq=True), torch.nn.EmbeddingBag(9, 4, scale_grad_by_freq=True, mode="sum")):
    layer(indices).sum().backward()
    gradients[type(layer).__name__] = [round(value, 6) for value in layer.weight.grad[:, 0].tolist()]
print(torch.__version__, gradients)
assert gradients["Embedding"] == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
assert gradients["EmbeddingBag"] == [1.0, 1.0, 0.5, 5.0, 0.0, 0.2, 0.0, 0.0, 0.0], "the finding no longer holds"
PROGRAM

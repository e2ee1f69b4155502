#!/usr/bin/env bash
# PyTorch 2.13.0: torch.export exports a model that rounds a size that varies (math.floor, math.ceil, round), its program computes the right
# shapes, and torch.export.save refuses the program: "Failed serializing node floor in graph". With int() in place of math.floor the export
# itself fails, as a violated constraint. Integer arithmetic (size * 3 // 2) is exported and saved.
#
# Seen: "SerializeError" for the three roundings, "UserError" for int(), and a saved program for //. Whoever writes programs with dynamic
# shapes to files computes sizes with integers alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" -W ignore - <<'PROGRAM'
import io
import math

import torch
from torch.export import Dim, export, save


class Longer(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return torch.nn.functional.interpolate(x, size=self.size(x.shape[2]))


ROUNDED = {
    "floor": (lambda n: math.floor(n * 1.5), "SerializeError"), "ceil": (lambda n: math.ceil(n * 1.5), "SerializeError"),
    "round": (lambda n: round(n * 1.5), "SerializeError"), "int": (lambda n: int(n * 1.5), "UserError"), "//": (lambda n: n * 3 // 2, "saved"),
}
for name, (size, expected) in ROUNDED.items():
    outcome = "saved"
    try:
        program = export(Longer(size), (torch.randn(1, 2, 8),), dynamic_shapes=({2: Dim("n", min=4, max=64)},))
        assert program.module()(torch.randn(1, 2, 12)).shape == (1, 2, 18)
        save(program, io.BytesIO())
    except Exception as error:
        outcome = type(error).__name__
    print(torch.__version__, name, outcome)
    assert outcome == expected, "the finding no longer holds"
PROGRAM

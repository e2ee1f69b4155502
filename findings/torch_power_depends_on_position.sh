#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: x ** 0.7 of a float32 tensor gives an element other bits than the same number has elsewhere in the tensor.
#
# Whole vectors of elements are raised to float32(0.7); elements after the last whole vector are raised to the binary64 0.7. With 255
# numbers from 0.5 to 6.85 on a processor with AVX2 the elements 241, 243, 244, 246 and 254 differed from the power by float32(0.7), and
# 36 of the 255 numbers had another power alone than in the tensor. A quantizer that makes a table of such a function chooses one
# exponent; the table then differs from the float function in the other elements.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy
import torch

exponent = float(numpy.float32(0.7))
x = torch.linspace(0.5, 6.85, 255)
at = ((x**0.7) != (x**exponent)).nonzero().flatten().tolist()
print(torch.__version__, "elements of 255 that differ:", at)
assert at and min(at) >= 224, "the finding no longer holds"  # only elements after the last whole vector
alone = torch.stack([(x[place : place + 1] ** 0.7)[0] for place in range(255)])
moved = int((alone != x**0.7).sum())
print("elements whose power alone has other bits than in the tensor:", moved)
assert moved > 0, "the finding no longer holds"
PROGRAM

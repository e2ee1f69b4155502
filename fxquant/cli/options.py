"""Add to the parser of a command what it shares with others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FILE = "a model that fxq.save wrote (.fxq), or a file that fxq.export_onnx wrote (.onnx)"
DATA = ".npz, .npy, .safetensors or .pt, or a folder of .npy; arrays by the names of the inputs with the batch as dimension 0"


def command(commands: Any, name: str, purpose: str, more: str) -> argparse.ArgumentParser:
    """Return the parser of a new command; `more` is below its purpose in its own help."""
    described = f"{purpose[0].upper()}{purpose[1:]}.\n{more}"
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=described, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add --data, which may be left out, and --batch-size."""
    parser.add_argument("--data", type=path, metavar="FILE", help=f"inputs: {DATA} (default: random ones)")
    add_rows(parser)


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add --batch-size: how many samples of the data run at a time."""
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="rows run at a time (default: 32)")


def add_form(parser: argparse.ArgumentParser) -> None:
    """Add the options of an ONNX file: --style and --opset."""
    parser.add_argument("--style", choices=("auto", "exact", "fast", "qdq"), default="auto", help="form of the ONNX file (default: auto)")
    parser.add_argument("--opset", type=positive, metavar="N", help="opset of the ONNX file (default: the style's usual one)")


def path(text: str) -> Path:
    """Return the path in an option; shells leave the ~ in --data=~/images.npy as it is."""
    return Path(text).expanduser()


def positive(text: str) -> int:
    """Return the positive integer in an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def shape(text: str) -> tuple[int, ...]:
    """Return the sizes in an option, like 1,3,224,224."""
    return tuple(positive(size) for size in text.split(","))

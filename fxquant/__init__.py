"""fxquant: an FX graph-mode quantization compiler for PyTorch whose numbers are exact."""

from pathlib import Path

# In a checkout, passes/ and backends/ stand beside this folder; in a wheel they are inside it.
if (_root := Path(__file__).resolve().parents[1]).joinpath("pyproject.toml").is_file():
    __path__.append(str(_root))

"""The file itself: a zip archive of a graph as JSON and its tensors as safetensors, the same bytes for the same content."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

from fxquant.serialization.values import Malformed

GRAPH, TENSORS = "graph.json", "tensors.safetensors"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time an archive can name
_REGULAR_FILE = 0o100644 << 16


def pack(document: Mapping[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Return the bytes of a file: they depend on nothing but the content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in ((GRAPH, as_text(document).encode("ascii")), (TENSORS, safetensors.torch.save(tensors))):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system, entry.external_attr = 3, _REGULAR_FILE
            archive.writestr(entry, content)
    return buffer.getvalue()


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the document and the tensors of a file. Nothing larger than the file itself is allocated for it.

    Raises Malformed, or what the readers of zip, JSON and safetensors raise.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if [entry.filename for entry in entries] != [GRAPH, TENSORS]:
            raise Malformed(f"it does not hold {GRAPH} and {TENSORS}, and nothing else")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.file_size > len(content):
                raise Malformed(f"{entry.filename} is not stored as it is")
        graph, packed = (archive.read(entry) for entry in entries)
    document = json.loads(graph.decode("ascii"), parse_constant=_refuse_constant)
    if not isinstance(document, dict):
        raise Malformed(f"{GRAPH} is not an object")
    return document, {name: tensor.clone() for name, tensor in safetensors.torch.load(packed).items()}


def as_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON, with every item of its lists and objects on a line of its own."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_section(value)}" for key, value in document.items()) + "\n}\n"


def _section(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(_line(item) for item in value) + "\n]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_line(item)}" for key, item in value.items()) + "\n}"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _refuse_constant(name: str) -> None:
    raise Malformed(f"{name} is not a JSON number")

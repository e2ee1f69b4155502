"""Damage to files: bytes, archives, JSON documents and ONNX models, one seeded change after the other."""

import copy
import io
import json
import random
import zipfile
from typing import Any

import onnx
import torch
from torch import Tensor

from fxquant.serialization import GRAPH, TENSORS, pack, unpack

JUNK: list[Any] = [
    None, True, -1, 0, 7, 10**6, 2**62, 2**80, 1e308, "", "x", "weight", "__class__", "os.system",
    "x = __import__('os')", "0\"]", [], {}, [[]],
    {"node": "output"}, {"node": 3}, {"tuple": 1}, {"tuple": []}, {"dict": [[[], 1]]}, {"batch": [1, 0, 1, 1]},
    {"tensor": ["float32", [2**62] * 9]},
    {"constant": "ellipsis"}, {"observer": ["os", {}]}, {"slice": [1]}, {"float": "1"}, {"QConfig": {}}, {"device": "no"}, {"unknown": 0},
]  # fmt: skip


def deep(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def mutate(document: Any, chance: random.Random) -> None:
    """Change one place of a JSON document, whatever it is."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            places.append((holder, key))
            if isinstance(value, dict | list):
                waiting.append(value)
    holder, key = chance.choice(places)
    kind = chance.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, name = chance.choice(places)
        holder[key] = copy.deepcopy(other[name]) if name in other or (isinstance(other, list) and name < len(other)) else None
    elif kind == 2 and isinstance(holder, dict):
        holder[chance.choice(["x", "class", "forward", "__init__", "a b", "node"])] = holder.pop(key)
    elif kind == 3 and isinstance(holder[key], int):
        holder[key] = holder[key] + chance.choice([-1, 1, 1000, 2**40])
    elif kind == 4 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[key] = copy.deepcopy(chance.choice([*JUNK, deep(40), deep(300)]))


def mutate_tensors(tensors: dict[str, Tensor], chance: random.Random) -> None:
    """Change one tensor: its name, dtype or shape."""
    name = chance.choice(list(tensors))
    kind = chance.randrange(4)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name + "_"] = tensors.pop(name)
    elif kind == 2:
        tensors[name] = tensors[name].to(chance.choice([torch.float64, torch.int32, torch.bool]))
    else:
        tensors[name] = tensors[name].flatten()[:1].reshape(chance.choice([(), (1,), (1, 1, 1)]))


def flip(content: bytes, chance: random.Random) -> bytes:
    """Bytes with some bits changed."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return a damaged file: cut at an end, with other bits, mostly in its header, or with a piece moved elsewhere."""
    kind = chance.randrange(4)
    if kind == 0:
        return content[: chance.randrange(len(content))]
    if kind == 1:
        return flip(content, chance)
    if kind == 2:
        head = min(len(content), 256)
        return flip(content[:head], chance) + content[head:]
    start, stop = sorted(chance.randrange(len(content)) for _ in range(2))
    place = chance.randrange(len(content))
    return content[:place] + content[start:stop] + content[place:]


def repacked(graph: bytes, tensors: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(GRAPH, graph)
        archive.writestr(TENSORS, tensors)
    return buffer.getvalue()


def mutated_archive(content: bytes, chance: random.Random) -> bytes:
    """A saved model with damage: its bytes, its archive, its graph or its tensors."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = archive.read(GRAPH), archive.read(TENSORS)
    kind = chance.randrange(10)
    if kind == 0:
        return content[: chance.randrange(len(content))]
    if kind <= 2:
        end = chance.random() < 0.5  # the zip's own directory
        return content[:-300] + flip(content[-300:], chance) if end else flip(content, chance)
    if kind == 3:
        return repacked(flip(parts[0], chance), parts[1])
    if kind == 4:
        head = 8 + int.from_bytes(parts[1][:8], "little")
        return repacked(parts[0], flip(parts[1][:head], chance) + parts[1][head:])
    document, tensors = unpack(content)
    if kind == 5:
        mutate_tensors(tensors, chance)
    else:
        for _ in range(chance.choice([1, 1, 1, 3])):
            mutate(document, chance)
    return pack(document, tensors)


def mutated_text(content: bytes, chance: random.Random) -> bytes:
    """Return a damaged JSON file: with other bytes, or with other values."""
    kind = chance.randrange(5)
    if kind == 0:
        return content[: chance.randrange(len(content))]
    if kind == 1:
        return flip(content, chance)
    document = json.loads(content)
    for _ in range(chance.choice([1, 1, 1, 3])):
        mutate(document, chance)
    return json.dumps(document).encode()


# ---- ONNX -----------------------------------------------------------------------------------------------------------


def mutated_onnx(content: bytes, chance: random.Random) -> bytes:
    """An ONNX file with damage: its bytes, its metadata, a node, a tensor or a type."""
    kind = chance.randrange(8)
    if kind == 0:
        return content[: chance.randrange(len(content))]
    if kind == 1:
        return flip(content, chance)
    model = onnx.load_from_string(content)
    if kind in (2, 3):
        entry = chance.choice(model.metadata_props)
        try:
            document = {"value": json.loads(entry.value)}
            mutate(document, chance)
            entry.value = json.dumps(document.get("value"))
        except (ValueError, TypeError):
            entry.value = flip(entry.value.encode() or b"0", chance).decode("latin1")
    elif kind in (4, 5):
        graph = chance.choice([model.graph, *model.functions])
        _mutate_node(graph, chance)
    elif kind == 6:
        _mutate_initializer(chance.choice(model.graph.initializer), chance)
    else:
        _mutate_type(chance.choice([*model.graph.input, *model.graph.output, *model.graph.value_info]), chance)
    return model.SerializeToString()


def _mutate_node(graph: Any, chance: random.Random) -> None:
    nodes = graph.node
    node, other = chance.choice(nodes), chance.choice(nodes)
    kind = chance.randrange(6)
    if kind == 0:
        nodes.remove(node)
    elif kind == 1:
        node.op_type = chance.choice([other.op_type, "Unknown", "Loop", "RandomNormal", ""])
    elif kind == 2 and node.input:
        node.input[chance.randrange(len(node.input))] = chance.choice([*other.output, "missing", ""])
    elif kind == 3 and node.attribute:
        attribute = chance.choice(node.attribute)
        attribute.i = chance.choice([-1, 0, 2**31, 2**62])
        for index in range(len(attribute.ints)):
            attribute.ints[index] = chance.choice([-1, 0, 1, 7, 2**40])
    elif kind == 4:
        node.output[0] = chance.choice([*other.output, "x", ""])
    else:
        nodes.append(other)


def _mutate_initializer(tensor: onnx.TensorProto, chance: random.Random) -> None:
    kind = chance.randrange(4)
    if kind == 0:
        tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data) + 1)]
    elif kind == 1 and tensor.dims:
        tensor.dims[chance.randrange(len(tensor.dims))] = chance.choice([0, 1, 7, 2**31, 2**62, -1])
    elif kind == 2:
        tensor.data_type = chance.choice([0, 1, 2, 3, 7, 8, 10, 99])
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", chance.choice(["../../etc/passwd", "/etc/passwd", "missing", ""])


def _mutate_type(info: onnx.ValueInfoProto, chance: random.Random) -> None:
    kind = info.type.tensor_type
    if chance.random() < 0.5 or not kind.shape.dim:
        kind.elem_type = chance.choice([0, 1, 3, 7, 8, 99])
    else:
        chance.choice(kind.shape.dim).dim_value = chance.choice([0, 1, 3, 2**31, 2**62])

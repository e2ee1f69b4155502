"""The manifest of a conformance kit, and validated reading of a kit's files."""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fxquant.errors import ConfigurationError, ExportError

MANIFEST, EXPECTED = "manifest.json", "expected.npz"
BOARD, MODELS = "board", "models"  # folders: the part for the board, and the prepared models
SIMULATED = "simulated"  # and the vendor simulator's results, once it was run
INPUTS, PROGRAMS, SCRIPT = "inputs.npz", "programs.json", "run.py"  # in the board's folder
FORMAT = 3
BPU, PROCESSOR, FLOAT = "BPU", "processor", "float"  # where a probe runs
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """An operator in a program, as one of its outputs."""

    operator: str
    place: str  # BPU; PROCESSOR if the compiler leaves one of its nodes there; FLOAT if fxquant does; only the first is compared
    note: str = ""  # the nodes on the processor


@dataclass(frozen=True)
class ProbeProgram:
    """A compiled program; each of its outputs is one operator."""

    name: str  # of its files: board/NAME.bin, models/NAME.fxq
    dtype: str
    scales: str  # the kind of its scales: one of `kit.SCALES`
    input: str
    outputs: tuple[str, ...]  # their names in the program, one for each of `cases`
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Refusal:
    """An operator without a program, because it could not be exported or compiled."""

    operator: str
    dtype: str
    scales: str
    because: str


@dataclass(frozen=True)
class Kit:
    """A kit in a folder.

    identity  the kit that results must belong to: a digest of its target, programs, cases, refusals and files
    """

    folder: Path
    target: str
    programs: tuple[ProbeProgram, ...]
    refusals: tuple[Refusal, ...]
    files: Mapping[str, str]  # the SHA-256 of each file, by its path in the folder

    @property
    def identity(self) -> str:
        return digest(json.dumps(self._content(), sort_keys=True).encode())[:16]

    def _content(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def as_json(self) -> str:
        """Return the manifest's text."""
        return json.dumps({"format": FORMAT, "kit": self.identity, **self._content()}, indent=1, ensure_ascii=False) + "\n"

    def file(self, name: str) -> Path:
        """Return the path of a file of the kit. Raises ExportError if it is missing, or is not the one that was written."""
        path = self.folder / name
        try:
            changed = digest(path.read_bytes()) != self.files[name]
            because = "its content is not what the manifest says" if changed else ""
        except (OSError, KeyError) as error:
            because = f"it cannot be read: {error}"
        if because:
            raise ExportError(f"{path} is damaged", because=because, remedy="copy the kit again, or write it again")
        return path


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def packed(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as the content of a .npz file; equal arrays give equal bytes."""
    archive = io.BytesIO()
    np.savez_compressed(archive, **dict(arrays))  # type: ignore[arg-type]
    return archive.getvalue()


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays in a .npz file, by name. Raises ExportError if the file has another format, or is truncated."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # numpy and zipfile raise errors of many classes for a damaged file
        because = str(error).partition("\n")[0] or "it is truncated"
        remedy = "copy it again, or run the kit again"
        raise ExportError(f"{path} holds no arrays that can be read", because=because, remedy=remedy) from error


def read_kit(folder: Path) -> Kit:
    """Return the kit in a folder. Raises ConfigurationError if there is none, ExportError for one of another version or a damaged one."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        because = f"{MANIFEST} cannot be read: {error.strerror}"
        remedy = "pass what fxq.board.conformance_kit returns"
        raise ConfigurationError(f"{folder} is not a conformance kit", because=because, remedy=remedy) from error
    try:
        about = json.loads(text)
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']}, and this fxquant reads {FORMAT}")
        programs = tuple(
            ProbeProgram(**{**each, "outputs": tuple(each["outputs"]), "cases": tuple(Case(**case) for case in each["cases"])})
            for each in about["programs"]
        )
        kit = Kit(folder, about["target"], programs, tuple(Refusal(**each) for each in about["refusals"]), about["files"])
        if kit.identity != about["kit"]:
            raise ValueError("its target, programs, cases or files were changed after it was written")
    except Exception as error:  # whatever a manifest says that is not one
        raise ExportError(f"{path} is damaged", because=str(error) or type(error).__name__, remedy="write the kit again") from error
    return kit

"""Install each peer toolkit whose pinned versions may clash in a separate virtual environment, with fxquant's packages after its own.

python -m benchmarks.accuracy --install NNCF Brevitas     makes them in CACHE/environments
"""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.accuracy.floats import Checkpoint, outputs_of
from benchmarks.accuracy.peers import PEERS, Peer
from benchmarks.accuracy.settings import Setting

ROOT = Path(__file__).parents[2]
LONGEST = 1800  # seconds of one row
VARIABLES = {"NNCF_EXTENSION_LOAD_TIMEOUT": "0"}  # NNCF compiles an extension first, and gives a slow machine too little time for it


def folder(peer: Peer, cache: Path) -> Path:
    return cache / "environments" / peer.environment


def python(peer: Peer, cache: Path) -> Path:
    return folder(peer, cache) / "bin" / "python"


def install(peer: Peer, cache: Path) -> None:
    """Make the peer's environment; raises CalledProcessError where pip cannot."""
    place = folder(peer, cache)
    venv.create(place, with_pip=True, clear=True)
    packages = next((place / "lib").glob("python*")) / "site-packages"
    (packages / "after.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([python(peer, cache), "-m", "pip", "install", "--quiet", *peer.requires], check=True)


def version(peer: Peer, cache: Path) -> str:
    """The version of the toolkit, or nothing if it is not installed."""
    if peer.requires:
        installed = sorted(folder(peer, cache).glob(f"lib/python*/site-packages/{peer.package}-*.dist-info"))
        return installed[0].name.removeprefix(f"{peer.package}-").removesuffix(".dist-info") if installed else ""
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def outputs(peer: Peer, checkpoint: Checkpoint, setting: Setting, mode: str, cache: Path) -> Tensor | str:
    """Return the outputs of the peer's model for the whole test, or the reason why there are none: an error of the peer is one."""
    reason = peer.refuses(setting, mode)
    if reason is not None:
        return reason
    if not version(peer, cache):
        return "not installed"
    if peer.requires:
        names = (checkpoint.task.name, checkpoint.name, str(checkpoint.seed), setting.name, mode, str(cache.resolve()))
        return apart(peer, "benchmarks.accuracy.process", names, cache)
    try:
        return outputs_of(peer.quantize(checkpoint, setting, mode), checkpoint.data.test_inputs)
    except Exception as error:  # whatever a toolkit raises is printed in its place
        return _short(f"{type(error).__name__}: {error}")


def apart(peer: Peer, module: str, names: Sequence[str], cache: Path) -> Tensor | str:
    """Run a module in the peer's environment; return the outputs that it writes, or the last line of its error."""
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) / "outputs.pt"
        command = [python(peer, cache), "-m", module, peer.name, *names, written]
        programs = os.pathsep.join((str(folder(peer, cache) / "bin"), os.environ.get("PATH", "")))  # ninja is one of them
        environment = {**os.environ, **VARIABLES, "PATH": programs}
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False, env=environment)
        if process.returncode != 0:
            return _short((process.stderr.strip().splitlines() or [f"ended with {process.returncode}"])[-1])
        return torch.load(written, weights_only=True)


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= 120 else line[:117] + "…"


def main(names: list[str], cache: Path) -> None:
    """Install the environments of these peers."""
    for name in names:
        if PEERS[name].requires:
            print(f"{name}: {folder(PEERS[name], cache)}", file=sys.stderr)
            install(PEERS[name], cache)

"""Install the vendor's compiler and simulator.   python -m benchmarks.vendor.install FOLDER [--python python3.10]

A virtual environment of 1.1 GB with hb_mapper, hbdk-cc, hbdk-sim and HB_ONNXRuntime for bernoulli2, bayes and bayes-e, from PyPI. The tool
is proprietary; nothing of it becomes a part of fxquant. It declares PyTorch with CUDA as a dependency, imports it, and needs none of it to
compile ONNX files: a module without contents takes its place, which saves 5 GB.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = ("rdkx5-yolo-mapper==1.0.0", "dgdk==1.0.0", "dg_nn_toolkit==1.0.0")
NEEDS = (
    # the versions that the tool was built against
    "numpy==1.23.0", "onnx==1.15.0", "onnxruntime==1.16.2", "protobuf==3.20.3", "opencv-python-headless==4.6.0.66", "scipy==1.13.1",
    "scikit-image==0.19.0", "setuptools<70",
    # what it imports besides
    "absl-py",
    "click", "coloredlogs", "easydict", "graphviz", "jinja2", "matplotlib", "msgpack-numpy", "multiprocess", "paramiko", "pathos",
    "pillow", "psutil", "pydot", "pyyaml", "schema", "six", "tabulate", "tqdm", "typing_extensions",
)  # fmt: skip
STAND_IN = '''\
"""Takes the place of PyTorch, which is imported here and not used: every name in it is a class that does nothing."""
import sys
import types
from importlib.machinery import ModuleSpec


class Anything(type):
    def __getattr__(cls, name):
        if name[:2] == "__":
            raise AttributeError(name)
        return anything(name)


def anything(name):
    body = {"__init__": lambda self, *_, **__: None, "__call__": lambda self, *given, **_: given[0] if given else self}
    return Anything(name, (), body)


class Package(types.ModuleType):
    __path__ = []
    __getattr__ = Anything.__getattr__


class Loader:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec):
        return Package(spec.name)

    def exec_module(self, module):
        pass


__version__ = "2.0.0"
sys.meta_path.append(Loader())
sys.modules["torch"].__class__ = Package
'''
PROGRAMS = ("hb_mapper", "hb_extract_hbm", "hbdk-disas", "hbdk-sim", "hbdk-perf")


def install(folder: Path, python: str) -> None:
    """Make the environment, and run each of its programs once. Raises SystemExit where something is missing."""
    interpreter = shutil.which(python)
    if interpreter is None:
        sys.exit(f"there is no {python}: the tool needs Python 3.10 on x86-64 Linux; name one with --python (make: PYTHON_VENDOR=…)")
    version = _said([interpreter, "-c", "import sys, platform; print(*sys.version_info[:2], platform.system(), platform.machine())"])
    if version.split() != ["3", "10", "Linux", "x86_64"]:
        sys.exit(f"{python} is {version}: the tool is built for Python 3.10 on x86-64 Linux")
    _run([interpreter, "-m", "venv", str(folder)])
    inner = folder.absolute() / "bin" / "python"
    pip = [str(inner), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", *TOOL])
    _run([*pip, *NEEDS])
    torch = Path(_said([str(inner), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])) / "torch"
    torch.mkdir(exist_ok=True)
    (torch / "__init__.py").write_text(STAND_IN, encoding="utf-8")
    check(inner.parent)
    print(f"installed; export FXQUANT_HORIZON={folder.absolute()}")


def check(programs: Path) -> None:
    """Run each program in this folder once, in a temporary folder: hb_extract_hbm writes a log to where it runs. Raises SystemExit."""
    path = {**os.environ, "PATH": os.pathsep.join((str(programs), os.environ.get("PATH", "")))}
    commands = [*([program, "--help"] for program in PROGRAMS), ["python", "-c", "from horizon_tc_ui import HB_ONNXRuntime"]]
    for program, *arguments in commands:
        with tempfile.TemporaryDirectory(prefix="fxquant-") as work:
            if subprocess.run([str(programs / program), *arguments], env=path, cwd=work, capture_output=True).returncode:
                sys.exit(f"{program} does not run; remove {programs.parent} and try again")


def _run(command: list[str]) -> None:
    if subprocess.run(command).returncode:
        sys.exit(f"{' '.join(command[:6])} … failed")


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="python3.10", help="a Python 3.10 (default: python3.10 in PATH)")
    options = parser.parse_args()
    install(options.folder, options.python)

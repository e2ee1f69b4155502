"""Installation: a wheel puts nothing but `fxquant`, with all its files, into site-packages, and requires the packages it imports."""

import ast
import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fxquant

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
INSTALLED_AS = {"fxquant": "fxquant", "passes": "fxquant.passes", "backends": "fxquant.backends"}
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "google": "protobuf"}  # where a package is not named like what brings it


def repository_files() -> list[str]:
    """Every file of the repository that git does not ignore, whether it is committed yet or not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def package_folders() -> list[str]:
    """The dotted names of the folders that hold an __init__.py."""
    folders = []
    for top, name in INSTALLED_AS.items():
        for file in (ROOT / top).rglob("__init__.py"):
            folders.append(".".join([name, *file.parent.relative_to(ROOT / top).parts]))
    return sorted(folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy, so that nothing stays in the checkout, and nothing that lies there gets in."""
    copy = tmp_path_factory.mktemp("copy")
    for name in repository_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    """Return the metadata of the wheel."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def requirements(metadata: email.message.Message, extra: str | None = None) -> dict[str, str]:
    """Return the version specifier of each distribution that pip installs along, or would for an extra."""
    groups = {}
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        wanted = re.search(r"""extra == ['"]([\w-]+)""", marker)
        if (wanted[1] if wanted else None) == extra:
            name, specifier = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?\s*(.*)", requirement.strip()).groups()  # type: ignore[union-attr]
            groups[name] = specifier
    return groups


def test_the_top_level_is_fxquant_alone(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/", 1)[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fxquant"}
    assert len(tops) == 2


def test_everything_is_inside(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"fxquant/py.typed", "fxquant/backends/bpu/ARITHMETIC.md", "fxquant/reporting/page.html"} <= names
    for top, package in INSTALLED_AS.items():
        for file in (ROOT / top).rglob("*.py"):
            assert "/".join([*package.split("."), *file.relative_to(ROOT / top).parts]) in names
    assert any(re.fullmatch(r"fxquant-.*\.dist-info/licenses/LICENSE", name) for name in names)


def test_the_listed_packages_are_the_folders() -> None:
    # A table of TOML is read by hand here: Python 3.10 has no tomllib.
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r'"([^"]+)"', listed[1])) == package_folders()


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_the_name_without_fxquant_is_refused(name: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert f"ImportError: import this package as fxquant.{name}" in result.stderr


def test_the_version_is_that_of_the_library(metadata: email.message.Message) -> None:
    assert metadata["Version"] == fxquant.__version__


def test_what_is_imported_is_required(metadata: email.message.Message) -> None:
    imported = set()
    for top in INSTALLED_AS:
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    foreign = {DISTRIBUTIONS.get(name, name) for name in imported - sys.stdlib_module_names - {"fxquant"}}
    runtimes = {"openvino", "tvm", "iree", "ai_edge_litert"}
    assert foreign - {"scikit-learn", "scipy", "plotly", "matplotlib", "pillow"} - runtimes == set(requirements(metadata))
    assert set(requirements(metadata, "demo")) == {"scikit-learn"}
    assert set(requirements(metadata, "tuning")) == {"scipy"}
    assert set(requirements(metadata, "photographs")) == {"pillow"}
    assert set(requirements(metadata, "report")) == {"plotly", "matplotlib"}


def test_the_oldest_versions_are_those_that_are_asked_for(metadata: email.message.Message) -> None:
    """Hold `make test-oldest` to the lower bound of every requirement, so that no bound is a guess."""
    asked = {
        name: bound
        for extra in (None, "demo", "report", "tuning", "dev")
        for name, bound in requirements(metadata, extra).items()
        if name != "fxquant"
    }
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    oldest = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {name: f">={version}" for name, version in oldest.items()} == asked
    assert f'requires = ["setuptools>={oldest["setuptools"]}"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_wheel_can_be_installed_and_imported_without_what_is_optional(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(tmp_path)]
    installed = subprocess.run([*command, str(wheel.filename)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
optional = ("sklearn", "scipy", "plotly", "matplotlib", "PIL", "pytest", "hypothesis")
sys.modules.update(dict.fromkeys(optional))  # as if they were not installed
import fxquant, fxquant.passes, fxquant.backends, fxquant.cli
from importlib.metadata import version
assert version("fxquant") == fxquant.__version__, version("fxquant")
missing = [name for name in fxquant.__all__ if not hasattr(fxquant, name)]
assert not missing, missing
assert callable(fxquant.prepare)
assert list(fxquant.__path__) == [{str(tmp_path / "fxquant")!r}], fxquant.__path__
for module in (fxquant, fxquant.passes, fxquant.backends, fxquant.cli):
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    result = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

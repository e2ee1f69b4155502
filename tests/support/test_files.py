"""Files appear whole or not at all: on a full disk, after a kill, from several threads; and one module writes all files."""

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxquant as fxq
from fxquant.serialization.qconfig import written
from fxquant.support import files
from fxquant.support.files import write_file, write_files
from tests.pages.test_layers import library
from tests.shared.programs import run_python

ROOT = Path(__file__).parents[2]


# ---- one module writes ---------------------------------------------------------------------------------------------------
WRITES = frozenset(("write_text", "write_bytes", "savefig", "save_file", "tofile", "to_csv", "mkstemp", "NamedTemporaryFile"))
SAVES = frozenset(("save", "save_model", "savez", "savez_compressed", "savefig", "write_html", "write_image"))
OURS = ("safetensors.torch.save", "save_model", "fxq.save")  # the first returns bytes
MEMORY = ("archive", "picture", "buffer")  # names of buffers in memory, which may be given to these
CACHE = "fxquant.backends.cpu.native"
# The compiled library in the user's cache, which no one else may read, and what is loaded, from memory or a temporary folder.
LIBRARIES = [
    "file.write_bytes(content)",
    "open(descriptor, 'wb')",
    "open(os.memfd_create(name), 'wb')",
    "tempfile.mkstemp(dir=file.parent, prefix=f'{file.name}.')",
]
PROGRAM = "fxquant.backends.horizon.compiled_program"  # what the vendor's programs read, in a temporary folder
BOARD = "fxquant.conformance.board"  # copied to boards, where there is nothing of ours but it


def calls_that_write(source: str) -> Iterator[str]:
    """The calls that may open a file for writing."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        called = ast.unparse(call.func)
        last = called.rsplit(".", 1)[-1]
        into_memory = any(isinstance(value, ast.Name) and value.id in MEMORY for value in call.args)
        modes = [*call.args[int(called == "open") :][:1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        mode = next((value.value for value in modes if isinstance(value, ast.Constant)), "" if not modes else "unknown")
        opens = last in ("open", "fdopen") and called != "os.open" and (not isinstance(mode, str) or bool(set("wxa+") & set(mode)))
        saves = last in SAVES and not (called.startswith("self.") or called in OURS)
        if opens or ((saves or last in WRITES) and not into_memory):
            yield ast.unparse(call)


@pytest.mark.nightly
def test_one_module_opens_files_for_writing() -> None:
    result = {name: list(calls_that_write(source)) for name, source in library().items()}
    others = {name: calls for name, calls in result.items() if calls and name not in (CACHE, PROGRAM, BOARD)}
    assert others == {"fxquant.support.files": ["path.open('xb')"]}
    assert sorted(result[CACHE]) == LIBRARIES
    assert all("work / " in call for call in result[PROGRAM])
    assert result[BOARD] == ["np.savez_compressed(str(partial), **arrays)"]


# ---- a full disk, and a kill ---------------------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of file sizes and forks are POSIX's")
def test_a_full_disk_is_an_error_and_a_kill_while_writing_leaves_every_file_of_before(tmp_path: Path) -> None:
    done = run_python("-m", "tests.shared.file_writers", str(tmp_path), folder=ROOT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    by_name: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(by_name) >= 22
    for name, each in by_name.items():
        assert "cannot be written\n  because  File too large; the previous file is kept\n  remedy   free space" in each["full"], name
        assert (each["full: unchanged"], each["left"], each["kill"], each["kill: unchanged"]) == (True, [], "killed", True), (name, each)
    assert [name for name, each in by_name.items() if not each["files"]] == ["distill", "sensitivity", "tune"]


# ---- the function itself -------------------------------------------------------------------------------------------------
def test_of_several_files_each_is_whole_wherever_putting_them_in_place_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = {"a": "old a", "b": "old b", "c": "old c"}, {"a": "new a", "b": "new b", "c": "new c"}
    for most in range(4):
        write_files(tmp_path, old)
        done: list[object] = []

        def replace(source: Path, place: Path, done: list[object] = done, most: int = most) -> None:
            if len(done) == most:
                raise KeyboardInterrupt
            done.append(place)
            Path(source).rename(place)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            try:
                write_files(tmp_path, new)
            except KeyboardInterrupt:
                assert most < 3
        assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [*list(new.values())[:most], *list(old.values())[most:]]


def test_a_write_removes_what_was_killed_a_day_before_and_nothing_else(tmp_path: Path) -> None:
    write = "import os, signal, sys; from fxquant.support.files import write_files; "
    write += "write_files(sys.argv[1], {{'a': 'new'}}, lambda folder: os.kill(os.getpid(), signal.SIG" + "{}))"
    for kind in ("KILL", "TERM"):
        done = subprocess.run([sys.executable, "-c", write.format(kind), str(tmp_path)], cwd=ROOT, check=False)
        assert done.returncode < 0
    left = [path for path in tmp_path.iterdir() if path.name.startswith(files.TEMPORARY)]
    assert left
    for path in left:
        os.utime(path, (0, 0))
    (tmp_path / ".fxquant-settings").mkdir()
    inside: list[bool] = []

    def check(folder: Path) -> None:  # while one writes, another one does
        write_files(tmp_path, {"b": "2"})
        inside.append((folder / "a").is_file())

    write_files(tmp_path, {"a": "1"}, check)
    assert inside == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fxquant-settings", "a", "b"]


def test_all_files_are_flushed_to_the_disk_before_the_first_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real = os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: events.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda source, place: (events.append("replace"), real(source, place)))
    write_files(tmp_path, {"a": "1", "b": b"2"})
    assert events == ["fsync", "fsync", "replace", "replace", "fsync"]


def test_nothing_is_put_in_place_if_the_check_refuses(tmp_path: Path) -> None:
    seen: list[dict[str, bytes]] = []

    def check(folder: Path) -> None:
        seen.append({path.name: path.read_bytes() for path in folder.iterdir()})
        raise fxq.errors.ExportError("no", because="of the test", remedy="none")

    with pytest.raises(fxq.errors.ExportError, match="no"):
        write_files(tmp_path / "new", {"a": "ä", "b": [b"1", memoryview(b"2")]}, check)
    assert seen == [{"a": "ä".encode(), "b": b"12"}]
    assert list((tmp_path / "new").iterdir()) == []


def test_permissions_are_kept_and_those_of_new_files_are_the_usual(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    assert write_file(tmp_path / "new", "1").stat().st_mode == (tmp_path / "usual").stat().st_mode
    (tmp_path / "usual").chmod(0o640)
    assert write_file(tmp_path / "usual", "2").stat().st_mode & 0o777 == 0o640


def test_a_link_is_replaced_and_what_it_leads_to_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("kept")
    (tmp_path / "link").symlink_to("cache")
    write_file(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert [(tmp_path / name).read_text() for name in ("cache", "link")] == ["kept", "new"]


def test_a_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(fxq.errors.ExportError, match="device or a pipe"):
        write_file("/dev/null", "text")
    assert not Path("/dev/null").is_file()


@pytest.fixture(scope="module")
def result() -> fxq.results.Result:
    torch.manual_seed(0)
    return fxq.quantize(nn.Conv2d(3, 8, 3).eval(), [torch.randn(2, 3, 8, 8)])


def test_what_a_killed_process_of_the_same_id_left_is_in_nobodys_way(result: fxq.results.Result, tmp_path: Path) -> None:
    for name in (f".m.fxq.{os.getpid()}", "m.fxq.part"):
        (tmp_path / name).write_text("left")
    assert fxq.save(result.integer, tmp_path / "m.fxq").read_bytes()[:2] == b"PK"


def test_threads_may_write_to_one_path(result: fxq.results.Result, tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                fxq.save(result.integer, tmp_path / "m.fxq")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["m.fxq"]
    assert fxq.text(fxq.load(tmp_path / "m.fxq")) == fxq.text(result.integer)


# ---- paths that cannot be used -------------------------------------------------------------------------------------------
IMAGES = torch.zeros(2, 3, 8, 8)

WRITE: Mapping[str, Callable[[fxq.results.Result, Any], object]] = {
    "save": lambda result, path: fxq.save(result.integer, path),
    "save_qconfig": lambda result, path: fxq.save_qconfig(fxq.QConfigMapping(), path),
    "export_onnx": lambda result, path: fxq.export_onnx(result.integer, path),
    "export_c": lambda result, path: fxq.export.export_c(result.integer, path),
    "export_pt2": lambda result, path: fxq.export.export_pt2(result.integer, path),
    "report": lambda result, path: fxq.report(result.integer, path),
    "checkpoint": lambda result, path: fxq.tuning.distill(
        result.prepared, [torch.randn(8, 3, 8, 8)], steps=1, options=fxq.Options(checkpoint=path)
    ),
    "export": lambda result, path: result.export(path),
}
INTO: Mapping[str, Callable[[fxq.results.Result, Any], object]] = {
    "export_segments": lambda result, path: fxq.export.export_segments(result.integer, path),
    "dump": lambda result, path: fxq.dump(result.integer, path),
    "prepare": lambda result, path: fxq.prepare(result.float, torch.randn(2, 3, 8, 8), options=fxq.Options(dump=path)),
    "convert": lambda result, path: fxq.convert(result.prepared, options=fxq.Options(dump=path)),
}
READ: Mapping[str, Callable[[fxq.results.Result, Any], object]] = {
    "load": lambda result, path: fxq.load(path),
    "load_qconfig": lambda result, path: fxq.load_qconfig(path),
    "onnx_metadata": lambda result, path: fxq.export.onnx_metadata(path),
    "verify": lambda result, path: fxq.verify(result.integer, path, [torch.randn(2, 3, 8, 8)]),
    "run_segments": lambda result, path: fxq.export.run_segments(path, torch.randn(2, 3, 8, 8)),
}


class Named(os.PathLike[str]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


ENDINGS = {"export_c": ".c"}
WITHOUT_A_PATH = ("checkpoint",)  # nothing is written


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [*WRITE, *INTO])
def test_a_path_that_nothing_can_be_written_to_is_an_error_that_says_why(name: str, result: fxq.results.Result, tmp_path: Path) -> None:
    ending = ENDINGS.get(name, "")
    (tmp_path / "file").write_text("kept")
    bad: list[Any] = [
        "", f"a\0b{ending}", f"{tmp_path}/a\0b{ending}", f"\ud800{ending}", b"bytes" + ending.encode(), 3, None if name in WRITE else 4,
        tmp_path / "file" / f"below{ending}", "/proc/none/m" + ending, tmp_path / ("long" * 100 + ending),
        tmp_path / "new" / ("long" * 100 + ending), *([tmp_path, f"{tmp_path}/new/", "."] if name in WRITE else [tmp_path / "file"]),
    ]  # fmt: skip
    for path in bad:
        if name in WITHOUT_A_PATH and path is None:
            continue
        with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
            {**WRITE, **INTO}[name](result, path)
    assert (tmp_path / "file").read_text() == "kept"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]


LONG: Mapping[str, Callable[[fxq.results.Result, Any, Any], object]] = {
    "report": lambda result, batches, path: result.report(path, batches),
    "distill": lambda result, batches, path: fxq.tuning.distill(result.prepared, batches, steps=2, options=fxq.Options(checkpoint=path)),
    "round_weights": lambda result, batches, path: fxq.tuning.round_weights(result.prepared, batches, options=fxq.Options(checkpoint=path)),
    "sensitivity": lambda result, batches, path: fxq.search.sensitivity(result.float, batches, options=fxq.Options(checkpoint=path)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_place_that_cannot_be_written_is_found_before_a_model_is_run(
    name: str, result: fxq.results.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run before the error")

    for module in (result.float, result.prepared, result.integer):
        monkeypatch.setattr(type(module), "__call__", run)
    for path in ("/proc/none/file", "/dev/null", tmp_path / ("long" * 100)):
        with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
            LONG[name](result, [IMAGES], path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["save", "export_onnx", "dump"])
def test_any_path_like_object_is_a_path(name: str, result: fxq.results.Result, tmp_path: Path) -> None:
    {**WRITE, **INTO}[name](result, Named(tmp_path / "new" / "there"))
    assert (tmp_path / "new" / "there").exists()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [*WRITE, *INTO])
def test_a_tilde_is_the_home_folder_of_what_is_written(
    name: str, result: fxq.results.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in (f"~/new/written{ENDINGS.get(name, '')}", Path(f"~/written{ENDINGS.get(name, '')}")):
        {**WRITE, **INTO}[name](result, path)
        assert (tmp_path / "home" / str(path)[2:]).exists()
    assert list((tmp_path / "here").iterdir()) == []


def test_a_tilde_is_the_home_folder_of_what_is_read(result: fxq.results.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    x = torch.randn(2, 3, 8, 8)
    fxq.save(result.integer, "~/model.fxq")
    assert torch.equal(fxq.load("~/model.fxq")(x), result.integer(x))
    fxq.save_qconfig(fxq.QConfigMapping(), "~/rules.json")
    assert not fxq.load_qconfig("~/rules.json").rules()
    fxq.export_onnx(result.integer, "~/model.onnx")
    assert fxq.export.onnx_metadata("~/model.onnx")["inputs"]
    assert fxq.verify(result.integer, "~/model.onnx", [x])
    fxq.export.export_segments(result.integer, "~/segments")
    assert torch.equal(fxq.export.run_segments("~/segments", x)[0], result.integer(x))


@pytest.mark.parametrize("name", READ)
def test_a_path_that_nothing_can_be_read_from_is_an_error_that_says_why(name: str, result: fxq.results.Result, tmp_path: Path) -> None:
    for path in ("", "a\0b", "\ud800", b"bytes", 3, tmp_path / "none", tmp_path, tmp_path / ("long" * 100)):
        with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
            READ[name](result, path)


@pytest.mark.parametrize("value", ["/dev/null", "/proc/none/here", "a" * 5000, "/dev/null/below"])
def test_a_folder_of_the_environment_that_cannot_be_used(value: str, result: fxq.results.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_DUMP", value)
    with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
        fxq.prepare(result.float, torch.randn(2, 3, 8, 8))


def test_a_working_directory_that_is_gone(result: fxq.results.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path in ("m.fxq", "sub/m.fxq"):
        with pytest.raises(fxq.FxQuantError, match=r"because[\s\S]*remedy"):
            fxq.save(result.integer, path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, written(fxq.QConfigMapping())[:-3] + ', "names": ' + "[" * 100_000, "\0", "\ud800"]
)
def test_a_qconfig_that_is_nested_too_deeply_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "q.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(fxq.errors.ExportError, match=r"is not a qconfig[\s\S]*because[\s\S]*remedy"):
        fxq.load_qconfig(tmp_path / "q.json")

"""The cache of compiled libraries: damaged files, files of others and missing folders cost time, and are never loaded."""

import errno
import hashlib
import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from fxquant.backends.cpu import native

GOOD, EVIL = b"what was compiled" * 100, b"what someone else put there"
OTHER_USER = os.geteuid() + 1
NAME = "kernels-0.library"


def with_checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    return native.folder()


class Maker:
    """Compiles, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return GOOD


def with_mode(file: Path, mode: int) -> None:
    file.write_bytes(with_checksum(EVIL))
    file.chmod(mode)


def link_out(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    elsewhere.write_bytes(with_checksum(EVIL))
    file.symlink_to(elsewhere)


def flipped(file: Path) -> None:
    held = bytearray(with_checksum(GOOD))
    held[700] ^= 1
    file.write_bytes(held)


CASES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""), "a checksum alone": lambda file: file.write_bytes(with_checksum(b"")),
    "half": lambda file: file.write_bytes(with_checksum(GOOD)[: len(GOOD) // 2]), "flipped bit": flipped,
    "without a checksum": lambda file: file.write_bytes(GOOD), "longer": lambda file: file.write_bytes(with_checksum(GOOD) + b"0"),
    "others can write": lambda file: with_mode(file, 0o666), "group can write": lambda file: with_mode(file, 0o620), "link": link_out,
    "link to nothing": lambda file: file.symlink_to("nowhere"), "pipe": os.mkfifo,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_cannot_be_trusted_is_made_again_and_replaced(case: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    CASES[case](folder / NAME)
    make = Maker()
    assert native.cached(NAME, make) == GOOD
    assert make.calls == 1
    assert len(caplog.records) == 1
    assert str(folder / NAME) in caplog.text
    assert native.cached(NAME, make) == GOOD
    assert make.calls == 1
    before = (folder / NAME).lstat()
    assert stat.S_ISREG(before.st_mode)
    assert before.st_mode & 0o077 == 0
    assert os.listdir(folder) == [NAME]
    assert not (folder.parent / "elsewhere").exists() or (folder.parent / "elsewhere").read_bytes() == with_checksum(EVIL)


def test_a_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / NAME).write_bytes(with_checksum(EVIL))
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    with pytest.raises(OSError, match="belongs to another user"):
        native.read(folder / NAME)


def no_home(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("XDG_CACHE_HOME")
    patch.delenv("HOME", raising=False)
    patch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))


FOLDERS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "others can write": (lambda folder, patch: folder.chmod(0o777), "others can write to"),
    "the group can write": (lambda folder, patch: folder.chmod(0o770), "others can write to"),
    "another user's": (lambda folder, patch: patch.setattr(os, "geteuid", lambda: OTHER_USER), "belongs to another user"),
    "no home": (no_home, "no home directory"),
    "a file": (lambda folder, patch: (folder.rmdir(), folder.write_text("in the way")), "File exists"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_without_a_folder_of_the_users_own_nothing_is_kept(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = FOLDERS[case]
    native._say_once.cache_clear()
    with monkeypatch.context() as patch:
        spoil(folder, patch)
        assert [native.cached(NAME, Maker()) for _ in range(3)] == [GOOD] * 3
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert not folder.is_dir() or not os.listdir(folder)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_nothing(
    function: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        assert native.cached(NAME, Maker()) == GOOD
    assert "No space left" in caplog.text
    assert not os.listdir(folder)


def test_several_threads_keep_one_library(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: native.cached(NAME, Maker()), range(32))) == {GOOD}
    assert os.listdir(folder) == [NAME]


def test_a_relative_folder_is_not_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert native.folder() == tmp_path / ".cache" / "fxquant"
    assert native.folder().stat().st_mode & 0o777 == 0o700


SOURCE = "long fxq_number(void) {{ return {}; }}\n"


@pytest.mark.parametrize("in_memory", [True, False])
def test_libraries_are_loaded_from_bytes_and_told_apart(in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    contents = []
    for number in (1, 2):
        source, built = tmp_path / f"{number}.c", tmp_path / f"{number}.so"
        source.write_text(SOURCE.format(number))
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
        contents.append(built.read_bytes())
    loaded = [native.load("same", content) for content in contents]
    assert [library.fxq_number() for library in loaded] == [1, 2]
    with pytest.raises(OSError, match=r"."):
        native.load("broken", b"no library")


def test_a_library_without_a_function_is_left_out(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    monkeypatch.setattr(native, "FLAGS", ("-shared", "-fPIC"))
    source.write_text(SOURCE.format(3) + "\n#if 0\nvoid fxq_absent(void);\n#endif\n")
    assert "fxq_absent" in native._loaded(source)
    source.write_text(SOURCE.format(3))
    assert native._loaded(source).fxq_number is not None
    for kept in folder.iterdir():
        kept.write_bytes(b"damaged")
    assert native._loaded(source).fxq_number is not None
    written = [kept for kept in folder.iterdir() if kept.read_bytes() != b"damaged"]  # the library of the last source
    assert len(list(map(native.read, written))) == 1

"""Conformance kits without the vendor's tool: a stand-in compiles, and returns our own integers, or planted ones."""

import io
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import fx

import fxquant as fxq
from fxquant.analysis.recording import returned
from fxquant.backends.horizon.tool import Tool
from fxquant.cli import main
from fxquant.conformance import kit as kit_module
from fxquant.conformance import manifest
from fxquant.conformance.board import integers
from fxquant.conformance.kit import SCALES, Compiled
from fxquant.conformance.manifest import Array, Kit, packed, read_arrays, read_kit
from fxquant.conformance.results import kit_images, model_of
from fxquant.conformance.rows import ROWS
from fxquant.ops.elementwise import table

pytestmark = pytest.mark.nightly

OPERATORS = ("conv 3x3", "conv 1x1", "add", "mul", "prelu", "avg pool 2x2", "bilinear x2", "conv, clamp", "exp")


def stand_in(integer: fx.GraphModule, to: Path, name: str = "model") -> Compiled:
    """Write the files of the compiler that a kit needs."""
    (input,) = (node.name for node in integer.graph.find_nodes(op="placeholder"))
    values = [helper.make_tensor_value_info(node.name, TensorProto.FLOAT, None) for node in returned(integer)]
    nodes = [helper.make_node("HzConv", [input], [value.name], domain="horizon") for value in values]
    graph = helper.make_graph(nodes, "quantized", [helper.make_tensor_value_info(input, TensorProto.FLOAT, [1, 3, 16, 16])], values)
    to.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph), str(to / f"{name}_quantized_model.onnx"))
    (to / f"{name}.bin").write_bytes(name.encode())
    return Compiled(to / f"{name}.bin", {})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_module, "compile_model", stand_in)
    monkeypatch.setattr(Tool, "find", lambda: None)


@pytest.fixture(scope="module")
def kit_of_operators(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """A kit of a few operators, on bayes-e."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kit_module, "compile_model", stand_in)
        patched.setattr(Tool, "find", lambda: None)
        folder = tmp_path_factory.mktemp("kits") / "kit"
        return read_kit(fxq.board.conformance_kit(folder, "x5", operators=OPERATORS))


@pytest.fixture
def kit(kit_of_operators: Kit, tmp_path: Path) -> Kit:
    """A copy that a test may damage."""
    shutil.copytree(kit_of_operators.folder, tmp_path / "kit")
    return read_kit(tmp_path / "kit")


Change = Callable[[dict[str, Array]], Mapping[str, Any]]


def write_results(kit: Kit, folder: Path, change: Change = lambda arrays: arrays, only: int | None = None) -> Path:
    """Write float results of a board with the expected integers; `change` changes a program's arrays, by the outputs' numbers."""
    folder.mkdir(exist_ok=True)
    expected = read_arrays(kit.file(manifest.EXPECTED))
    for program in kit.programs[:only]:
        arrays = {"kit": np.array(kit.identity), "runtime": np.array("a test")}
        for index, case in enumerate(program.cases):
            assert case.place == manifest.BPU
            name = f"{program.name}/{index}"
            arrays[str(index)] = (expected[name] * expected[f"{name}/step"]).astype(np.float32)
        named = {program.outputs[int(key)] if key.isdigit() else key: value for key, value in change(arrays).items()}
        (folder / f"{program.name}.npz").write_bytes(packed(named))
    return folder


def rows(result: fxq.results.Conformance) -> dict[str, fxq.results.ProbeResult]:
    return {row.operator: row for row in result}


def test_a_kit_holds_what_a_board_and_a_comparison_need(kit_of_operators: Kit) -> None:
    assert [program.scales for program in kit_of_operators.programs] == list(SCALES)
    assert [case.operator for case in kit_of_operators.programs[0].cases] == [name for name in OPERATORS if name != "conv, clamp"]
    assert {(refusal.operator, refusal.scales) for refusal in kit_of_operators.refusals} == {("conv, clamp", how) for how in SCALES}
    assert all("steps of" in refusal.because for refusal in kit_of_operators.refusals)
    on_board = sorted(path.name for path in (kit_of_operators.folder / manifest.BOARD).iterdir())
    wanted = ["int8-0.bin", "int8-0_quantized_model.onnx", "int8-1.bin", "int8-1_quantized_model.onnx"]
    assert on_board == sorted([*wanted, "inputs.npz", "programs.json", "run.py"])
    expected = read_arrays(kit_of_operators.file(manifest.EXPECTED))
    for program in kit_of_operators.programs:
        integer = fxq.convert(model_of(kit_of_operators, program))
        results = [integer(image) for image in kit_images(kit_of_operators)]
        for index in range(len(program.cases)):
            ours = torch.cat([result[index] for result in results]).numpy()
            assert np.array_equal(integers(ours, expected[f"{program.name}/{index}/step"]), expected[f"{program.name}/{index}"])


def test_a_board_that_computes_what_is_expected_is_equal(kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_results(kit, tmp_path / "results")
    conformance = fxq.board.check_conformance(kit.folder, folder)
    assert conformance
    assert {row.result for row in conformance if row.operator != "conv, clamp"} == {"equal"}
    assert rows(conformance)["conv, clamp"].result == "refused"
    assert rows(conformance)["conv 3x3"].elements == 2 * 5 * 12 * 16 * 16
    assert "equal: 8 equal, 1 refused; 0 of" in str(conformance)
    assert main(["conformance", str(kit.folder), "--results", str(folder)]) == 0
    assert "conv 3x3" in capsys.readouterr().out
    about = json.loads((folder / "conformance.json").read_text(encoding="utf-8"))
    assert (about["equal"], about["kit"], about["runtime"], len(about["operators"])) == (True, kit.identity, "a test", len(OPERATORS))


def test_what_differs_is_counted(kit: Kit, tmp_path: Path) -> None:

    def change(arrays: dict[str, Array]) -> dict[str, Array]:
        arrays["2"].flat[3] += 64 * np.abs(arrays["2"]).max()
        arrays["3"].flat[:3] = np.nan, np.inf, arrays["3"].flat[2] + 1e-5
        return arrays

    folder = write_results(kit, tmp_path / "results", change)
    conformance = fxq.board.check_conformance(kit.folder, folder)
    table = rows(conformance)
    assert (table["add"].result, table["add"].differing, table["add"].simulated) == ("differs", 2, False)
    assert table["add"].largest_steps >= 127
    assert table["mul"].differing == 6
    assert {row.result for row in conformance if row.operator not in ("add", "mul", "conv, clamp")} == {"equal"}
    assert main(["conformance", str(kit.folder), "--results", str(folder)]) == 1
    # What differs in the simulator, too, is a known difference.
    write_results(kit, kit.folder / manifest.SIMULATED, change)
    conformance = fxq.board.check_conformance(kit.folder, folder)
    assert [row.operator for row in conformance if row.simulated] == ["add", "mul"]
    assert "simulator gives the same integers: add, mul" in conformance.summary


def test_integers_and_shapes_with_ones_are_taken(kit: Kit, tmp_path: Path) -> None:
    expected = read_arrays(kit.file(manifest.EXPECTED))

    def change(arrays: dict[str, Array]) -> dict[str, Array]:
        return {**arrays, "0": expected["int8-0/0"].astype(np.int32)[..., None]} if SCALES[0] in scales.pop(0) else arrays

    scales = [program.scales for program in kit.programs]
    assert fxq.board.check_conformance(kit.folder, write_results(kit, tmp_path / "results", change))


def test_what_was_not_run_is_reported(kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_results(kit, tmp_path / "part", only=1)
    conformance = fxq.board.check_conformance(kit.folder, folder)
    assert not conformance
    assert {row.result for row in conformance} == {"not run", "refused"}
    assert rows(conformance)["add"].note == "int8-1: there is no int8-1.npz"
    assert main(["conformance", str(kit.folder), "--results", str(folder)]) == 1
    assert "8 not run" in capsys.readouterr().out
    failed = write_results(kit, tmp_path / "failed", lambda arrays: {"kit": arrays["kit"], "error": np.array("RuntimeError: no BPU")})
    assert rows(fxq.board.check_conformance(kit.folder, failed))["add"].note == "int8-0: RuntimeError: no BPU; int8-1: RuntimeError: no BPU"


# ---- misuse ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: {**arrays, "kit": np.array("another")}, "not a result of this kit"),
        (lambda arrays: {name: array for name, array in arrays.items() if name != "kit"}, "it says nothing of a kit"),
        (lambda arrays: {**arrays, "0": arrays["0"][:, :, 1:]}, "the output of 'conv 3x3' is float32 of shape"),
        (lambda arrays: {**arrays, "0": arrays["0"] > 0}, "is bool of shape"),
    ],
)
def test_results_that_do_not_fit_are_refused(change: Change, said: str, kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(fxq.errors.ExportError, match=said):
        fxq.board.check_conformance(kit.folder, write_results(kit, tmp_path / "results", change))


def test_no_kit_and_no_results_are_misuse(kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(fxq.errors.ConfigurationError, match="is not a conformance kit"):
        fxq.board.check_conformance(tmp_path, tmp_path)
    with pytest.raises(fxq.errors.ConfigurationError, match="holds no results"):
        fxq.board.check_conformance(kit.folder, tmp_path)
    for options in (
        ["--results", str(tmp_path)], ["--results", "x", "--dtype", "int8"],
        ["--target", "nash-e"], ["--target", "bayes-f"], ["--target", "bayes-e", "--operators", "conv 3x4"],
        ["--target", "bernoulli2", "--dtype", "int16"], ["--target", "bayes-e", "--dtype", "int4"],
    ):  # fmt: skip
        assert main(["conformance", str(kit.folder), *options]) == 2, options
        assert "remedy" in capsys.readouterr().err


def test_a_damaged_kit_is_refused(kit: Kit, tmp_path: Path) -> None:
    folder = write_results(kit, tmp_path / "results")
    text = (kit.folder / manifest.MANIFEST).read_text(encoding="utf-8")
    for damage in (text[:-20], text.replace('"format": 3', '"format": 2'), text.replace(kit.identity, "0" * 16), "[]"):
        (kit.folder / manifest.MANIFEST).write_text(damage, encoding="utf-8")
        with pytest.raises(fxq.errors.ExportError, match="is damaged"):
            fxq.board.check_conformance(kit.folder, folder)
    (kit.folder / manifest.MANIFEST).write_text(text, encoding="utf-8")
    (kit.folder / manifest.EXPECTED).write_bytes(packed({}))
    with pytest.raises(fxq.errors.ExportError, match=r"expected\.npz is damaged"):
        fxq.board.check_conformance(kit.folder, folder)
    (kit.folder / manifest.EXPECTED).unlink()
    with pytest.raises(fxq.errors.ExportError, match=r"expected\.npz is damaged"):
        fxq.board.check_conformance(kit.folder, folder)


def _encrypted(content: bytes) -> bytes:
    """The archive with the flag of encryption in every entry."""
    changed = bytearray(content)
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = changed.find(mark)
        while at >= 0:
            changed[at + place] |= 1
            at = changed.find(mark, at + 4)
    return bytes(changed)


def _of_an_unknown_method(content: bytes) -> bytes:
    """The archive with a compression that nobody has, in its first entry."""
    changed = bytearray(content)
    changed[8] = changed[changed.find(b"PK\x01\x02") + 10] = 99
    return bytes(changed)


def _of_petabytes(content: bytes) -> bytes:
    """An archive of one array whose header promises far more than the file has."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }".ljust(117) + b"\n"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("0.npy", b"\x93NUMPY\x01\x00v\x00" + header)
    return archive.getvalue()


def _one_array() -> bytes:
    """The content of a .npy file."""
    archive = io.BytesIO()
    np.save(archive, np.zeros(3))
    return archive.getvalue()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "encrypted": _encrypted, "an unknown method": _of_an_unknown_method, "petabytes": _of_petabytes,
    "a bad stream": lambda content: content[:60] + bytes(20) + content[80:],  # in the middle of its first compressed entry
    "a pickle": lambda content: pickle.dumps({"kit": 1}), "empty": lambda content: b"", "truncated": lambda content: content[:-1],
    "text": lambda content: b"hello", "one array": lambda content: _one_array(),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_result_is_refused(damage: str, kit: Kit, tmp_path: Path) -> None:
    folder = write_results(kit, tmp_path / "results")
    path = folder / "int8-0.npz"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(fxq.errors.ExportError, match=r"int8-0\.npz holds no arrays that can be read[\s\S]*because[\s\S]*remedy"):
        fxq.board.check_conformance(kit.folder, folder)


def _cases(about: Any) -> list[dict[str, Any]]:
    return [case for program in about["programs"] for case in program["cases"]]


EDITS: dict[str, Callable[[Any], object]] = {
    "another target": lambda about: about.update(target="bernoulli2"),
    "an unknown target": lambda about: about.update(target="x9"),
    "a target that is a number": lambda about: about.update(target=5),
    "cases left to the processor": lambda about: [case.update(place="processor") for case in _cases(about)[1:]],
    "a place that there is not": lambda about: _cases(about)[0].update(place="moon"),
    "another operator": lambda about: _cases(about)[0].update(operator="nothing"),
    "cases in another order": lambda about: about["programs"][0]["cases"].reverse(),
    "no cases": lambda about: [program.update(cases=[], outputs=[]) for program in about["programs"]],
    "a program twice": lambda about: about["programs"].append(about["programs"][0]),
    "no programs": lambda about: about.update(programs=[]),
    "a program outside": lambda about: about["programs"][0].update(name="../x"),
    "no refusals": lambda about: about.update(refusals=[]),
    "a file more": lambda about: about["files"].update({"../x": "0"}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_manifest_that_was_edited_is_refused(edit: str, kit: Kit, tmp_path: Path) -> None:
    folder, path = write_results(kit, tmp_path / "results"), kit.folder / manifest.MANIFEST
    about = json.loads(path.read_text(encoding="utf-8"))
    EDITS[edit](about)
    path.write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(fxq.errors.ExportError, match=r"manifest.json is damaged[\s\S]*were changed after it was written"):
        fxq.board.check_conformance(kit.folder, folder)


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"[" * 100_000, b"[]", b"5", b"", b"null"])
def test_a_manifest_that_is_none_is_refused(content: bytes, kit: Kit, tmp_path: Path) -> None:
    (kit.folder / manifest.MANIFEST).write_bytes(content)
    with pytest.raises(fxq.errors.ExportError, match=r"manifest.json is damaged[\s\S]*because[\s\S]*remedy"):
        fxq.board.check_conformance(kit.folder, write_results(kit, tmp_path / "results"))


def test_without_the_tool_a_kit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXQUANT_HORIZON", str(tmp_path))
    with pytest.raises(fxq.errors.ConfigurationError, match="not installed"):
        fxq.board.conformance_kit(tmp_path / "kit", "bayes-e")
    assert not (tmp_path / "kit").exists()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("stop", [KeyboardInterrupt, fxq.errors.CompilationError("no", because="it crashed", remedy="none")])
def test_a_kit_that_is_not_finished_leaves_the_one_before(
    stop: type[BaseException] | BaseException, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Compiled:
        raise stop

    monkeypatch.setattr(kit_module, "compile_model", refuse)
    with pytest.raises((KeyboardInterrupt, fxq.FxQuantError)):
        fxq.board.conformance_kit(kit.folder, "x5", operators=("relu", "add"))
    assert fxq.board.check_conformance(kit.folder, write_results(kit, tmp_path / "results"))


@pytest.mark.usefixtures("compiler")
def test_what_the_compiler_refuses_is_reported_and_the_rest_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(integer: fx.GraphModule, to: Path, name: str = "model") -> Compiled:
        if any("sigmoid" in node.name for node in integer.graph.nodes):
            raise fxq.errors.CompilationError("hb_mapper failed", because="there is a sigmoid", remedy="none")
        return stand_in(integer, to, name)

    monkeypatch.setattr(kit_module, "compile_model", refuses)
    names = ["conv 1x1", "sigmoid", "relu"]
    kit = read_kit(fxq.board.conformance_kit(tmp_path / "kit", "bayes-e", operators=names, scales=SCALES[:1]))
    assert [[case.operator for case in program.cases] for program in kit.programs] == [["conv 1x1"], ["relu"]]
    assert [(refusal.operator, refusal.because) for refusal in kit.refusals] == [("sigmoid", "there is a sigmoid")]
    conformance = rows(fxq.board.check_conformance(kit.folder, write_results(kit, tmp_path / "results")))
    assert [conformance[name].result for name in names] == ["equal", "refused", "equal"]
    with pytest.raises(fxq.errors.ConfigurationError, match="no program is left for bayes-e"):
        fxq.board.conformance_kit(tmp_path / "none", "bayes-e", operators=["sigmoid"])


def test_the_kit_sees_whether_a_slope_is_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, image = [ROWS[f"leaky relu, slope {slope}, ties"] for slope in (0.1, 0.3)], kit_module.images()[1][0]
    result = kit_module.converted(rows, "bayes-e", "int8", SCALES[0])[1](image)
    monkeypatch.setattr(table, "to_float32", lambda value: value)
    others = kit_module.converted(rows, "bayes-e", "int8", SCALES[0])[1](image)
    assert not any(torch.equal(one, other) for one, other in zip(result, others, strict=True))


# ---- the board's script -----------------------------------------------------------------------------------------------------
def run_on_board(kit: Kit, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the kit's script next to modules of a board."""
    board = kit.folder / manifest.BOARD
    return subprocess.run([sys.executable, "run.py", *options], cwd=board, capture_output=True, text=True, timeout=120, check=False)


def test_a_program_that_a_board_refuses_is_reported(kit: Kit) -> None:
    file = kit.folder / manifest.BOARD / "hbm_runtime.py"
    file.write_text("def HB_HBMRuntime(path):\n    raise OSError('wrong march')\n", encoding="utf-8")
    done = run_on_board(kit)
    assert done.returncode == 1
    assert "failed: wrong march" in done.stderr
    conformance = fxq.board.check_conformance(kit.folder, kit.folder / manifest.BOARD / "results")
    assert rows(conformance)["add"].note == "int8-0: OSError: wrong march; int8-1: OSError: wrong march"


def test_without_a_runtime_the_script_says_so(kit: Kit) -> None:
    done = run_on_board(kit)
    assert done.returncode == 1
    assert "none of hobot_dnn, bpu_infer_lib, hbm_runtime is installed" in done.stderr
    assert not (kit.folder / manifest.BOARD / "results").exists()

"""The command line: messages of misuse, files, differences, verification, the demonstration, and statuses of the shell."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import fxquant as fxq
from examples import demo as run
from examples.demo import load_digits_dataset
from fxquant import backends
from fxquant.cli import main
from fxquant.ir.integer import qparams
from fxquant.passes import PIPELINE
from tests.shared.networks import members

COMMANDS = ("quantize", "check", "export", "inspect", "diff", "conformance", "verify")


@pytest.mark.parametrize(("arguments", "shown"), [([], COMMANDS), *(([name], (f"usage: fxquant {name}",)) for name in COMMANDS)])
def test_help(arguments: list[str], shown: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in shown)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fxquant {fxq.__version__}\n"


UNKNOWN = ("", "unknown", "inspect one --grph")
MISUSED = (
    "inspect", "diff one", "conformance", "verify one", "verify one two --batch-size 0", "verify one two --batch-size many", "quantize",
    "quantize networks:Network", "quantize networks:Network --data images.npy --style other",
    "quantize networks:Network --data images.npy --fixed-batch 0", "check networks:Network --shape 1,2,x",
    "check networks:Network --shape 1,0,8", "check networks:Network --shape 1,2,8,8 --data images.npy", "conformance kit",
    "conformance kit --target bayes-e --results x",
)  # fmt: skip


@pytest.mark.parametrize("arguments", [*UNKNOWN, *MISUSED])
def test_misuse_shows_the_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    command = "[-h]" if arguments in UNKNOWN else arguments.split()[0]
    assert f"usage: fxquant {command}" in capsys.readouterr().err


def test_a_wrong_target_lists_the_right_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--target", "wrong", "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "the target 'wrong'" in message
    for target in backends.TARGETS.values():
        assert target.consistency or target.name in message
    assert not (tmp_path / "out").exists(), "nothing is done before the target is known"


def test_a_folder_of_the_demonstration_that_is_a_file_is_refused(
    outcomes: list[run.Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    assert run.main(["--out", str(tmp_path / "file")]) == 2
    assert "remedy" in capsys.readouterr().err


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[run.Outcome]:
    """Return the results of this test's demonstrations, which train briefly, on few of the images."""
    digits = load_digits_dataset()
    cut = {name: getattr(digits, name)[: 192 if "train" in name else 64] for name in digits._fields}
    monkeypatch.setattr(run, "load_digits_dataset", lambda: digits._replace(**cut))
    monkeypatch.setattr(run, "FLOAT_EPOCHS", 1)
    monkeypatch.setattr(run, "QUANTIZED_EPOCHS", 1)
    kept: list[run.Outcome] = []
    original: Callable[..., run.Outcome] = run.run_demo

    def keep(*arguments: object, **keywords: object) -> run.Outcome:
        kept.append(original(*arguments, **keywords))
        return kept[-1]

    monkeypatch.setattr(run, "run_demo", keep)
    return kept


@pytest.mark.nightly
def test_the_demonstration(outcomes: list[run.Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--target", "bayes-e", "--out", str(tmp_path)]) == 0
    (outcome,) = outcomes
    assert all(outcome.reports)
    assert [(report.mismatches, report.flips) for report in outcome.reports] == [(0, 0), (0, 0)]
    assert outcome.reports[0].tensors >= 20
    # Four runtimes and the kernels, the prepared model, and the kernels again.
    assert sum(len(report.pairs) for report in outcome.reports) == 7
    assert outcome.float_nodes == 0
    assert outcome.target == "bayes-e"
    exact = {value for name, value in outcome.accuracies.items() if name.startswith(("prepared", "integer", "ONNX"))}
    assert len(exact) == 1
    before, after = outcome.weight_bytes
    assert after < before / 3

    steps = ["trace", *(step.name for step in PIPELINE)]
    assert sorted(file.name for file in (tmp_path / "passes").iterdir()) == [f"{i:02d}-{name}.txt" for i, name in enumerate(steps)]
    assert steps[-1] == "integer.find_kernels"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["explain.txt", "model.onnx", "passes"]
    assert "none is left in float" in (tmp_path / "explain.txt").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert "mismatching elements" in shown
    assert str(tmp_path / "model.onnx") in shown.replace("\n", "")


# ---- files ------------------------------------------------------------------------------------------------------------------
INT8 = fxq.QConfig(fxq.ActivationConfig("int8"))  # also of the last layer, which returns its sum by default


@members(lambda: dict(conv=nn.Conv2d(2, 4, 3), head=nn.Conv2d(4, 3, 1)))
def Network(self, image: Tensor, mask: Tensor) -> Tensor:
    """Run a convolution, an operator that stays in float, and a head."""
    return self.head((self.conv(image) * mask).cumsum(0))


def inputs(batch: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, 2, 6, 6, generator=generator), torch.rand(batch, 4, 4, 4, generator=generator)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in every form; and "changed", the same with one weight that is not."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("files")
    model = Network()
    result = fxq.quantize(model, [inputs()], qconfig=INT8)
    with torch.no_grad():
        other = Network()
        other.load_state_dict(model.state_dict())
        other.head.weight[1, 2] *= 0.5
    changed = fxq.quantize(other, [inputs()], qconfig=INT8)
    forms = {"traced": fxq.trace(model, inputs()), "prepared": result.prepared, "integer": result.integer}
    actual = {name: fxq.save(form, directory / f"{name}.fxq") for name, form in forms.items()}
    actual["uncalibrated"] = fxq.save(fxq.prepare(model, inputs(), qconfig=INT8), directory / "uncalibrated.fxq")
    actual["changed"] = fxq.save(changed.integer, directory / "changed.fxq")
    actual["changed-prepared"] = fxq.save(changed.prepared, directory / "changed-prepared.fxq")
    actual["onnx"] = result.export(directory / "model.onnx")
    actual["changed-onnx"] = changed.export(directory / "changed.onnx")
    return actual


def called(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """The exit status, and what was printed on standard output and on standard error."""
    status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", ["prepared", "integer", "onnx"])
def test_inspect(form: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "inspect", files[form])
    assert status == 0
    lines = shown.splitlines()
    stage = "exported" if form == "onnx" else form
    assert stage in lines[0]
    assert "for bayes-e" in lines[0]
    assert f"{files[form].stat().st_size:,} bytes" in lines[0]
    assert any(line.startswith("  inputs") and "image f32[" in line and "mask f32[" in line for line in lines)
    assert any(line.startswith("  outputs") and "f32[" in line for line in lines)
    assert any(line.startswith("  in float") and "1 operator" in line for line in lines)
    assert "%cumsum: it sums over the batch, whose size is not fixed" in shown
    integer = fxq.load(files["integer"])
    grids = {node.name: on_grid for node in integer.graph.nodes if (on_grid := qparams(node)) is not None}
    assert len(grids) >= 6
    for name, grid in grids.items():
        row = next(line.split() for line in lines if line.split()[:1] == [f"%{name}"])
        assert row[2] == grid.dtype
        assert float(row[3]) == pytest.approx(grid.scale, rel=1e-8)
        assert "4," in row[4] or "3," in row[4] or "2," in row[4]


def test_inspect_what_has_no_scales_yet(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "inspect", files["uncalibrated"])
    assert status == 0
    assert shown.count("not calibrated") >= 6
    status, shown, _ = called(capsys, "inspect", files["traced"])
    assert status == 0
    assert "saved model, traced" in shown
    assert "2 Conv2d" in shown
    assert "scales" not in shown


@pytest.mark.parametrize("form", ["traced", "prepared", "integer"])
def test_inspect_the_graph(form: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "inspect", files[form], "--graph") == (0, fxq.text(fxq.load(files[form], kernels="reference")), "")


def test_inspect_the_graph_of_a_file(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "inspect", files["onnx"], "--graph")
    assert status == 0
    model = onnx.load(files["onnx"])
    for node in model.graph.node:
        assert f"%{node.output[0]} = {node.op_type}(" in shown


# ---- diff ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["traced", "prepared", "integer", "onnx", "uncalibrated"])
def test_a_file_is_equal_to_itself(form: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "diff", files[form], files[form]) == (0, "equal: the same graph, scales and tensors\n", "")


def tensors_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors that a file of any form holds."""
    if path.suffix == ".onnx":
        return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    return {name: tensor.numpy() for name, tensor in fxq.load(path).state_dict().items()}


@pytest.mark.parametrize(("form", "other"), [("integer", "changed"), ("prepared", "changed-prepared"), ("onnx", "changed-onnx")])
def test_a_difference_of_weights_is_counted(form: str, other: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "diff", files[form], files[other])
    assert status == 1
    one, two = tensors_of(files[form]), tensors_of(files[other])
    differing = [name for name in one if not np.array_equal(one[name], two[name]) and (form == "onnx" or name.endswith("head.weight"))]
    assert differing
    for name in differing:
        assert f"  {name}: {int((one[name] != two[name]).sum())} of {one[name].size} elements differ" in shown
    assert "conv.weight" not in shown.partition("tensors differ")[2]


def test_a_calibrated_model_differs_by_its_scales_and_different_kinds_have_no_difference(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown, _ = called(capsys, "diff", files["prepared"], files["uncalibrated"])
    assert status == 1
    assert "| unknown" in shown
    assert "tensors differ" not in shown
    status, shown, error = called(capsys, "diff", files["integer"], files["onnx"])
    assert (status, shown) == (2, "")
    assert "fxquant verify" in error


def test_a_scale_alone(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = fxq.load(files["prepared"])
    before = fxq.qparams(prepared)["head"]
    fxq.set_qparams(prepared, {"head": before * 1.0000002})
    after = fxq.qparams(prepared)["head"]
    assert after != before
    status, shown, _ = called(capsys, "diff", files["prepared"], fxq.save(prepared, tmp_path / "scaled.fxq"))
    assert status == 1
    assert shown.startswith("1 of "), "four digits, which the graph's text shows, are equal"
    assert f"  head: {before:.9g} | {after:.9g}" in shown


# ---- verify -------------------------------------------------------------------------------------------------------------
PAIRS = [("integer", "onnx"), ("onnx", "integer"), ("prepared", "integer"), ("prepared", "onnx")]


def test_verify_that_is_interrupted_prints_what_it_has_compared(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut_short(items: Iterator[None], *_: object) -> Iterator[None]:
        yield next(items)
        raise KeyboardInterrupt

    monkeypatch.setattr("fxquant.reporting.forms.progress", cut_short)
    status, shown, error = called(capsys, "verify", files["integer"], files["onnx"])
    assert (status, error) == (130, "fxquant: interrupted\n")
    assert "\nequal: 0 mismatching elements of " in shown


@pytest.mark.sweep(2)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_verify_on_random_batches(pair: tuple[str, str], files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "verify", *(files[form] for form in pair))
    assert status == 0, shown
    assert shown.startswith("no --data: 2 random batches")
    assert "equal: 0 mismatching elements of " in shown


@pytest.mark.parametrize("pair", [("integer", "changed-onnx"), ("prepared", "changed")], ids="-".join)
def test_verify_locates_a_difference(pair: tuple[str, str], files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = called(capsys, "verify", *(files[form] for form in pair))
    assert status == 1
    assert "NOT equal" in shown
    assert "first difference at %head" in shown
    assert "test_cli.py" in shown


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs in every format, of ten rows; the names that say so are wrong in some way."""
    tmp_path = tmp_path_factory.mktemp("data")
    image, mask = (tensor.numpy() for tensor in inputs(10))
    np.savez(tmp_path / "named.npz", mask=mask, image=image)
    np.savez(tmp_path / "ordered.npz", image, mask)
    np.savez(tmp_path / "wrong-names.npz", picture=image, mask=mask)
    np.savez(tmp_path / "wrong-dtype.npz", image=image.astype(np.float64), mask=mask)
    np.savez(tmp_path / "wrong-pickled.npz", image=np.array([object()]), mask=mask)
    np.save(tmp_path / "wrong-single.npy", image)
    safetensors.torch.save_file({"image": torch.from_numpy(image), "mask": torch.from_numpy(mask)}, tmp_path / "named.safetensors")
    torch.save({"image": torch.from_numpy(image), "mask": torch.from_numpy(mask)}, tmp_path / "named.pt")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "image.npy", image)
    np.save(tmp_path / "folder" / "mask.npy", mask)
    (tmp_path / "wrong-folder").mkdir()
    torch.save({"image": image}, tmp_path / "wrong-arrays.pt")
    torch.save([torch.from_numpy(image)], tmp_path / "wrong-list.pt")
    (tmp_path / "wrong-format.pkl").write_bytes(pickle.dumps({"image": image}))
    for name in ("wrong-damaged.npz", "wrong-damaged.npy", "wrong-damaged.safetensors", "wrong-damaged.pt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 nothing of the kind")
    return tmp_path


@pytest.fixture(scope="module")
def elements(files: dict[str, Path]) -> int:
    """How many elements are compared if each row of the data is run once."""
    return fxq.verify(fxq.load(files["prepared"]), fxq.load(files["integer"], kernels="reference"), [inputs(10)]).elements


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", ["named.npz", "ordered.npz", "named.safetensors", "named.pt", "folder"])
@pytest.mark.parametrize("rows", [4, 100])
def test_verify_on_data(
    name: str, rows: int, data: Path, files: dict[str, Path], elements: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status, shown, _ = called(capsys, "verify", files["prepared"], files["integer"], "--data", data / name, "--batch-size", rows)
    assert status == 0
    assert shown.startswith(f"equal: 0 mismatching elements of {elements} in")


def test_verify_a_model_of_a_fixed_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, image = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 6, 6)
    prepared = fxq.calibrate(fxq.prepare(model, image, options=fxq.Options(dynamic_shapes={})), image)
    paths = fxq.save(prepared, tmp_path / "p.fxq"), fxq.save(fxq.convert(prepared), tmp_path / "i.fxq")
    np.save(tmp_path / "data.npy", torch.randn(6, 2, 6, 6).numpy())
    assert called(capsys, "verify", *paths, "--data", tmp_path / "data.npy")[0] == 0
    assert called(capsys, "verify", *paths)[0] == 0


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("wrong-names.npz", "it has no image"),
        ("wrong-dtype.npz", "is torch.float64"),
        ("wrong-pickled.npz", "holds other objects than arrays"),
        ("wrong-single.npy", "it has no image, mask"),
        ("wrong-format.pkl", "other formats can hold code"),
        ("wrong-arrays.pt", "holds other objects than arrays"),
        ("wrong-list.pt", "neither a tensor nor a dict of tensors"),
        ("wrong-folder", "the folder holds no .npy file"),
        ("wrong-damaged.pt", "cannot be read as data"),
        ("wrong-damaged.npz", "cannot be read as data"),
        ("wrong-damaged.npy", "cannot be read as data"),
        ("wrong-damaged.safetensors", "cannot be read as data"),
        ("missing.npz", "No such file"),
    ],
)
def test_bad_data(name: str, because: str, data: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, error = called(capsys, "verify", files["prepared"], files["integer"], "--data", data / name)
    assert (status, shown) == (2, "")
    assert error.startswith("fxquant: ")
    assert because in error
    assert "remedy" in error
    assert "Traceback" not in error
    assert not re.search("allow_pickle|weights_only|unsafe", error)


@pytest.mark.parametrize("command", ["inspect", "diff", "verify"])
@pytest.mark.parametrize("ending", [".fxq", ".onnx", ""])
def test_bad_files(command: str, ending: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in {"missing": None, "empty": b"", "text": b"no model"}.items():
        if content is not None:
            (tmp_path / f"{name}{ending}").write_bytes(content)
    (tmp_path / f"folder{ending}").mkdir()
    for name in ("missing", "empty", "text", "folder"):
        path = tmp_path / f"{name}{ending}"
        status, shown, error = called(capsys, command, path, *([] if command == "inspect" else [files["integer"]]))
        assert (status, shown.removeprefix("no --data: 2 random batches, which fill the range of every input\n")) == (2, "")
        assert error.startswith("fxquant: ")
        assert path.name in error
        assert "remedy" in error
    assert called(capsys, command, "", *([] if command == "inspect" else [files["integer"]]))[0] == 2


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        *((a, b, "cannot be verified") for a, b in (("onnx", "onnx"), ("traced", "onnx"), ("integer", "traced"))),
        ("uncalibrated", "integer", "fxq.calibrate"),
    ],
)
def test_forms_that_cannot_be_verified(a: str, b: str, said: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = called(capsys, "verify", files[a], files[b])
    assert status == 2
    assert said in error
    assert "remedy" in error


def test_export_writes_every_form_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(fxq.save(fxq.quantize(nn.Linear(4, 3), [torch.randn(4, 4)]).integer, tmp_path / "integer.fxq"))
    wanted = {"--onnx": "net.onnx", "--c": "net.c", "--pt2": "net.pt2"}
    options = [str(text) for option, name in wanted.items() for text in (option, tmp_path / name)]
    assert main(["export", saved, *options, "--batch-size", "3"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in wanted.values()]
    assert "a batch of 3" in (tmp_path / "net.h").read_text()
    assert (tmp_path / "net.onnx").exists()
    assert main(["export", saved]) == 2
    assert "give one of --onnx, --c" in capsys.readouterr().err


def test_the_scales_of_a_32_bit_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fxq.QConfigMapping().set_module_name("1", fxq.QConfig(output=fxq.ActivationConfig("int32")))
    result = fxq.quantize(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1)), inputs()[0], qconfig=config)
    (grid,) = [grid for node in result.integer.graph.nodes if (grid := qparams(node)) is not None and grid.dtype == "int32"]
    assert isinstance(grid.scale, tuple)
    saved, path = fxq.save(result.integer, tmp_path / "m.fxq"), result.export(tmp_path / "m.onnx")
    for file in (saved, path):
        shown = called(capsys, "inspect", file)[1]
        assert f"int32  {min(grid.scale):.9g} to {max(grid.scale):.9g}" in shown
    assert "int32  its sum's" in called(capsys, "inspect", fxq.save(result.prepared, tmp_path / "p.fxq"))[1]
    assert called(capsys, "diff", saved, saved)[0] == 0
    assert called(capsys, "verify", saved, path)[0] == 0


# ---- output that cannot be written, and sizes that are absurd --------------------------------------------------------
ROOT = Path(__file__).parents[2]
MODEL = """
from torch import nn


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fxquant.cli", *map(str, arguments)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model, next to a module with networks."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "networks.py").write_text(MODEL)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(2))).eval()
    return fxq.save(fxq.quantize(model, [torch.randn(2, 3, 4, 4)], show_progress=False).integer, folder / "model.fxq")


@pytest.fixture
def file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(saved.parent)
    yield saved
    sys.modules.pop("networks", None)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error_of_use(unbuffered: str, file: Path) -> None:
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(command("inspect", file), stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    said = ["fxquant: the output cannot be written", "  because  No space left on device", "  remedy   free space"]
    assert (ended.returncode, ended.stderr.splitlines()) == (2, said)


@pytest.mark.nightly
def test_output_that_nobody_reads_any_more_is_neither_equal_nor_different(file: Path) -> None:
    running = subprocess.Popen(command("inspect", "--graph", file), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()  # long before the command has loaded the file
    assert (running.wait(), running.stderr.read()) == (141, "")


SIZES = {
    "0,3,8,8": "0 is not a positive number", "1,-3,8,8": "-3 is not a positive number", "1,3,,8": "invalid shape value",
    "1,3,x,8": "invalid shape value", "1.5,3": "invalid shape value", "": "invalid shape value", f"1,3,{10**12},8": "cannot be made",
    f"{10**30}": "cannot be made", f"1,{2**62},8,8": "cannot be made", "1,3,2,2": "because", "1,5,8,8": "because",
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_absurd_sizes_are_an_error_of_use(sizes: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["check", "networks:Network", f"--shape={sizes}"])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert SIZES[sizes] in said


def test_a_tilde_after_an_equals_sign_is_the_home_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["export", str(file), "--c=~/model.c"]) == 0
    assert main(["diff", str(file), "~/model.c"]) == 2
    assert (tmp_path / "model.c").exists()
    assert not Path("~").exists()

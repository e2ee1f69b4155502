"""How much does each remedy of the tuner gain?   python -m benchmarks.tuning

Three networks of `benchmarks.accuracy` (a residual one for digits, a U-Net that takes noise from photographs, a ViT), with 4-bit weights
and 8-bit activations. `fxq.tune` has 64 training inputs, no labels, and a tolerance of nothing, so that it tries everything it has; the
table says what each thing that it tried gained. Under it stands what that makes of the test, which it has not seen.
"""

import argparse
from pathlib import Path

import torch

import fxquant as fxq
from benchmarks.accuracy.floats import CACHE, checkpoint, outputs_of, sqnr
from benchmarks.accuracy.methods import exact_outputs, mapping
from benchmarks.accuracy.settings import SETTINGS
from fxquant.support.progress import progress

NETWORKS = ("digits-resnet", "denoising-unet", "digits-vit")
STEPS = 200
ITEMS = 720  # test inputs, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="TASK-NETWORK")
    parser.add_argument("--setting", default="W4A8", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0, help="of the float networks, and of what is drawn at random")
    parser.add_argument("--steps", type=int, default=STEPS, help="of AdaRound for a layer, and of reconstruction for a block")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where float checkpoints are kept, and what tuning has finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in progress(options.networks, len(options.networks), "networks"):
        print(told(name, options.setting, options.seed, options.steps, options.cache), flush=True)


def told(name: str, setting: str, seed: int, steps: int, cache: Path) -> str:
    """The tuner's table, and the test before and after."""
    task, kind = name.split("-", 1)
    trained, bits = checkpoint(task, kind, seed, cache), SETTINGS[setting]
    network, data = trained.load(), trained.data

    rules = mapping(network, bits, {}, {})
    file = str(cache / f"tune-{name}-{setting}-{seed}-{steps}.json")
    tuned = fxq.tune(
        network, data.calibration, bits.target, rules, tolerance=0.0, steps=steps, options=fxq.Options(seed=seed, checkpoint=file)
    )
    calibrated = fxq.quantize(network, data.calibration, bits.target, rules, show_progress=False)
    inputs, targets = data.test_inputs[:ITEMS], data.test_targets[:ITEMS]
    expected = outputs_of(network, inputs)
    lines = [f"{name}, {setting}", str(tuned), f"test: float {trained.task.score(expected, targets):.2f} {trained.task.unit}"]
    for label, prepared in (("calibrated", calibrated.prepared), ("tuned", tuned.prepared)):
        outputs = exact_outputs(prepared, fxq.convert(prepared), inputs)
        lines.append(f"  {label:10} {trained.task.score(outputs, targets):.2f} {trained.task.unit}, SQNR {sqnr(expected, outputs):.2f} dB")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()

"""Which observer loses least?   python -m benchmarks.observers

Every observer that can be given for activations, on checkpoints of `benchmarks.accuracy`, calibrated with 64 training inputs, each
draw with others: the same batches for all, since one calibration serves them all (`fxq.observers.observations`). What is compared is the
output of the prepared model, whose bits are those that are deployed, with that of the float model, on test inputs: SQNR in dB.

The observers, the settings and what decides (the mean of SQNR over draws, row by row) were fixed before the default was chosen; the default
was chosen on other networks and data. `--page` writes the tables to benchmarks/results/observers.md, rows that the default loses
included.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

import fxquant as fxq
from benchmarks.accuracy.floats import CACHE, Checkpoint, checkpoint, outputs_of, sqnr
from benchmarks.accuracy.methods import mapping
from benchmarks.accuracy.settings import SETTINGS, Setting
from benchmarks.accuracy.tasks import CALIBRATION_BATCH, CALIBRATION_SAMPLES
from fxquant.support.progress import progress

OBSERVERS: Mapping[str, object] = {
    "default": fxq.observers.HistogramObserver,
    "min-max": fxq.observers.MinMaxObserver,
    "average": fxq.observers.MovingAverageMinMaxObserver,
    "99.99 %": fxq.observers.PercentileObserver,
    "MSE": fxq.observers.MSEObserver,
    "p = 2.4": functools.partial(fxq.observers.LpObserver, 2.4),
    "p = 3": fxq.observers.LpObserver,
    "p = 4": functools.partial(fxq.observers.LpObserver, 4.0),
    "6 std": functools.partial(fxq.observers.ClipStdObserver, 6.0),
}
NETWORKS = ("denoising-edsr", "denoising-unet", "digits-resnet", "digits-mobilenetv2")
COMPARED = ("W8A8", "W8A8-affine", "power-of-two", "W4A4")
DRAWS = (0,)
ITEMS = 128  # test inputs
READING = """
No observer is the best of every row. The default lacks at most 0.5 dB of min-max and 0.4 dB of the least squared error of the sample, and
gains up to 10 and 6 dB on them: min-max cannot cut off where bits are few, and the squared error cuts off what the test has beyond the
sample. Rows that it loses: 8 bits of the EDSR and of the ResNet, to min-max and p = 4, by 0.3 to 0.6 dB; 4 bits of the EDSR, to p = 4, by
1.7 dB, and its powers of two, by 1.4 dB; and 8 bits of the U-Net, to six standard deviations, by 1 to 2 dB. A few of the U-Net's 64
calibration patches make values up to 40 times as large as all others, and the test has none of these. The default tells such items from
the others by their norm, and cuts them off; six standard deviations cut off the EDSR's values as well, which every item has, and lose
10 dB.
"""
PAGE = Path(__file__).parent / "results" / "observers.md"


class Row(NamedTuple):
    """A network in a setting: the SQNR that each observer gives, draw by draw."""

    name: str
    setting: str
    sqnr: dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="TASK-NETWORK")
    parser.add_argument("--settings", nargs="*", default=list(COMPARED), choices=list(SETTINGS))
    parser.add_argument("--draws", nargs="*", type=int, default=list(DRAWS))
    parser.add_argument("--seed", type=int, default=0, help="of the float networks")
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the float checkpoints are kept")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has measured")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(name, setting) for name in options.networks for setting in options.settings]
    rows = []
    for name, setting in progress(cases, len(cases), "networks and settings"):
        path = options.cache / f"observers-{name}-{setting}-{options.seed}-{'-'.join(map(str, options.draws))}-{options.items}.json"
        if not path.exists() or options.fresh:
            task, network = name.split("-", 1)
            trained = checkpoint(task, network, options.seed, options.cache)
            path.write_text(json.dumps(measured(name, trained, SETTINGS[setting], options.draws, options.items)), encoding="utf-8")
        rows.append(Row(*json.loads(path.read_text(encoding="utf-8"))))
        print(name, setting, *(f"{key} {statistics.fmean(values):.2f}" for key, values in rows[-1].sqnr.items()), sep="  ", flush=True)
    text = page(rows, len(options.draws), options.items)
    print(text)
    if options.page:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")


@torch.no_grad()
def measured(name: str, trained: Checkpoint, setting: Setting, draws: list[int], items: int) -> Row:
    network, data = trained.load(), trained.data
    inputs = data.test_inputs[:items]
    expected = outputs_of(network, inputs)
    row = Row(name, setting.name, {key: [] for key in OBSERVERS})
    for draw in draws:
        chosen = torch.randperm(len(data.train_inputs), generator=torch.Generator().manual_seed(draw))[:CALIBRATION_SAMPLES]
        batches = list(torch.split(data.train_inputs[chosen], CALIBRATION_BATCH))
        first = fxq.calibrate(fxq.prepare(network, batches[0], setting.target, qconfigs(network, setting)), batches, show_progress=False)
        observed = fxq.observers.observations(first)
        for key, observer in OBSERVERS.items():
            prepared = fxq.prepare(network, batches[0], setting.target, qconfigs(network, setting, observer), observations=observed)
            row.sqnr[key].append(sqnr(expected, outputs_of(prepared, inputs)))
    return row


def qconfigs(network: torch.nn.Module, setting: Setting, observer: object = fxq.observers.HistogramObserver) -> fxq.QConfigMapping:
    """Return the bits of a setting, 8 for the first and the last layer, with this observer of activations."""
    return mapping(network, setting, {"observer": observer, "power_of_two": setting.power_of_two}, {"power_of_two": setting.power_of_two})


def page(rows: list[Row], draws: int, items: int) -> str:
    """The table as Markdown: the best of a row in bold, and how far the default is behind it."""
    lacking: dict[str, list[float]] = {key: [] for key in OBSERVERS}
    lines = [
        "# Observers",
        "",
        "Made by `python -m benchmarks.observers --page`. SQNR in dB of the quantized network's output against the float network's,",
        f"on {items} test inputs, {draws} draw(s) of 64 calibration inputs. Weights have fxquant's default. *behind* is what the default",
        "lacks of the row's best, which nobody knows beforehand; the last lines are what each observer lacks.",
        "",
        "| network | setting | " + " | ".join(OBSERVERS) + " | behind |",
        "|---|---|" + "---:|" * (len(OBSERVERS) + 1),
    ]
    for row in rows:
        means = {key: statistics.fmean(row.sqnr[key]) for key in OBSERVERS}
        best = max(means.values())
        for key, mean in means.items():
            lacking[key].append(best - mean)
        cells = [_cell(means[key], row.sqnr[key], round(means[key], 2) == round(best, 2)) for key in OBSERVERS]
        lines.append(f"| {' | '.join([row.name, row.setting, *cells])} | {best - means['default']:.2f} |")
    for name, measure in (("lacks on average", statistics.fmean), ("lacks at most", max)):
        lines.append(f"| {name} | | {' | '.join(f'{measure(lacking[key]):.2f}' for key in OBSERVERS)} | |")
    return "\n".join([*lines, READING])


def _cell(mean: float, draws: list[float], best: bool) -> str:
    spread = f" ±{(max(draws) - min(draws)) / 2:.1f}" if len(draws) > 1 else ""
    return f"**{mean:.2f}**{spread}" if best else f"{mean:.2f}{spread}"


if __name__ == "__main__":
    main()

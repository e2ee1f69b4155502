"""Is a network faster and more accurate on a BPU by fxquant than by the vendor's own quantization?   python -m benchmarks.board

Each float network is quantized by both from the same photographs and compiled at the same level: by fxquant with its defaults, and by
hb_mapper's post-training quantization with each calibration. Latencies are the estimates of the vendor's tool, of the programs on the BPU;
decibels are against the float network, on other photographs; the vendor's best calibration counts in each column. A row is lost in what
its note says.

FXQUANT_HORIZON names the folder of the vendor's tool. Minutes for one network.
"""

import argparse
import logging
import warnings
from collections import Counter

import torch

from benchmarks.board.measure import Row, measured
from benchmarks.board.networks import MARCHES, NETWORKS
from benchmarks.silicon import tool

HEAD = ("network", "march", "µs", "vendor", "ratio", "dB", "vendor", "programs", "vendor", "E6", "lost")
SLOWER, WORSE = 1.005, 0.05  # what counts as equal: of a ratio, and in dB


def cells(row: Row) -> list[str]:
    """Return the row as text, in the order of HEAD."""
    ours, theirs = row.ours, [program for program in row.vendor.values() if not program.reason]
    fastest, best = row.best("microseconds"), row.best("decibel")
    numbers = [*(_number(each, 1) for each in (ours.microseconds, fastest)), _number(ours.microseconds / fastest, 3)]
    numbers += [_number(each, 2) for each in (ours.decibel, best)]
    programs = [str(len(ours.costs) or "–"), str(min((len(each.costs) for each in theirs), default="–"))]
    return [row.network, row.march, *numbers, *programs, "–" if ours.mismatches is None else str(ours.mismatches), "; ".join(lost(row))]


def lost(row: Row) -> list[str]:
    """Return what the vendor's tool does better, with the layers that only one of both has, and every refusal."""
    notes = [f"vendor, {name}: {program.reason}" for name, program in row.vendor.items() if program.reason]
    ours, theirs = row.ours, [program for program in row.vendor.values() if program.costs]
    if ours.reason:
        notes.append(f"fxquant: {ours.reason}")
    if not ours.costs or not theirs:
        return notes
    fastest = min(theirs, key=lambda program: program.microseconds)
    if ours.microseconds > SLOWER * fastest.microseconds:
        notes.append(f"latency ({_differences(ours.layers, fastest.layers) or 'the same layers'})")
    if ours.decibel < row.best("decibel") - WORSE:
        notes.append(f"dB ({', '.join(f'{name} {program.decibel:.2f}' for name, program in row.vendor.items() if program.costs)})")
    if len(ours.costs) > len(fastest.costs):
        notes.append("programs")
    if extra := _differences(ours.processor, fastest.processor):
        notes.append(f"processor ({extra})")
    if ours.mismatches:
        notes.append("bits")
    return notes


def _differences(ours: Counter[str], theirs: Counter[str]) -> str:
    return ", ".join(f"{name} {ours[name]} for {theirs[name]}" for name in sorted(ours | theirs) if ours[name] != theirs[name])


def _number(value: float, digits: int) -> str:
    return "–" if value != value else f"{value:,.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--march", nargs="*", default=list(MARCHES[:2]), choices=MARCHES)
    parser.add_argument("--calibration", nargs="*", default=["default"], choices=("default", "max", "kl"), help="the vendor's")
    parser.add_argument("--markdown", action="store_true", help="print the table as a page")
    options = parser.parse_args()
    tool.require()
    heading = f"| {' | '.join(HEAD)} |\n|{'---|' * 2}{'---:|' * 8}---|"
    print(heading if options.markdown else "  ".join(HEAD), flush=True)
    for name in options.networks:
        for march in options.march:
            if march not in NETWORKS[name].marches:
                continue
            row = [cell.replace("|", "/") for cell in cells(measured(name, NETWORKS[name], march, options.calibration))]
            print(f"| {' | '.join(row)} |" if options.markdown else "  ".join(row), flush=True)


if __name__ == "__main__":
    logging.getLogger("fxquant").setLevel(logging.ERROR)  # limits of a march that a network breaks are not the question here
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()

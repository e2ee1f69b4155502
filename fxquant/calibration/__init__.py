"""Observe batches and set scales: the calibration loop, ranks that calibrate together, and files of observations.

`calibration` has the states and the loop; `scales` reads, sets and freezes what it found. `observations` takes what observers have seen out
of a model, as a value that gives other prepared models of it their scales.
"""

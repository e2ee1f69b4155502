"""Observe batches and set scales: the calibration loop, ranks that calibrate together, and files of observations.

`calibration` has the states and the loop, and reads, sets and freezes scales. `observations` takes what observers have seen out
of a model, as a value that gives other prepared models of it their scales.
"""

"""Observe batches and set scales: the calibration loop, ranks that calibrate together, and files of observations.

`calibration` has the states and the loop, and reads, sets and freezes scales. `observations` returns the statistics of a model's
observers as a value, which gives other prepared models of it their scales.
"""

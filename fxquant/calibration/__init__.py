"""Observe batches and set scales: the calibration loop, ranks that calibrate together, and files of observations."""

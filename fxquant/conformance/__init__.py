"""Checks that a board computes the integer graph's bits: probe programs for it, and the comparison of its results.

rows        the operators, a small network each
probes      rows -> networks that are compiled together, calibrated and converted
compiled    such a network, compiled by the vendor's tool
kit         the programs, inputs and expected outputs, as a folder
board       the script that runs the programs on a board; it needs Python and numpy alone
simulation  the vendor's simulator in the board's place
variants    other roundings and widths, as changes of a target's arithmetic
models      the integers of a program by the target's arithmetic, or by a variant of it
manifest    the list of what a kit holds
results     the results of a board, compared with the expected integers

The kit holds inputs and expected integers for each row. Where a board's integers differ, `variants` changes data of the target's
arithmetic, converts the probe again, and names the variants that fit.
"""

"""Checks that a board computes the integer graph's bits: probe programs for it, and the comparison of its results.

rows      the operators, a small network each
kit       the programs, inputs and expected outputs, as a folder: rows that are compiled together, calibrated and converted
board     the script that runs the programs on a board; it needs Python and numpy alone
manifest  the list of a kit's contents
results   the results of a board, or of the vendor's simulator in its place, compared with the expected integers

The kit holds inputs and expected integers for each row.
"""

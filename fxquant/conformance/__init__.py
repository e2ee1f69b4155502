"""Does a board compute the integer graph's bits? Probe programs for it, and what its results say.

rows        the operators, a small network each
probes      rows -> networks that are compiled together, calibrated and converted
compiled    such a network, compiled by the vendor's tool
kit         the programs, inputs and expected outputs, as a folder
board       the script that runs the programs on a board; it needs Python and numpy alone
simulation  the vendor's simulator in the board's place
variants    other roundings and widths, as changes of a target's arithmetic
results     what a board gave, compared with what was expected
"""

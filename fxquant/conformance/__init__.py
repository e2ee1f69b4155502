"""Checks that a board computes the integer graph's bits: probe programs for it, and the comparison of its results.

    rows        the operators, a small network each.
    probes      rows -> networks that are compiled together, calibrated and converted.
    compiled    such a network, compiled by the vendor's tool.
    kit         the programs, inputs and expected outputs, as a folder.
    board       the script that runs the programs on a board; it needs only Python and numpy.
    simulation  the vendor's simulator in place of the board.
    variants    other roundings and widths, as changes of a target's arithmetic.
    models      the integers of a program by the target's arithmetic, or by a variant of it.
    manifest    the list of a kit's content.
    results     the results of a board, compared with the expected integers.
"""

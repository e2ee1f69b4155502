"""Do the vendor's chips compute the integer graph's bits?   python -m benchmarks.silicon --operators

tool        runs a compiled network in the vendor's runtime
operators   the rows of fxquant.conformance -> compiled together, simulated, compared
networks    whole networks, by statistics and with learned scales
vectors     rows -> files of integers, that the suite compares without the tool
table       the results, in the terminal and as a page
"""

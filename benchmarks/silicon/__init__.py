"""Do the vendor's chips compute the integer graph's bits?   python -m benchmarks.silicon --operators

tool        finds the vendor's compiler, its runtime and its simulator, and runs them
rows        the operators, a small network each
place       which operators of a compiled network the tool has left to the processor
operators   rows -> compiled together, simulated, compared
networks    whole networks, by statistics and with learned scales
vectors     rows -> files of integers, that the suite compares without the tool
table       the results, in the terminal and as a page
"""

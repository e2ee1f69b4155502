"""Random models from fresh seeds, held to the contract: `python -m benchmarks.fuzz --minutes N`.

`spelling`    one call form of an operator
`spellings`   how the operators of the table, and some that no table knows, are written in a model
`whole`       call forms of arithmetic on integers
`generate`    a seed -> a `Case`, a small description of a model, its configuration and its data
`build`       a case -> the text of a Python program
`check`       runs the program block by block; says what fails, or was refused
`shrink`      a case that fails -> the smallest one found that fails in the same way
`loop`        one after another, counted, and printed where one fails
"""

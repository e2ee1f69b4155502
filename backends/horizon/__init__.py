"""The vendor's compiler and simulator for bernoulli2, bayes and bayes-e, run as programs that the user has installed.

Nothing of the tool is needed to install, import or test fxquant. FXQUANT_HORIZON names the folder of its environment;
without it PATH is searched.

    tool              find and start the programs; compile a folder; convert the log to an error, with the layer and the user's line
    export            write the folder that a compiler takes, by its record in `FORMATS`; refuse what it would compute differently
    compiled_program  list and simulate the BPU programs of a .bin, and estimate their time; in `verify`, each gets the graph's integers

`backends.onnx.horizon` maps inputs and outputs of programs to tensors of the graph, by the quantized model that the compiler writes next to
the .bin. At a difference the tool's runtime of that model shows the tensors inside a program. The tests use stand-ins for the programs
(tests/shared/horizon_tool.py); `make test-vendor` uses the real ones.
"""

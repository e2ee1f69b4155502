"""The vendor's compiler and simulator for bernoulli2, bayes and bayes-e, run as programs that the user has installed.

Nothing of the tool is needed to install, import or test fxquant. FXQUANT_HORIZON names the folder of its environment;
without it PATH is searched.

    tool              find and start the programs
    export            write the folder that a compiler takes, by its record in `formats`; refuse what it would compute differently
    camera            replace a program's input by the images of a camera
    log               convert the tool's log to an error, with the layer and the user's line
    compiled_program  list and simulate the BPU programs of a .bin, and estimate their time
    simulated         a form of these programs for `verify`: each gets the integer graph's integers as its inputs

`backends.onnx.horizon` maps inputs and outputs of programs to tensors of the graph, by the quantized model that the compiler writes next to
the .bin. At a difference the tool's runtime of that model shows the tensors inside a program. The tests use stand-ins for the programs
(tests/shared/horizon_tool.py); `make test-vendor` uses the real ones.
"""

"""The vendor's compiler and simulator for bernoulli2, bayes and bayes-e, run as programs that the user has installed.

Nothing of the tool is needed to install, import or test fxquant. FXQUANT_HORIZON names the folder of its environment;
without it PATH is searched.

    tool              find and start the programs
    export            write the folder that a compiler takes, by its record in `formats`; refuse what it would compute differently
    camera            let a program take images of a camera
    log               make an error of the tool's log, with the layer and the user's line
    compiled_program  list, simulate and price the BPU programs of a .bin
    simulated         make these programs one more form for `verify`: each gets the integer graph's integers as its inputs

Which tensor of the graph an input or output is, `backends.onnx.horizon` reads off the quantized model that the compiler leaves next to
the .bin. At a difference the tool's own runtime of that model shows the tensors inside a program. The tests use stand-ins for the programs
(tests/shared/horizon_tool.py); `make test-vendor` uses the real ones.
"""

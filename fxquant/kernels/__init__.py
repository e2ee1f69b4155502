"""Run an integer graph fast: kernels, each proved equal to the primitives it replaces, on the machine it runs on."""

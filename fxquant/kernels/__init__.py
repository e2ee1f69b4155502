"""How an integer graph runs fast: kernels, each proved equal to the primitives it stands for, on the machine it runs on."""

"""Names of other toolkits over fxquant's functions, for programs that come from there: a module for each, imported by name.

fxquant.compat.torch_ao   PyTorch's torch.ao.quantization: docs/from-torch-ao.md
fxquant.compat.horizon    Horizon's plugin for PyTorch: docs/from-horizon.md

What they take is the other toolkit's; what they return is fxquant's. What has no equal here raises ConfigurationError, which says what
to call instead.
"""

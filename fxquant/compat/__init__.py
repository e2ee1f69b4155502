"""Names of other toolkits over fxquant's functions, for programs written for them: one module per toolkit, imported by name.

fxquant.compat.torch_ao   PyTorch's torch.ao.quantization: docs/guide/from-torch-ao.md
fxquant.compat.horizon    Horizon's plugin for PyTorch: docs/guide/from-horizon.md

Their arguments are those of the other toolkit; their results are fxquant's. Names without an equivalent raise ConfigurationError, which
states what to call instead.
"""

"""PyTorch's modules under the names that Horizon's package has for them."""

from torch.nn import (
    GRU,
    LSTM,
    ChannelShuffle,
    ConvTranspose2d,
    Dropout,
    GroupNorm,
    GRUCell,
    Identity,
    LSTMCell,
    MultiheadAttention,
    RMSNorm,
    Softmax,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "GRU",
    "LSTM",
    "ChannelShuffle",
    "ConvTranspose2d",
    "Dropout",
    "GRUCell",
    "GroupNorm",
    "Identity",
    "LSTMCell",
    "MultiheadAttention",
    "RMSNorm",
    "Softmax",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

"""Integers and booleans: tokens, bytes, indices and masks, as models compute with them."""

import torch

from benchmarks.operators.spelling import IMAGE, Input, Row, between, normal, row, truth, whole

SCORES, TOKENS, NUMBERS = normal(2, 5, 5), whole(12, 6), Input((3, 4), -9, 10, torch.int64)
BYTES = Input((6, 6, 3), 0, 256, torch.uint8)
PADDING = Input((5,), 0, 2, torch.int64)
SHORT = Input((3, 4), -100, 100, torch.int8)
MEDIUM = Input((3, 4), -9, 10, torch.int32)

WHOLE: tuple[Row, ...] = (
    row("arithmetic of integers", "x + y", "x - y", "x * y", "x.add(y, alpha=2)", "torch.sub(x, y, alpha=3)", "1 - x", "3 * x - y",
        "x // 3", "torch.div(x, 3, rounding_mode='floor')", "torch.div(x, 3, rounding_mode='trunc')", "x // -4", "x % -3",
        "torch.fmod(x, 4)", "torch.remainder(x, 5)", "torch.floor_divide(x, 2)", "torch.div(x, y.abs() + 1, rounding_mode='floor')",
        "x % (y.abs() + 2)", "x.abs()", "torch.abs(-x)", "x.sign()", "x.neg()", "x ** 2", "x.pow(3)", "x.square()", "x.clamp(min=0)",
        "x.clamp(-2, 2)", "torch.clamp(x, max=y)", "x.relu()", "torch.maximum(x, y)", "torch.minimum(x, y)", "torch.max(x, y)",
        "x.sum(-1, keepdim=True)", "x.amax(1)", "x.amin((1, 2))", "x.max()", "x.min(1)[0]", "x.max(-1).values", "x.argmax(-1)",
        "torch.argmin(x, dim=1)", "torch.cumsum(x, 1)", "x.cumsum(-1) - x", "x.sum()", "x + {B(torch.arange(4))}", "x * torch.arange(4)",
        "torch.rsub(x, 2)", "x.floor_divide(2)", "x.fmod(3)", over=NUMBERS),
    row("comparisons of integers", "x > y", "x == y", "x >= 2.5", "x != 0", "2 < x", "x.eq(3)", "torch.le(x, -1)",
        "(x > 0) & (y > 0)", "((x > 0) | (y < 2)).float()", "(x == y).long()", "(x > 0).sum(1)", "(x > 1).int()", "(x > y).any(1)",
        "x.bool()", "torch.logical_not(x)", "torch.logical_and(x, y)", "x.any(1)", "torch.all(x, 1)", "(x > 0) == (y > 0)",
        "(x > 0) * (y > 0)", "(x > 0) * y", "(x > 0) + (y > 0)", "(x > 0) ^ (y > 0)", "~(x > 0)", "torch.where(x > y, x, y)",
        "torch.where(x > 0, 1, 0)", "x.masked_fill(x < 0, 0)", "torch.where(x > 0, x, -1)", "(x > 0).float().mean(1)", "x * (x > 0)",
        "(x == 2).long().argmax(-1)", over=NUMBERS),
    row("bits of integers", "x & y", "x | y", "x ^ y", "x & 6", "x & -2", "x << 3", "x >> 2", "torch.bitwise_or(x, 4)", "x.bitwise_xor(y)",
        "torch.bitwise_left_shift(x, 2)", "torch.bitwise_right_shift(x, 1)", "(x >> 1) & 1", over=NUMBERS),
    row("int8 as inputs", "x + 1", "x * y", "x * 3", "-x", "x // 7", "x % 5", "x & 15", "~x", "x.float() / 100", "x.long() + y", "x > y",
        "x.abs()", "x.clamp(0, 50)", "x.sum(1)", "x.reshape(-1, 12)", "x.flatten(1).float()", "torch.where(x > y, x, y)",
        "x.to(torch.int32)", "x.transpose(1, 2)", "x.amax(-1)", "x << 2", "x.int() * y.int()", over=SHORT),
    row("int32", "x + y", "x // 2", "x.long()", "x.float()", "x * 0.5", "x / 3", "x.max(1)[0]", "x == y", "x.short()", over=MEDIUM),
    row("images of bytes", "x.permute(0, 3, 1, 2).float() / 255", "(x.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25", "x / 255.0",
        "{nn.Conv2d(3, 4, 3)}(x.permute(0, 3, 1, 2).float().div(255))", "x.to(torch.float32).permute(0, 3, 1, 2).sub(127.5).div(127.5)",
        "(x.float() - {B([123.7, 116.3, 103.5])}) / {B([58.4, 57.1, 57.4])}", "x.float().mean((1, 2))", "x * (1 / 255)", "x > 127",
        "x[..., [2, 1, 0]].float() / 255", "x[:, ::2, ::2].float() - 128", over=BYTES),
    row("tokens", "(x != 0).long()", "x.ne(1).int()", "(torch.cumsum(x.ne(1).int(), 1).type_as(x) * x.ne(1).int()).long() + 1",
        "{nn.Embedding(12, 8)}(x)", "{nn.Embedding(12, 8)}(x) * (x != 0).unsqueeze(-1)", "{nn.Embedding(14, 8)}(x + 2)",
        "{nn.Embedding(12, 8)}(x % 4)", "{nn.Embedding(12, 8)}(x.clamp(max=9))", "{nn.Embedding(12, 8)}(torch.where(x > 9, 0, x))",
        "(x == 3).float().unsqueeze(1) * 2.0", "x.float() / 12", "{nn.Embedding(12, 8)}(x) + {nn.Embedding(6, 8)}(torch.arange(6))",
        "{nn.Embedding(12, 8)}(x).sum(1) / (x != 0).sum(1, keepdim=True).clamp(min=1)", "F.one_hot(x, 12).float()",
        "(x[:, None] == x[:, :, None]).float()", "x[:, 1:] - x[:, :-1]", "torch.cat((x, x + 1), 1)", "x.flip(1)",
        "torch.cat((x, torch.zeros(1, 6).long().expand(x.shape[0], 6)), 1)",
        "torch.stack((x, x * 2), 1).float()", "torch.cat((x > 2, x < 1), 1)",
        "(x.unsqueeze(1) <= torch.arange(6)[None, :, None]).float()", "{nn.Linear(6, 3)}(x.float())", over=TOKENS),
    row("indices of floats", "x.argmax(1) + 1", "x.argmax(-1).float() / 6", "(x.argmax(1) == 2).float()", "x.argmax(1) // 2",
        "x * x.argmax(1, keepdim=True)", "x.sort(1)[1] + 1", "x.topk(2, 1)[1].float()", "(x > 0).sum(1)",
        "(x > 0).sum((2, 3)).float() / 36", "(x > 0).float().sum(1)", "x * (x > 0).long()", "x * (x > 0).int()",
        "(x.round().long() % 3).float()", "x.int() + 1", "(x * 4).to(torch.int16).float()", "x.long().clamp(-1, 1)", "x.trunc().long() * 2",
        "torch.logical_or(x, x > 1)", "torch.logical_xor(x > 0, x)", "x.bool().long()", "x.any(1)", "torch.all(x > -3, 1)",
        "(x > 0) | (x < -1)", "x.sign().long()", "x.floor().int()", "x.double().sum(1)", "x.half().relu()", "x.half().float() * 2",
        "(x + 1).half()", "x.relu().double()", "torch.isclose(x, x)", "x.type(torch.int64)", "x.type(torch.float64)", "x.to(torch.half)",
        least=5),
    row("padding as an input", "(x + (1 - y[:, None, None, :].float()) * -1e9).softmax(-1)",
        "(x + (1.0 - y[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min).softmax(-1)",
        "x.masked_fill(y[:, None, None, :] == 0, -1e9).softmax(-1)", "x.masked_fill(~y[:, None, None].bool(), -1e4).softmax(-1)",
        "torch.where(y[:, None, None, :] > 0, x, torch.finfo(x.dtype).min).softmax(-1)",
        "m = (1.0 - y.float()) * -10000.0; return F.softmax(x * 0.5 + m.unsqueeze(1).unsqueeze(2), -1)",
        "m = y[:, None, :] * y[:, :, None]; return (x + (1.0 - m[:, None].float()) * -1e9).softmax(-1)",
        "m = y.bool()[:, None, None, :] & torch.ones(5, 5).tril().bool(); return x.masked_fill(~m, -1e9).softmax(-1)",
        "m = torch.full((5, 5), -1e9).triu(1) + (1 - y[:, None, None, :].float()) * -1e9; return (x + m).softmax(-1)",
        "F.scaled_dot_product_attention(x, x, x, attn_mask=y[:, None, None, :].bool())",
        "F.scaled_dot_product_attention(x, x, x, attn_mask=(1.0 - y[:, None, None, :].float()) * -1e9)",
        "(x + (y[:, None, None, :].float() - 1) * 1e9).softmax(-1)", "x.softmax(-1) * y[:, None, None, :]",
        "(x * y[:, None, None, :].float()).sum(-1) / y.sum(-1)[:, None, None].clamp(min=1)", over=(SCORES, PADDING)),
    row("real padding as an input", "(x + (1 - y[:, None, None, :]) * -1e9).softmax(-1)",
        "x.masked_fill(y[:, None, None, :] == 0, -1e9).softmax(-1)",
        "(x + (1.0 - y[:, None, None, :]) * torch.finfo(torch.float32).min).softmax(-1)",
        "x.masked_fill(y[:, None, None, :] < 0.5, -1e4).softmax(-1)", over=(SCORES, between(0.0, 1.0, 5))),
    row("booleans as inputs", "~y", "x * ~y", "x * y.float()", "y & (x > 0)", "y.any(1)", "y.float().mean(1)", "y.long().sum(1)",
        "y.sum(1)", "x + y", "torch.where(~y, x, x * 2)", "x.masked_fill(y.logical_not(), 0.5)", "y == 0", "y * 2", "1 - y.float()",
        "(y | (x > 1)).float()", "y ^ True", "y.int() + 1", "x - y.int()", "x.where(y, x * 0.5)", "y.cumsum(1)",
        over=(IMAGE, truth(3, 6, 6))),
    row("results that are not tensors", "return x.relu(), None, x + 1", "return dict(y=x.relu(), n=3)", "return (x * 2, x.shape[1])",
        "return [None, x.relu()]", "return x.relu(), True", "return x.relu(), x.shape[0]"),
)  # fmt: skip

FAMILIES = {"integers": WHOLE}

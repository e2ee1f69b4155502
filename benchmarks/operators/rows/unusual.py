"""Spellings that are seldom: other names, arguments mostly left out, tensors without a batch, layers with everything switched on."""

from benchmarks.operators.spelling import IMAGE, LINE, VOLUME, Row, normal, row, truth, whole

SEQUENCE = normal(5, 8)
SAMPLE = normal(3, 6, 6, batched=False)
GRID = whole(3, 3, 6, 6)
BAG = whole(7, 7, batched=False)

NAMES: tuple[Row, ...] = (
    row("axis and keepdims", "torch.sum(x, axis=1)", "torch.mean(x, axis=1, keepdims=True)", "x.max(axis=1)[0]",
        "torch.cat([x, y], axis=1)", "x.amax(axis=(1, 2))", "x.argmax(axis=1)", "torch.stack([x, y], axis=1)", "x.std(axis=1)",
        "x.cumsum(axis=1)", "x.unsqueeze(axis=1)", "x.sum(axis=(1, 2), keepdims=True)", "x.prod(axis=1)", "x.all(axis=1)",
        "torch.flip(x, dims=(1,))", "x.squeeze(axis=1).relu()", "torch.add(x1=x, x2=y)"),
    row("of float values", "torch.real(x).relu()", "x.real.relu()", "x.conj().relu()", "torch.conj_physical(x).relu()",
        "torch.resolve_conj(x).relu()", "x.resolve_neg().relu()"),
    row("copies of views", "torch.narrow_copy(x, 1, 0, 2)", "torch.diagonal_copy(x, 0, 2, 3)", "torch.select_copy(x, 1, 0)",
        "torch.permute_copy(x, (0, 2, 1, 3))", "torch.slice_copy(x, 1, 0, 2)", "torch.unsqueeze_copy(x, 1)", "torch.unbind_copy(x, 1)[0]",
        "torch.split_copy(x, 2, 2)[1]", "x.narrow_copy(2, 1, 3)", "torch.view_copy(x, (-1, 108))"),
    row("ATen operators", "torch.ops.aten.relu(x)", "torch.ops.aten.conv2d(x, {P(4, 3, 3, 3)})", "torch.ops.aten.add.Tensor(x, y)",
        "torch.ops.aten.mean.dim(x, [2, 3])", "torch.ops.aten.softmax.int(x, 1)", "torch.ops.aten.cat.default([x, y], 1)",
        "torch.ops.aten.slice.Tensor(x, 1, 0, 2)", "torch.ops.aten.max_pool2d(x, 2)",
        "torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5)[0]",
        "torch.convolution(x, {P(4, 3, 3, 3)}, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)",
        "torch.native_layer_norm(x, [6], {P(6)}, {P(6)}, 1e-5)[0]"),
    row("keywords in another order", "torch.add(alpha=2, other=y, input=x)", "torch.clamp(max=1, min=None, input=x)",
        "F.conv2d(x, bias={P(4)}, weight={P(4, 3, 3, 3)}, padding='same', dilation=2)",
        "F.group_norm(num_groups=3, input=x, weight={P(3)})", "F.layer_norm(normalized_shape=(6, 6), input=x)",
        "F.leaky_relu(negative_slope=0.3, input=x)", "x.roll(dims=(1, 2), shifts=(1, -1))",
        "torch.where(condition=x > 0, input=x, other=y)", "x.diagonal(dim1=2, dim2=3, offset=-1)", "torch.softmax(dim=1, input=x)",
        "F.adaptive_avg_pool2d(output_size=(2, 5), input=x)", "x.std((2, 3), False)", "x.permute(-4, -1, -2, -3)",
        "x.to(dtype=torch.float32, copy=False).relu()", "F.pad(mode='constant', pad=[1, 2, 3, 4], value=1, input=x)"),
    row("empty slices", "torch.cat([x, x[:, :0]], 1)", "x[:, 0:0]", "x[:, 1:1].relu()", "x[..., 6:].sum(-1)"),
    row("positions in the call", "{nn.ConvTranspose2d(3, 4, 3, stride=2)}(x, (14, 14))",
        "{nn.ConvTranspose2d(3, 4, 3, stride=2)}(x, [13, 14])", "{nn.MaxUnpool2d(2)}(*{nn.MaxPool2d(2, return_indices=True)}(x), (6, 6))"),
)  # fmt: skip

SHAPES: tuple[Row, ...] = (
    row("layers without a batch", "nn.Conv2d(3, 4, 3)", "nn.ConvTranspose2d(3, 2, 2)", "nn.MaxPool2d(2)", "nn.AvgPool2d(2)",
        "nn.AdaptiveAvgPool2d(2)", "nn.AdaptiveMaxPool2d((2, None))", "nn.LPPool2d(2, 2)", "nn.InstanceNorm2d(3)", "nn.ReflectionPad2d(1)",
        "F.conv2d(x, {P(4, 3, 3, 3)}, padding=1).relu()", "nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(0))",
        over=SAMPLE),
    row("lines and volumes without a batch", "nn.Conv1d(3, 4, 3)", "nn.MaxPool1d(2)", "nn.AvgPool1d(2)", "{nn.Linear(6, 3)}(x[0])",
        over=normal(3, 6, batched=False)),
    row("pools of maps", "F.max_pool2d(x.mean(1), 2)", "F.avg_pool2d(x.amax(1), 3, 1, 1)", "{nn.AdaptiveAvgPool2d(2)}(x[:, 0])",
        "F.max_pool1d(x[:, 0, 0], 2)"),
    row("pools with all arguments", "F.max_pool2d(x, (2, 2), (1, 1), (1, 1), (2, 2), True)", "F.avg_pool2d(x, 3, 2, 1, True, False, 5)",
        "nn.AvgPool2d((3, 2), stride=(2, 1), padding=(1, 0), count_include_pad=False, ceil_mode=True)",
        "nn.MaxPool2d((3, 2), (2, 1), ceil_mode=True)", "nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False)"),
    row("pools of lines with all arguments", "nn.MaxPool1d(3, dilation=2)", "nn.AvgPool1d(3, 2, ceil_mode=True, count_include_pad=False)",
        "nn.MaxPool1d(2, return_indices=True)", "F.adaptive_max_pool1d(x, 4, return_indices=True)[1]", over=LINE),
    row("pools of volumes with all arguments", "nn.AvgPool3d(2, padding=1, count_include_pad=False)",
        "nn.AvgPool3d((2, 3, 2), divisor_override=5)", "nn.MaxPool3d((1, 2, 2), dilation=(1, 2, 1))", "nn.AdaptiveMaxPool3d((2, None, 3))",
        over=VOLUME),
    row("convolutions with all arguments", "nn.Conv2d(3, 6, 3, groups=3, bias=False, padding='same', padding_mode='circular', dilation=2)",
        "nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))",
        "nn.ConvTranspose2d(3, 6, (2, 3), (2, 1), (1, 0), (1, 0), groups=3)",
        "nn.ConvTranspose2d(3, 4, 3, stride=2, dilation=2, padding=1, output_padding=1)",
        "nn.utils.parametrizations.orthogonal(nn.Conv2d(3, 4, 1))"),
    row("concatenated and laid out", "torch.block_diag(x[0, 0], y[0, 0])", "torch.cartesian_prod(x[0, 0, 0], y[0, 0, 0])",
        "torch.combinations(x[0, 0, 0])", "torch.atleast_3d(x, y)[1].relu()",
        "nn.utils.rnn.pad_sequence([x[0, 0], x[1, 0, :3]], batch_first=True)", "torch.cov(x[0, 0])",
        "x.roll(1)", fixed=True),
    row("over all elements", "x.argmax()", "x.argmin()", "(x > 0).any()", "torch.all(x > -9)", "(x + 2).median()",
        "torch.quantile(x + 2, 0.5)", fixed=True),
    row("norms by sums and counts", "torch.linalg.matrix_norm(x, ord=1)", "torch.linalg.matrix_norm(x, ord=float('inf'), keepdim=True)",
        "torch.linalg.norm(x, 1, (2, 3))", "torch.linalg.norm(x, ord=float('-inf'), dim=1)", "torch.linalg.vector_norm(x, ord=0, dim=1)"),
    row("integers of sizes", "x.new_tensor([1.0] * 6) + x", "len(x) * x", "x.nelement() + x", "x.size(dim=1) + x", fixed=True),
)  # fmt: skip

PLACES: tuple[Row, ...] = (
    row("isclose with tolerances", "x.isclose(y, rtol=0.1, atol=0.2)", "torch.isclose(x, y, atol=0.3, rtol=0)",
        "torch.isclose(x, {B(torch.zeros(6))}, atol=0.5)"),
    row("scatter_reduce of means", "x.scatter_reduce(1, y, x, 'mean')",
        "x.scatter_reduce(dim=1, index=y, src=x, reduce='mean', include_self=False)",
        "torch.zeros_like(x).scatter_reduce_(1, y, x, reduce='mean')", "x.scatter_reduce(1, y, x * 2, 'sum', include_self=False)",
        "torch.zeros_like(x).scatter_reduce(1, y, x, 'mean', include_self=False)", over=(IMAGE, GRID)),
    row("scatter_reduce of products", "x.scatter_reduce(1, y, x.sigmoid(), reduce='prod')", over=(IMAGE, GRID)),
    row("index_put that adds up", "x.index_put((torch.tensor([0, 1]),), {B(1.0)}, accumulate=True)",
        "x.index_put((torch.tensor([0, 1, 0]),), y[:3], accumulate=True)",
        "x.index_put((torch.tensor([0, 1, 0]), torch.tensor([0, -1, 0])), y[:3, 0], accumulate=True)",
        "x.put(torch.tensor([0, 5]), torch.tensor([1.0, 2.0]), accumulate=True)",
        "x.index_add(0, {B([0, 0])}, {B(torch.randn(2, 3, 6, 6))})", fixed=True),
    row("assignment to lists", "x = x.clone(); x[:, [0, 1], [2, 3]] = y[:, :2, 0]; return x",
        "x = x.clone(); x[:, {B([0, 2])}, {B([2, 3])}] = {P(2, 6)}; return x",
        "x = x.clone(); x[..., [0, 1], [0, 1]] += y[..., [2, 2], [1, 3]]; return x"),
    row("bags by offsets", "{nn.EmbeddingBag(10, 4)}(x, torch.tensor([0, 2, 5]))", "{nn.EmbeddingBag(10, 4, mode='sum')}(x, {B([0, 3])})",
        "{nn.EmbeddingBag(10, 4, mode='max')}(x, offsets={B([0, 3, 3])})",
        "{nn.EmbeddingBag(10, 4, include_last_offset=True)}(x, {B([0, 3, 7])})",
        "{nn.EmbeddingBag(10, 4, mode='sum')}(x, {B([0, 3])}, {B(torch.rand(7))})",
        "{nn.EmbeddingBag(10, 4, padding_idx=0)}(x, {B([0, 3])})", "F.embedding_bag(x, {P(10, 4)}, {B([0, 3, 3])})",
        "{nn.EmbeddingBag(10, 4, mode='max', padding_idx=-9)}(x, {B([0, 3, 3])})", over=BAG),
    row("bags with padding", "nn.EmbeddingBag(10, 4, padding_idx=0)", "nn.EmbeddingBag(10, 4, padding_idx=3, mode='sum')",
        "nn.EmbeddingBag(10, 4, mode='max', padding_idx=1)", over=whole(3, 7)),
    row("bags with factors", "{nn.EmbeddingBag(10, 4, mode='sum')}(x, None, y)",
        "F.embedding_bag(x, {P(10, 4)}, mode='sum', per_sample_weights=y)", over=(whole(7, 7), normal(7))),
    row("bags by offsets that are computed", "F.embedding_bag(x, {P(10, 4)}, y)", over=(BAG, whole(1, 1, batched=False))),
)  # fmt: skip

ATTENTION: tuple[Row, ...] = (
    row("positions of the layer's own", "{nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)}(x, x, x)[0]",
        "{nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)}(x, x, x)[1]",
        "{nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)}(x, y, y, need_weights=False)[0]",
        "{nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)}(x, x, x, attn_mask={B(torch.ones(5, 5).triu(1).bool())})[0]",
        over=SEQUENCE),
    row("keys of another width", "{nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)}(x, y[..., :6], y[..., :4])[0]",
        over=SEQUENCE),
    row("attention without a batch", "{nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)}(x, x, x)[0]",
        over=normal(5, 8, batched=False)),
    row("padding of keys", "{nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)}(x, x, x, key_padding_mask=y)[0]",
        "{nn.MultiheadAttention(8, 2, batch_first=True)}(x, x, x, key_padding_mask=y & torch.tensor([False, True, True, True, True]))[0]",
        "{nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)}"
        "(x, src_key_padding_mask=y & torch.tensor([False, True, True, True, True]))",
        over=(SEQUENCE, truth(5))),
    row("packed sequences", "{nn.GRU(8, 6, batch_first=True)}(nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2, 1], batch_first=True))[1]",
        over=SEQUENCE, fixed=True),
)  # fmt: skip

FAMILIES = {
    "other names and arguments": NAMES,
    "without a batch, and with all arguments": SHAPES,
    "indices and embedding bags": PLACES,
    "multi-head attention with every argument": ATTENTION,
}

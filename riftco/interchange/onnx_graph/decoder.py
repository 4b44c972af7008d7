"""The decoder as an ONNX graph, for a prompt (`prefill`) or on top of cached keys and values (`decode`).

Inputs are `input_ids` int64 [batch, sequence], `attention_mask` int64 [batch, total_sequence] (1 for a token, 0 for
padding) and, in `decode`, `past_key_values.N.key` and `.value` float32 [batch, G, past_sequence, K]. Outputs are
`logits` float32 [batch, sequence, V] and `present.N.key` and `.value` [batch, G, total_sequence, K]. A token's position
is the number of ones before it in its row of the mask, so padding may stand on either side.

The residual stream is [N, D] with N = batch · sequence, so that a linear is one Gemm. Shape letters: B batch,
T queries, S keys, G key heads, R query heads of a key head, K head width.
"""

from typing import NamedTuple

from onnx import TensorProto, ValueInfoProto, helper

from riftco.interchange.onnx_graph.builder import Graph
from riftco.interchange.onnx_graph.prelude import Prelude, prelude
from riftco.models.config import DecoderConfig

KINDS = ("prefill", "decode")


class Decoder(NamedTuple):
    """A graph with its inputs and outputs."""

    graph: Graph
    inputs: list[ValueInfoProto]
    outputs: list[ValueInfoProto]


def decoder(config: DecoderConfig, kind: str, opset: int) -> Decoder:
    """The whole graph.

    Args:
        config: the decoder.
        kind: "prefill" or "decode".
        opset: 18 or 23.
    """
    g = Graph(opset)
    with_past = kind == "decode"
    setting = prelude(g, config, with_past)
    x = setting.x
    for layer in range(config.layers):
        x = _block(g, config, setting, f"blocks.{layer}", layer, x, with_past)
    x = _norm(g, config, "final_norm", x)
    shared = "token_embedding.weight" if config.tie_embeddings else ""
    head = "language_model_head"
    rows = g.linear(x, head, config.vocab_size, config.width, "logits.rows", weight=shared, bias=config.head_bias)
    shape = g.add("Concat", [setting.row_shape, g.integers(config.vocab_size)], "logits.shape", axis=0)
    g.add("Reshape", [rows, shape], "logits")
    return Decoder(g, *_signature(config, with_past))


def _signature(config: DecoderConfig, with_past: bool) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
    total = "total_sequence" if with_past else "sequence"

    def value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def cache(prefix: str, length: str) -> list[ValueInfoProto]:
        return [
            value(f"{prefix}.{layer}.{which}", "batch", config.kv_heads, length, config.head_dim)
            for layer in range(config.layers)
            for which in ("key", "value")
        ]

    inputs = [
        value("input_ids", "batch", "sequence", kind=TensorProto.INT64),
        value("attention_mask", "batch", total, kind=TensorProto.INT64),
    ]
    inputs += cache("past_key_values", "past_sequence") if with_past else []
    return inputs, [value("logits", "batch", "sequence", config.vocab_size), *cache("present", total)]


def _norm(g: Graph, config: DecoderConfig, path: str, x: str) -> str:
    make = g.layer_norm if config.norm == "layer" else g.rms_norm
    return make(x, path, config.width, config.norm_eps, f"{path}.out")


def _block(g: Graph, config: DecoderConfig, setting: Prelude, path: str, layer: int, x: str, with_past: bool) -> str:
    normed = _norm(g, config, f"{path}.attention_norm", x)
    branch = _attention(g, config, setting, f"{path}.attention", layer, normed, with_past)
    x = g.add("Add", [x, branch], f"{path}.attention.residual")
    normed = _norm(g, config, f"{path}.feed_forward_norm", x)
    return g.add("Add", [x, _feed_forward(g, config, f"{path}.feed_forward", normed)], f"{path}.feed_forward.residual")


def _feed_forward(g: Graph, config: DecoderConfig, path: str, x: str) -> str:
    width, hidden = config.width, config.hidden

    def linear(part: str, x: str, rows: int, columns: int) -> str:
        return g.linear(x, f"{path}.{part}", rows, columns, f"{path}.{part}.out", bias=config.bias)

    if config.mlp != "swiglu":
        inner = linear("expand", x, hidden, width)
        inner = g.gelu(inner, f"{path}.gelu", approximate=config.mlp == "gelu_tanh")
        return linear("project", inner, width, hidden)
    gate, up = linear("gate", x, hidden, width), linear("up", x, hidden, width)
    silu = g.add("Mul", [gate, g.add("Sigmoid", [gate], f"{path}.sigmoid")], f"{path}.silu")
    return linear("down", g.add("Mul", [silu, up], f"{path}.gated"), width, hidden)


def _attention(
    g: Graph, config: DecoderConfig, setting: Prelude, path: str, layer: int, x: str, with_past: bool
) -> str:
    heads, groups, width = config.heads, config.kv_heads, config.head_dim

    def project(part: str, count: int) -> str:
        rows = g.linear(x, f"{path}.{part}", count * width, config.width, f"{path}.{part}.rows", bias=config.qkv_bias)
        return g.add("Reshape", [rows, setting.head_shapes[count]], f"{path}.{part}.heads")  # [B, T, count, K]

    def turn(part: str, x: str, output: str) -> str:
        """Heads first, normalised and rotated: [B, count, T, K]."""
        if config.qk_norm:
            x = g.rms_norm(x, f"{path}.{part}_norm", width, config.norm_eps, f"{path}.{part}_norm.out")
        last = f"{path}.{part}.unturned" if setting.rope else output
        x = g.add("Transpose", [x], last, perm=[0, 2, 1, 3])
        return _rope(g, x, setting.rope, output) if setting.rope else x

    def extend(which: str, new: str) -> str:
        """Past and new along the positions; the reshape refuses a past whose length is not the mask's."""
        joined = g.add("Concat", [f"past_key_values.{layer}.{which}", new], f"{path}.{which}.joined", axis=2)
        return g.add("Reshape", [joined, setting.cache_shape], f"present.{layer}.{which}")

    q = turn("query", project("query", heads), f"{path}.query.out")
    names = [f"{path}.{which}.new" if with_past else f"present.{layer}.{which}" for which in ("key", "value")]
    k = turn("key", project("key", groups), names[0])
    v = g.add("Transpose", [project("value", groups)], names[1], perm=[0, 2, 1, 3])
    if with_past:
        k, v = extend("key", k), extend("value", v)
    attend = _attend_by_operator if g.opset >= 23 else _attend
    rows = attend(g, config, setting, path, q, k, v)
    return g.linear(rows, f"{path}.output", config.width, heads * width, f"{path}.output.out", bias=config.bias)


def _rope(g: Graph, x: str, tables: tuple[str, str], name: str) -> str:
    """Channel i of each head turned with channel i + K/2; the tables are [B, T, K/2], or [B, 1, T, K/2] in opset 18."""
    if g.opset >= 23:
        return g.add("RotaryEmbedding", [x, *tables], name)
    cos, sin = tables
    left, right = g.split("Split", [x], f"{name}.split", [f"{name}.left", f"{name}.right"], axis=-1, num_outputs=2)

    def combine(op: str, a: str, b: str, side: str) -> str:
        terms = [g.add("Mul", [x, table], f"{name}.{side}_{n}") for n, (x, table) in enumerate(((a, cos), (b, sin)))]
        return g.add(op, terms, f"{name}.{side}_out")

    turned = [combine("Sub", left, right, "first"), combine("Add", right, left, "second")]
    return g.add("Concat", turned, name, axis=-1)


def _attend_by_operator(g: Graph, config: DecoderConfig, setting: Prelude, path: str, q: str, k: str, v: str) -> str:
    """[B, H, T, K] over [B, G, S, K] with an explicit mask: [N, H·K]."""
    out = g.add("Attention", [q, k, v, setting.bias], f"{path}.mixed", scale=config.head_dim**-0.5)
    return _rows(g, config, path, g.add("Transpose", [out], f"{path}.mixed.last", perm=[0, 2, 1, 3]))


def _attend(g: Graph, config: DecoderConfig, setting: Prelude, path: str, q: str, k: str, v: str) -> str:
    """The same from products: the R query heads of a key head are an axis, and nothing is repeated."""
    groups, repeats, width = config.kv_heads, config.heads // config.kv_heads, config.head_dim
    # 0 copies the batch; -1 is the positions.
    q = g.add("Reshape", [q, g.integers(0, groups, repeats, -1, width)], f"{path}.query.grouped")  # [B, G, R, T, K]
    q = g.add("Mul", [q, g.number("scale", width**-0.5)], f"{path}.query.scaled")
    k = g.add("Transpose", [k], f"{path}.key.turned", perm=[0, 1, 3, 2])
    k, v = (
        g.add("Unsqueeze", [x, g.integers(2)], f"{path}.{which}.grouped") for which, x in (("key", k), ("value", v))
    )
    scores = g.add("Add", [g.add("MatMul", [q, k], f"{path}.products"), setting.bias], f"{path}.scores")
    weights = g.add("Softmax", [scores], f"{path}.weights", axis=-1)
    out = g.add("MatMul", [weights, v], f"{path}.mixed")  # [B, G, R, T, K]
    return _rows(g, config, path, g.add("Transpose", [out], f"{path}.mixed.last", perm=[0, 3, 1, 2, 4]))


def _rows(g: Graph, config: DecoderConfig, path: str, x: str) -> str:
    return g.add("Reshape", [x, g.integers(-1, config.heads * config.head_dim)], f"{path}.mixed.rows")

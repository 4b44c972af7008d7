"""What every block of the graph shares: the checked tokens' rows, the positions, what is visible, rotary tables."""

from typing import NamedTuple

from riftco.interchange.onnx_graph.builder import Graph
from riftco.models.config import DecoderConfig

# Added to the score of a key that is not visible. Not minus infinity: a row of padding that sees nothing must stay
# finite, for its keys and values are multiplied by 0 later, and 0 · NaN is NaN.
HIDDEN_SCORE = -1e30


class Prelude(NamedTuple):
    """Names of values.

    Attributes:
        x: the embedded tokens [N, D].
        row_shape: int64 [2], (B, T).
        head_shapes: {count of heads: int64 [4], (B, T, count, K)}.
        cache_shape: int64 [4], (B, G, S, K).
        bias: what is added to the scores: [B, 1, T, S], or [B, 1, 1, T, S] in opset 18.
        rope: cosines and sines of the queries' positions, see `_rope` in decoder.py; None for learned positions.
    """

    x: str
    row_shape: str
    head_shapes: dict[int, str]
    cache_shape: str
    bias: str
    rope: tuple[str, str] | None


def prelude(g: Graph, config: DecoderConfig, with_past: bool) -> Prelude:
    """The nodes before the first block.

    Args:
        g: the graph, empty.
        config: the decoder.
        with_past: whether there are cached keys and values.
    """
    row_shape = g.add("Shape", ["input_ids"], "row_shape")
    batch, new = (
        g.add("Slice", [row_shape, g.integers(n), g.integers(n + 1)], name) for n, name in enumerate(("batch", "new"))
    )
    if with_past:
        # Shape's own start and end would do, but data propagation in shape inference follows a slice further.
        past = g.add("Shape", ["past_key_values.0.key"], "past.shape")
        past = g.add("Slice", [past, g.integers(2), g.integers(3)], "past")
        total = g.add("Add", [past, new], "total")
    else:
        past, total = g.integers(0), new
    ids = _checked(g, config, row_shape, batch, total)
    positions = _positions(g)
    asked = g.add("Slice", [positions, past, total, g.integers(1)], "positions.asked") if with_past else positions
    return Prelude(
        _embed(g, config, ids, asked),
        row_shape,
        {
            count: g.add("Concat", [row_shape, g.integers(count, config.head_dim)], f"head_shape.{count}", axis=0)
            for count in sorted({config.heads, config.kv_heads})
        },
        g.add("Concat", [batch, g.integers(config.kv_heads), total, g.integers(config.head_dim)], "cache_shape", axis=0)
        if with_past
        else "",
        _bias(g, config, past, total, positions, asked),
        _tables(g, config, asked) if config.position == "rope" else None,
    )


def _checked(g: Graph, config: DecoderConfig, row_shape: str, batch: str, total: str) -> str:
    """The ids, if all inputs are acceptable.

    Faults are counted, and one element is reshaped to [1 + faults]: that fails on every device, where an index out of
    range might be clamped. The reshaped 1 is a factor of the ids, so that nothing may leave it out.
    """

    def count(condition: str, name: str) -> str:
        integers = g.add("Cast", [condition], f"{name}.integers", to=7)
        return g.add("ReduceSum", [integers], f"{name}.count", keepdims=0)

    def outside(x: str, low: int, high: int, name: str) -> str:
        below = g.add("Less", [x, g.integer(low)], f"{name}.below")
        above = g.add("Greater", [x, g.integer(high)], f"{name}.above")
        return count(g.add("Or", [below, above], name), name)

    mask_shape = g.add("Shape", ["attention_mask"], "guard.mask_shape")
    wanted = g.add("Concat", [batch, total], "guard.wanted_shape", axis=0)
    same = g.add("Equal", [mask_shape, wanted], "guard.same_shape")
    used = g.add("ReduceSum", ["attention_mask", g.integers(1)], "guard.used", keepdims=0)
    size = g.add("ReduceProd", [row_shape], "guard.size", keepdims=0)
    faults = outside("input_ids", 0, config.vocab_size - 1, "guard.ids")
    for other in (
        outside("attention_mask", 0, 1, "guard.mask"),
        count(g.add("Not", [same], "guard.other_shape"), "guard.shape"),
        outside(used, 0, config.context, "guard.length"),
        count(g.add("Equal", [size, g.integer(0)], "guard.empty"), "guard.empty"),
    ):
        faults = g.add("Add", [faults, other], f"{other}.total")
    shape = g.add("Reshape", [g.add("Add", [faults, g.integer(1)], "guard.one_and_faults"), g.integers(1)], "guard.to")
    guard = g.add("Reshape", [g.integers(1), shape], "guard.one")
    factor = g.add("ReduceSum", [guard], "guard.factor", keepdims=0)
    return g.add("Mul", ["input_ids", factor], "ids")


def _positions(g: Graph) -> str:
    """Of every key, int64 [B, S]; padding before the first token has the first token's."""
    count = g.add("CumSum", ["attention_mask", g.integer(1)], "positions.count")
    return g.add("Max", [g.add("Sub", [count, g.integer(1)], "positions.from_0"), g.integer(0)], "positions")


def _embed(g: Graph, config: DecoderConfig, ids: str, positions: str) -> str:
    def rows(path: str, count: int, indices: str) -> str:
        flat = g.add("Reshape", [indices, g.integers(-1)], f"{path}.indices")
        return g.add("Gather", [g.weight(f"{path}.weight", (count, config.width)), flat], f"{path}.rows", axis=0)

    x = rows("token_embedding", config.vocab_size, ids)
    if config.position == "rope":
        return x
    return g.add("Add", [x, rows("position_embedding", config.context, positions)], "embedded")


def _tables(g: Graph, config: DecoderConfig, positions: str) -> tuple[str, str]:
    shape = (config.context, config.head_dim // 2)
    cos, sin = (
        g.add("Gather", [g.weight(f"rope.{name}", shape), positions], f"rope.{name}.rows", axis=0)
        for name in ("cos", "sin")
    )
    if g.opset >= 23:
        return cos, sin
    first, second = (g.add("Unsqueeze", [x, g.integers(1)], f"{x}.heads") for x in (cos, sin))
    return first, second


def _bias(g: Graph, config: DecoderConfig, past: str, total: str, positions: str, asked: str) -> str:
    """0 where a query sees a key, `HIDDEN_SCORE` elsewhere.

    Causality compares places in the row, the window positions: padding may lie between.
    """
    end = g.add("Squeeze", [total, g.integers(0)], "visible.end")
    start = g.add("Squeeze", [past, g.integers(0)], "visible.start")
    keys = g.add("Range", [g.integer(0), end, g.integer(1)], "visible.keys")
    queries = g.add("Range", [start, end, g.integer(1)], "visible.queries")
    queries = g.add("Unsqueeze", [queries, g.integers(1)], "visible.queries.column")
    causal = g.add("LessOrEqual", [keys, queries], "visible.causal")  # [T, S]
    real = g.add("Cast", ["attention_mask"], "visible.real", to=9)
    real = g.add("Unsqueeze", [real, g.integers(1)], "visible.real.row")  # [B, 1, S]
    visible = g.add("And", [causal, real], "visible.causal_and_real")  # [B, T, S]
    if config.sliding_window is not None:
        own = g.add("Unsqueeze", [asked, g.integers(2)], "visible.own")
        others = g.add("Unsqueeze", [positions, g.integers(1)], "visible.others")
        age = g.add("Sub", [own, others], "visible.age")
        near = g.add("Less", [age, g.integer(config.sliding_window)], "visible.near")
        visible = g.add("And", [visible, near], "visible.windowed")
    bias = g.add("Where", [visible, g.number("zero", 0.0), g.number("hidden", HIDDEN_SCORE)], "bias.rows")
    axes = (1,) if g.opset >= 23 else (1, 2)
    return g.add("Unsqueeze", [bias, g.integers(*axes)], "bias")

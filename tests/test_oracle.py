"""The NumPy twins: known answers, then every cotangent against centred finite differences in float64."""

import math
import subprocess
import sys

import numpy as np
import pytest

from riftco import oracle
from riftco.errors import ConfigError, ShapeError

MASK = np.array([[True, False, True], [False, True, True]])


def normal(*shape):
    """Reproducible standard normal numbers; a function of the shape alone."""
    return np.random.default_rng([7, *shape]).standard_normal(shape)


def positive(*shape):
    return np.abs(normal(*shape)) + 0.5


def check_vjp(forward, backward, args, tolerance=1e-7):
    """Compares backward(*args, dy) with finite differences of forward(*args), for a random dy."""
    y = forward(*args)
    random = np.random.default_rng(3)
    if isinstance(y, tuple):
        dy = tuple(random.standard_normal(np.shape(piece)) for piece in y)
    else:
        dy = random.standard_normal(np.shape(y))
    expected = oracle.numerical_vjp(forward, args, dy)
    actual = backward(*args, dy)
    if len(args) == 1 and isinstance(args[0], list):
        expected = expected[0]
    assert isinstance(actual, tuple)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if theirs is None:
            assert ours is None
        else:
            assert np.shape(ours) == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def paired(name, *args, **static):
    """A case of check_vjp for the op `name` with static keywords."""
    forward, backward = getattr(oracle, name), getattr(oracle, f"{name}_vjp")
    return pytest.param(
        lambda *values: forward(*values, **static),
        lambda *values: backward(*values, **static),
        args,
        id=f"{name}-{'-'.join(f'{key}={value}' for key, value in static.items())}".rstrip("-"),
    )


X, Y = normal(2, 3), normal(2, 3)[::-1].copy()

ELEMENTWISE = [
    *[paired(name, X, Y) for name in ("add", "sub", "mul", "div", "maximum", "minimum")],
    *[paired(name, X, 0.3) for name in ("add", "sub", "mul", "div", "maximum", "minimum")],
    *[paired(name, 0.3, positive(2, 3)) for name in ("sub", "div")],
    paired("where", MASK, X, Y),
    paired("where", MASK, X, 2.0),
    *[paired(name, X) for name in ("neg", "exp", "tanh", "sigmoid", "erf", "relu", "relu2", "silu")],
    *[paired(name, positive(2, 3)) for name in ("log", "sqrt", "rsqrt")],
    paired("pow", X, exponent=3),
    paired("pow", X, exponent=0),
    paired("pow", positive(2, 3), exponent=-1.5),
    paired("gelu", X),
    paired("gelu", X, approximate=True),
    paired("swiglu", X, Y),
    paired("dropout", X, MASK, rate=0.25),
    paired("astype", X, dtype=np.float64),
]

X3 = normal(2, 3, 4)

REDUCTIONS = [
    *[paired(name, X3, axis=axis) for name in ("sum", "mean", "max", "logsumexp") for axis in (None, 1, -1, (0, 2))],
    *[paired(name, X3, axis=1, keepdims=True) for name in ("sum", "mean", "max", "logsumexp")],
    *[paired(name, X3, axis=axis) for name in ("softmax", "log_softmax", "cumsum") for axis in (0, 1, -1)],
]

PRODUCTS = [
    paired("matmul", normal(2, 3), normal(3, 4)),
    paired("matmul", normal(2, 2, 3), normal(2, 3, 4)),
    paired("linear", X3, normal(5, 4)),
    paired("linear", X3, normal(5, 4), normal(5)),
    paired("linear", X3, normal(5, 4), None),
    paired("linear", normal(4), normal(5, 4), normal(5)),
    paired("add_bias", X3, normal(4)),
    *[
        pytest.param(
            lambda *operands, spec=spec: oracle.einsum(spec, *operands),
            lambda *operands, spec=spec: oracle.einsum_vjp(spec, *operands),
            operands,
            id=f"einsum-{spec}",
        )
        for spec, operands in [
            ("ij,jk->ik", (normal(2, 3), normal(3, 4))),
            ("bthk,bshk->bhts", (normal(2, 3, 2, 2), normal(2, 2, 2, 2))),
            ("ij,ik->j", (normal(2, 3), normal(2, 4))),
            ("ij->", (normal(2, 3),)),
            ("i,j,ij->j", (normal(2), normal(3), normal(2, 3))),
        ]
    ],
]

INDICES = np.array([[2, 0, 2], [1, 1, 3]])

MOVES = [
    paired("reshape", X3, shape=(4, -1)),
    paired("transpose", X3),
    paired("transpose", X3, axes=(1, 2, 0)),
    paired("transpose", X3, axes=(0, -1, 1)),
    paired("broadcast_to", normal(3, 1), shape=(2, 3, 4)),
    paired("broadcast_to", np.array(1.5), shape=(2, 3)),
    paired("concatenate", [normal(2, 3), normal(2, 1), normal(2, 2)], axis=-1),
    paired("split", normal(2, 6), sections=3, axis=1),
    paired("split", normal(2, 6), sections=[1, 3, 2], axis=-1),
    paired("slice", X3, starts=(0, 1, 1), limits=(2, 3, 4)),
    paired("slice", X3, starts=(0, 0, 0), limits=(1, 3, 4), strides=(1, 2, 3)),
    paired("dynamic_update_slice", X3, normal(1, 2, 2), np.array([1, 1, 0])),
    paired("take", normal(4, 3), INDICES),
    paired("take", normal(2, 4, 3), INDICES, axis=1),
    paired("take", normal(2, 4), INDICES, axis=-1),
    paired("take", normal(2, 4), np.array(3), axis=1),
    paired("take_along_axis", normal(2, 4), INDICES, axis=1),
    paired("take_along_axis", normal(4, 3), INDICES, axis=0),
]

COS, SIN = oracle.rope_tables(np.arange(3), 4)
BATCH_COS, BATCH_SIN = oracle.rope_tables(np.array([[0, 1, 2], [5, 6, 7]]), 4)

LAYERS = [
    paired("layer_norm", X3, normal(4), normal(4) + 1.0),
    paired("layer_norm", X3, normal(4), normal(4), eps=0.1),
    paired("rms_norm", X3, normal(4)),
    paired("rms_norm", X3, normal(4), eps=0.1),
    paired("rope", normal(2, 3, 2, 4), COS, SIN),
    paired("rope", normal(2, 3, 2, 4), BATCH_COS, BATCH_SIN),
]

Q, K, V = normal(2, 4, 4, 3), normal(2, 5, 2, 3), normal(2, 5, 2, 3)[::-1].copy()
Q_SEGMENTS, KV_SEGMENTS = np.array([[0, 0, 1, 1], [0, 1, 1, 9]]), np.array([[0, 0, 1, 1, 2], [0, 0, 1, 1, 1]])
MASKINGS = [
    {},
    {"causal": False},
    {"window": 2},
    {"causal": False, "window": 2},
    {"q_offset": 1, "window": 3},
    {"q_offset": np.array([0, 3])},
    {"q_offset": -2},
    {"kv_lengths": np.array([3, 0]), "causal": False},
    {"q_segment_ids": Q_SEGMENTS, "kv_segment_ids": KV_SEGMENTS, "causal": False},
    {"logits_soft_cap": 0.7, "scale": 1.3},
]
ATTENTION = [
    *[paired("attention", Q, K, V, **masking) for masking in MASKINGS],
    *[paired("attention_weights", Q, K, **masking) for masking in MASKINGS],
    paired("attention_statistics", Q, K),
    paired("attention_statistics", Q, K, window=2, logits_soft_cap=0.7),
]

LOGITS, TARGETS, WEIGHTS = (
    normal(2, 3, 5),
    np.array([[0, 4, 2], [2, 2, 1]]),
    np.array([[1.0, 0.5, 0.0], [2.0, 1.0, 3.0]]),
)
LOSSES = [
    {},
    {"reduction": "sum"},
    {"weights": WEIGHTS},
    {"weights": WEIGHTS, "reduction": "sum", "ignore_index": 2},
    {"ignore_index": 2},
    {"label_smoothing": 0.2},
    {"z_loss": 0.1},
    {"time_range": (1, 2)},
    {"weights": WEIGHTS, "ignore_index": 1, "label_smoothing": 0.1, "z_loss": 0.01, "time_range": (0, 2)},
]


@pytest.mark.parametrize(
    ("forward", "backward", "args"), ELEMENTWISE + REDUCTIONS + PRODUCTS + MOVES + LAYERS + ATTENTION
)
def test_vjp_is_the_finite_difference(forward, backward, args):
    check_vjp(forward, backward, args)


@pytest.mark.parametrize("options", LOSSES)
def test_cross_entropy_vjp_is_the_finite_difference(options):
    def backward(logits, targets, dy):
        dlogits, *rest = oracle.cross_entropy_vjp(logits, targets, dy, **options)
        assert rest == [None, None]
        return dlogits, None

    check_vjp(lambda logits, targets: oracle.cross_entropy(logits, targets, **options), backward, (LOGITS, TARGETS))


@pytest.mark.parametrize("options", LOSSES)
def test_linear_cross_entropy_vjp_is_the_finite_difference(options):
    x, weight, bias = normal(2, 3, 4), normal(5, 4), normal(5)
    check_vjp(
        lambda *args: oracle.linear_cross_entropy(*args, **options),
        lambda *args: oracle.linear_cross_entropy_vjp(*args, **options),
        (x, weight, TARGETS),
    )
    check_vjp(
        lambda x, weight, targets, bias: oracle.linear_cross_entropy(x, weight, targets, bias=bias, **options),
        lambda x, weight, targets, bias, dy: oracle.linear_cross_entropy_vjp(
            x, weight, targets, dy, bias=bias, **options
        ),
        (x, weight, TARGETS, bias),
    )


def test_every_forward_has_a_cotangent_and_a_case_here():
    """A twin added to one of these files without its vjp, or without a case above, fails here."""
    files = ("elementwise", "activation", "reduce", "linalg", "shape", "index", "norm", "rope", "loss", "attention")
    helpers = {"as_float64", "rope_tables"}
    names = {
        name
        for name in dir(oracle)
        if getattr(getattr(oracle, name), "__module__", "") in {f"riftco.oracle.{file}" for file in files}
    }
    forwards = {name for name in names if not name.endswith("_vjp")} - helpers
    assert {f"{name}_vjp" for name in forwards} == names - forwards - helpers
    cases = {case.id.split("-")[0] for case in ELEMENTWISE + REDUCTIONS + PRODUCTS + MOVES + LAYERS + ATTENTION}
    assert forwards - cases == {"cross_entropy", "linear_cross_entropy"}


@pytest.mark.tiny
def test_the_oracle_loads_no_jax():
    program = "import riftco.oracle, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---------------------------------------------------------------------------- known answers, elementwise and shapes


def test_astype_rounds_and_its_cotangent_does_not():
    assert oracle.astype(np.array([0.1]), np.float16)[0] == float(np.float16(0.1))
    assert oracle.astype_vjp(np.array([0.1]), np.array([0.3]), dtype=np.float16)[0] == 0.3


@pytest.mark.tiny
def test_elementwise_known_answers():
    np.testing.assert_allclose(oracle.erf([0.0, 0.5, -1.0]), [0.0, 0.5204998778130465, -0.8427007929497149], rtol=1e-15)
    np.testing.assert_allclose(oracle.gelu([1.0, -1.0]), [0.8413447460685429, -0.15865525393145707], rtol=1e-15)
    np.testing.assert_allclose(oracle.gelu([1.0], approximate=True), [0.8411919906082768], rtol=1e-15)
    np.testing.assert_allclose(oracle.silu([1.0, -1000.0, 1000.0]), [0.7310585786300049, 0.0, 1000.0], atol=1e-300)
    np.testing.assert_allclose(oracle.swiglu([1.0], [3.0]), [3 * 0.7310585786300049], rtol=1e-15)
    assert oracle.add(np.float32(0.1), 0.2).dtype == np.float64
    assert oracle.erf_vjp(np.zeros(1), np.ones(1))[0][0] == pytest.approx(2 / math.sqrt(math.pi))


def test_infinities_and_nan():
    infinities = np.array([-np.inf, np.inf])
    silu = oracle.silu(infinities)
    assert silu[0] == 0.0 and np.signbit(silu[0]) and silu[1] == np.inf
    assert oracle.silu_vjp(infinities, [2.0, 2.0])[0].tolist() == [0.0, 2.0]
    x = np.array([np.nan, 0.0, -1.0, 2.0])
    np.testing.assert_equal(oracle.relu(x), [np.nan, 0.0, 0.0, 2.0])
    np.testing.assert_equal(oracle.relu_vjp(x, np.full(4, 3.0))[0], [np.nan, 0.0, 0.0, 3.0])
    np.testing.assert_equal(oracle.log([-1.0, 0.0]), [np.nan, -np.inf])
    np.testing.assert_equal(oracle.div([1.0, 0.0], [0.0, 0.0]), [np.inf, np.nan])
    np.testing.assert_equal(oracle.sigmoid([-1e4, 1e4]), [0.0, 1.0])


def test_nothing_warns_where_nan_flows():
    x = np.array([[np.inf, -np.inf, np.nan, 1e200]])
    for y in (
        oracle.add(x, x[:, ::-1]),
        oracle.linear(x, np.zeros((1, 4))),
        oracle.layer_norm(x, np.ones(4), np.ones(4)),
        oracle.layer_norm_vjp(x, np.ones(4), np.ones(4), x)[0],
        oracle.rms_norm_vjp(x, np.ones(4), x)[0],
        oracle.softmax_vjp(x, x)[0],
        oracle.attention(x[:, None, None], x[:, None, None], x[:, None, None]),
    ):
        assert np.isnan(y).any()
    assert np.isnan(oracle.softmax([-np.inf, -np.inf])).all()


def test_ties_are_shared():
    x = np.array([1.0, 2.0, 3.0])
    assert [part.tolist() for part in oracle.maximum_vjp(x, np.full(3, 2.0), [1, 1, 1])] == [[0, 0.5, 1], [1, 0.5, 0]]
    assert [part.tolist() for part in oracle.minimum_vjp(x, np.full(3, 2.0), [1, 1, 1])] == [[1, 0.5, 0], [0, 0.5, 1]]
    assert oracle.max_vjp([[2.0, 1.0, 2.0], [0.0, 5.0, 4.0]], [6.0, 1.0], axis=1)[0].tolist() == [[3, 0, 3], [0, 1, 0]]


def test_shapes_are_explicit():
    with pytest.raises(ShapeError, match=r"mul: .*got \(2, 3\) and \(3,\)\. Broadcast"):
        oracle.mul(normal(2, 3), normal(3))
    with pytest.raises(ShapeError, match="matmul"):
        oracle.matmul(normal(1, 2, 3), normal(2, 3, 4))
    with pytest.raises(ShapeError, match="einsum"):
        oracle.einsum("ii->i", normal(3, 3))
    with pytest.raises(ShapeError, match="split"):
        oracle.split(normal(5), 2, 0)
    with pytest.raises(ShapeError, match="slice"):
        oracle.slice(normal(5), (0,), (6,))
    with pytest.raises(ShapeError, match="G dividing H"):
        oracle.attention(normal(1, 2, 3, 2), normal(1, 2, 2, 2), normal(1, 2, 2, 2))


def test_an_index_out_of_range_reads_nan_and_has_no_gradient():
    table = normal(3, 2)
    rows = oracle.take(table, np.array([0, 3, -1]))
    np.testing.assert_equal(rows, [table[0], [np.nan, np.nan], [np.nan, np.nan]])
    dtable, none = oracle.take_vjp(table, np.array([0, 3, -1, 0]), np.ones((4, 2)))
    assert none is None
    assert dtable.tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_equal(
        oracle.take_along_axis(table, np.array([[2], [0], [1]]), 1)[:, 0], [np.nan, *table[1:, [0, 1]].diagonal()]
    )
    poisoned = oracle.dynamic_update_slice(table, normal(1, 2), (3, 0))
    assert np.isnan(poisoned[2]).all() and (poisoned[:2] == table[:2]).all()
    assert not oracle.dynamic_update_slice_vjp(table, normal(1, 2), (-1, 0), np.ones((3, 2)))[1].any()


def test_split_and_slice_read_the_right_elements():
    first, second = oracle.split(np.arange(6.0), [2, 4], 0)
    assert first.tolist() == [0, 1] and second.tolist() == [2, 3, 4, 5]
    assert oracle.slice(np.arange(10.0), (1,), (8,), (3,)).tolist() == [1, 4, 7]
    updated = oracle.dynamic_update_slice(np.zeros((2, 3)), np.ones((1, 2)), (1, 1))
    assert updated.tolist() == [[0, 0, 0], [0, 1, 1]]


# ---------------------------------------------------------------------------- known answers, softmax, norms, losses


@pytest.mark.tiny
def test_softmax_known_answers():
    assert oracle.softmax([0.0, -np.inf]).tolist() == [1.0, 0.0]
    assert oracle.softmax_vjp([0.0, -np.inf], [3.0, 5.0])[0].tolist() == [0.0, 0.0]
    large = np.array([1e4, 0.0, -1e4])
    assert oracle.softmax(large).tolist() == [1.0, 0.0, 0.0]
    assert oracle.log_softmax(large).tolist() == [0.0, -1e4, -2e4]
    assert oracle.logsumexp(large) == 1e4
    assert oracle.logsumexp([-np.inf, -np.inf]) == -np.inf
    assert oracle.logsumexp([-np.inf, 0.0, 0.0]) == pytest.approx(math.log(2.0))
    np.testing.assert_allclose(oracle.softmax(X3, 1).sum(axis=1), 1.0, atol=1e-15)
    np.testing.assert_allclose(oracle.softmax(X3 + 100.0, 1), oracle.softmax(X3, 1), atol=1e-13)


def test_norms_known_answers():
    y = oracle.layer_norm([[1.0, 2.0, 3.0]], np.ones(3), np.zeros(3), eps=0.0)
    np.testing.assert_allclose(y, [[-math.sqrt(1.5), 0.0, math.sqrt(1.5)]], rtol=1e-15)
    assert oracle.layer_norm(np.full((2, 3), 7.0), np.ones(3), [1.0, 2.0, 3.0]).tolist() == [[1, 2, 3], [1, 2, 3]]
    np.testing.assert_allclose(oracle.layer_norm(X3, np.ones(4), np.zeros(4)).mean(axis=-1), 0.0, atol=1e-15)
    np.testing.assert_allclose(oracle.rms_norm([[3.0, 4.0]], [1.0, 2.0], eps=0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]])


@pytest.mark.tiny
def test_cross_entropy_known_answers():
    assert oracle.cross_entropy(np.zeros((4, 3)), [0, 1, 2, 0]) == pytest.approx(math.log(3.0))
    assert oracle.cross_entropy([[1e4, 0.0, -1e4]], [0]) == 0.0
    assert oracle.cross_entropy([[1e4, 0.0, -1e4]], [2]) == 20000.0
    assert oracle.cross_entropy([[0.0, -2e38]], [1]) == pytest.approx(2e38)
    dlogits, _, _ = oracle.cross_entropy_vjp(LOGITS, TARGETS, 1.0)
    np.testing.assert_allclose(dlogits.sum(axis=-1), 0.0, atol=1e-16)


def test_cross_entropy_terms_by_hand():
    row = np.array([[math.log(1.0), math.log(3.0)]])  # p = 1/4, 3/4; logsumexp = log 4
    assert oracle.cross_entropy(row, [1]) == pytest.approx(math.log(4 / 3))
    smoothed = 0.8 * math.log(4 / 3) + 0.2 * (math.log(4) + math.log(4 / 3)) / 2
    assert oracle.cross_entropy(row, [1], label_smoothing=0.2) == pytest.approx(smoothed)
    assert oracle.cross_entropy(row, [1], z_loss=0.5) == pytest.approx(math.log(4 / 3) + 0.5 * math.log(4) ** 2)
    both = np.concatenate([row, row])
    weighted = (3 * math.log(4 / 3) + math.log(4)) / 4
    assert oracle.cross_entropy(both, [1, 0], weights=[3.0, 1.0]) == pytest.approx(weighted)
    assert oracle.cross_entropy(both, [1, 0], weights=[3.0, 1.0], reduction="sum") == pytest.approx(4 * weighted)
    assert oracle.cross_entropy(both, [1, -100], ignore_index=-100) == pytest.approx(math.log(4 / 3))
    assert oracle.cross_entropy(both, [1, 0], time_range=(1, 1)) == pytest.approx(math.log(4))


def test_cross_entropy_positions_that_do_not_count():
    dlogits, _, _ = oracle.cross_entropy_vjp(LOGITS, TARGETS, 1.0, time_range=(1, 1))
    assert not dlogits[:, [0, 2]].any() and dlogits[:, 1].all()
    assert oracle.cross_entropy(LOGITS, np.full((2, 3), -1), ignore_index=-1) == 0.0
    assert not oracle.cross_entropy_vjp(LOGITS, np.full((2, 3), -1), 1.0, ignore_index=-1)[0].any()
    assert np.isnan(oracle.cross_entropy(LOGITS, [[0, 1, 5], [0, 0, 0]]))
    assert np.isnan(oracle.cross_entropy(LOGITS, [[0, 1, -1], [0, 0, 0]]))
    assert np.isfinite(oracle.cross_entropy(LOGITS, [[0, 1, -1], [0, 0, 0]], weights=[[1, 1, 0], [1, 1, 1]]))
    with pytest.raises(ShapeError, match="time_range"):
        oracle.cross_entropy(LOGITS, TARGETS, time_range=(2, 2))
    with pytest.raises(ConfigError, match="reduction"):
        oracle.cross_entropy(LOGITS, TARGETS, reduction="none")


# ---------------------------------------------------------------------------- known answers, rotary embedding


@pytest.mark.tiny
def test_rope_known_answers():
    cos, sin = oracle.rope_tables(np.array([0, 1, 2]), 4, theta=100.0)
    np.testing.assert_allclose(cos, np.cos([[0, 0], [1, 0.1], [2, 0.2]]), rtol=1e-15)
    x = normal(1, 3, 2, 4)
    y = oracle.rope(x, cos, sin)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])
    expected = x[0, 2, 1, 1] * math.cos(0.2) - x[0, 2, 1, 3] * math.sin(0.2)
    assert y[0, 2, 1, 1] == pytest.approx(expected)
    np.testing.assert_allclose((y**2).sum(axis=-1), (x**2).sum(axis=-1), rtol=1e-13)


def test_rope_scores_depend_on_the_distance_alone():
    q, k = np.tile(normal(1, 1, 1, 8), (1, 5, 1, 1)), np.tile(normal(1, 1, 1, 8) + 1.0, (1, 5, 1, 1))
    cos, sin = oracle.rope_tables(np.arange(5), 8)
    scores = np.einsum("tk,sk->ts", oracle.rope(q, cos, sin)[0, :, 0], oracle.rope(k, cos, sin)[0, :, 0])
    for distance in range(-4, 5):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-12)


def test_rope_scalings_by_hand():
    positions = np.array([1])
    plain = np.array([10000.0 ** (-i / 4) for i in range(4)])
    linear, _ = oracle.rope_tables(positions, 8, scaling={"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(linear[0], np.cos(plain / 4), rtol=1e-15)

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _, sin = oracle.rope_tables(positions, 8, scaling={**llama3, "original_max_position_embeddings": 128})
    # 128 positions make 20.4, 2.04, 0.204 and 0.0204 turns: kept, blended, slowed, slowed.
    kept = (128 * 0.1 / (2 * math.pi) - 1) / 3
    frequencies = [1.0, 0.1 * (kept + (1 - kept) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(np.arcsin(sin[0]), frequencies, rtol=1e-13)

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    cos, sin = oracle.rope_tables(positions, 8, scaling=yarn)
    attention_factor = 0.1 * math.log(4.0) + 1.0
    np.testing.assert_allclose(np.hypot(cos, sin), attention_factor, rtol=1e-15)
    # Channels that make 32 and 1 turns: 1.31 and 2.81, so the ramp runs from 1 to 3.
    frequencies = [1.0, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4]
    np.testing.assert_allclose(np.arctan2(sin, cos)[0], frequencies, rtol=1e-13)
    cos, _ = oracle.rope_tables(np.array([0]), 8, scaling={**yarn, "attention_factor": 0.5})
    np.testing.assert_array_equal(cos, np.full((1, 4), 0.5))


def test_rope_refuses_what_it_cannot_scale():
    with pytest.raises(ConfigError, match="dynamic"):
        oracle.rope_tables(np.arange(2), 4, scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="needs 'factor'"):
        oracle.rope_tables(np.arange(2), 4, scaling={"rope_type": "linear"})
    with pytest.raises(ConfigError, match="must agree"):
        oracle.rope_tables(np.arange(2), 4, scaling={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ConfigError, match="even"):
        oracle.rope_tables(np.arange(2), 5)


# ---------------------------------------------------------------------------- known answers, attention


def allowed(b, t, s, *, causal=True, window=None, q_offset=0, kv_lengths=None, q_segment_ids=None, kv_segment_ids=None):
    """The mask as one sentence, written apart from the oracle's loop."""
    position = np.broadcast_to(q_offset, 2)[b] + t
    return bool(
        (not causal or position >= s)
        and (window is None or (position - s < window if causal else abs(position - s) < window))
        and (kv_lengths is None or s < kv_lengths[b])
        and (q_segment_ids is None or q_segment_ids[b, t] == kv_segment_ids[b, s])
    )


@pytest.mark.parametrize("masking", MASKINGS[:-1])
def test_attention_masks_to_exact_zeros(masking):
    weights = oracle.attention_weights(Q, K, **masking)
    statistics = oracle.attention_statistics(Q, K, **masking)
    context = oracle.attention(Q, K, V, **masking)
    dense = np.einsum("bthk,bshk->bhts", Q, np.repeat(K, 2, axis=2)) / math.sqrt(3.0)
    mask = np.array([[[allowed(b, t, s, **masking) for s in range(5)] for t in range(4)] for b in range(2)])[:, None]
    exponentials = np.where(mask, np.exp(dense), 0.0)
    total = exponentials.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, exponentials / np.where(total == 0.0, 1.0, total), rtol=1e-13)
    assert ((weights == 0.0) == ~np.broadcast_to(mask, weights.shape)).all()
    np.testing.assert_allclose(np.exp(statistics), total[..., 0], rtol=1e-13)
    np.testing.assert_allclose(context, np.einsum("bhts,bshk->bthk", weights, np.repeat(V, 2, axis=2)), atol=1e-14)


@pytest.mark.tiny
def test_the_future_contributes_exactly_nothing():
    q, k, v = normal(1, 4, 2, 3), normal(1, 4, 1, 3), normal(1, 4, 1, 3)
    weights = oracle.attention_weights(q, k)
    assert (weights[0][:, np.triu(np.ones((4, 4), bool), 1)] == 0.0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-15)
    context = oracle.attention(q, k, v)
    k[:, 3], v[:, 3] = np.nan, np.inf
    np.testing.assert_array_equal(oracle.attention(q, k, v)[:, :3], context[:, :3])
    dy = np.zeros_like(q)
    dy[:, :3] = 1.0
    k[:, 3], v[:, 3] = 1e4, 1e4
    dq, dk, dv = oracle.attention_vjp(q, k, v, dy)
    assert not dq[:, 3].any() and not dk[:, 3].any() and not dv[:, 3].any()
    assert dq[:, 1:3].all() and dv[:, :3].all()


def test_a_row_with_nothing_to_attend_to_is_zero():
    options = {"kv_lengths": np.array([0, 5])}
    assert not oracle.attention(Q, K, V, **options)[0].any()
    assert (oracle.attention_statistics(Q, K, **options)[0] == -np.inf).all()
    for cotangent in oracle.attention_vjp(Q, K, V, np.ones_like(Q), **options):
        assert not cotangent[0].any() and cotangent[1].any()


def test_uniform_scores_count_the_keys():
    statistics = oracle.attention_statistics(np.zeros((1, 4, 1, 2)), normal(1, 4, 1, 2))
    np.testing.assert_allclose(statistics[0, 0], np.log([1, 2, 3, 4]), rtol=1e-15)
    with pytest.raises(ConfigError, match="come together"):
        oracle.attention(Q, K, V, q_segment_ids=Q_SEGMENTS)
    with pytest.raises(TypeError, match="windw"):
        oracle.attention(Q, K, V, windw=2)


# ---------------------------------------------------------------------------- decoder

GPT = {"heads": 2, "kv_heads": 2, "norm": "layer", "mlp": "gelu", "position": "learned", "norm_eps": 1e-5}
LLAMA = {"heads": 4, "kv_heads": 2, "norm": "rms", "mlp": "swiglu", "position": "rope", "norm_eps": 1e-6}


def decoder_params(options, vocab=7, context=6, width=8, hidden=10, layers=2, head_dim=4, tied=False):
    """Random parameters under the native names."""
    gpt = options["norm"] == "layer"
    shapes = {"token_embedding.weight": (vocab, width)}
    if options["position"] == "learned":
        shapes["position_embedding.weight"] = (context, width)
    query_width, key_width = options["heads"] * head_dim, options["kv_heads"] * head_dim
    feed_forward = (
        {"expand": (hidden, width), "project": (width, hidden)}
        if gpt
        else {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    )
    linears = {
        "attention.query": (query_width, width),
        "attention.key": (key_width, width),
        "attention.value": (key_width, width),
        "attention.output": (width, query_width),
        **{f"feed_forward.{name}": shape for name, shape in feed_forward.items()},
    }
    for layer in range(layers):
        for name, shape in linears.items():
            shapes[f"blocks.{layer}.{name}.weight"] = shape
            if gpt:
                shapes[f"blocks.{layer}.{name}.bias"] = shape[:1]
    for norm in ["final_norm", *[f"blocks.{i}.{n}_norm" for i in range(layers) for n in ("attention", "feed_forward")]]:
        shapes[f"{norm}.scale"] = (width,)
        if gpt:
            shapes[f"{norm}.bias"] = (width,)
    if not tied:
        shapes["language_model_head.weight"] = (vocab, width)
    random = np.random.default_rng(5)
    return {name: random.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("options", "tied"),
    [(GPT, False), (GPT, True), (LLAMA, False), (LLAMA, True), ({**GPT, "mlp": "gelu_tanh"}, False)],
)
def test_decoder_is_causal_and_keeps_rows_apart(options, tied):
    params = decoder_params(options, tied=tied)
    options = {**options, "rope_theta": 1e4, "tied": tied}
    tokens = np.array([[1, 2, 3, 4], [6, 5, 0, 0]])
    logits = oracle.decoder_logits(params, tokens, **options)
    assert logits.shape == (2, 4, 7) and logits.dtype == np.float64
    changed = tokens.copy()
    changed[0, 2] = 6
    difference = oracle.decoder_logits(params, changed, **options) != logits
    assert not difference[0, :2].any() and not difference[1].any() and difference[0, 2:].all()


def test_decoder_loss_is_the_cross_entropy_of_its_logits():
    params, options = decoder_params(GPT), {**GPT, "rope_theta": 1e4}
    tokens, targets = np.array([[1, 2, 3]]), np.array([[2, 3, 4]])
    logits = oracle.decoder_logits(params, tokens, **options)
    expected = -np.log(oracle.softmax(logits)[0, [0, 1, 2], [2, 3, 4]]).mean()
    assert oracle.decoder_loss(params, tokens, targets, **options) == pytest.approx(expected, rel=1e-12)


def test_decoder_reads_every_parameter():
    for options in (GPT, LLAMA):
        params, keywords = decoder_params(options), {**options, "rope_theta": 1e4}
        if options is LLAMA:  # per-head norms, as in Qwen 3
            params |= {f"blocks.{i}.attention.{n}_norm.scale": normal(4) for i in (0, 1) for n in ("query", "key")}
        tokens = np.array([[1, 2, 3, 4, 5, 6]])
        logits = oracle.decoder_logits(params, tokens, **keywords)
        for name, value in params.items():
            other = oracle.decoder_logits({**params, name: value * 1.1}, tokens, **keywords)
            changed = np.abs(other - logits).max() > 1e-9
            assert changed == (not name.endswith("attention.key.bias")), name  # shifts every score of a row alike


def test_decoder_window_sees_its_last_keys_only():
    params, options = decoder_params(LLAMA, layers=1), {**LLAMA, "rope_theta": 1e4, "sliding_window": 2}
    logits = oracle.decoder_logits(params, [[1, 2, 3, 4]], **options)
    other = oracle.decoder_logits(params, [[5, 2, 3, 4]], **options)
    assert ((other != logits).any(axis=-1) == [[True, True, False, False]]).all()


# ---------------------------------------------------------------------------- the judge itself


def test_numerical_vjp_on_a_known_derivative():
    dx, none, dlist = oracle.numerical_vjp(
        lambda x, n, ys: (x**n, ys[0] * ys[1]),
        (np.array([2.0, 3.0]), 3, [np.array(2.0), np.array(5.0)]),
        (np.array([1.0, 10.0]), 1.0),
    )
    np.testing.assert_allclose(dx, [12.0, 270.0], rtol=1e-8)
    assert none is None
    np.testing.assert_allclose(dlist, [5.0, 2.0], rtol=1e-8)


def test_a_cotangent_wrong_by_one_percent_is_noticed():
    with pytest.raises(AssertionError):
        check_vjp(oracle.tanh, lambda x, dy: (1.01 * oracle.tanh_vjp(x, dy)[0],), (X,))

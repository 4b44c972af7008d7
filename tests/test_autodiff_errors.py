"""What a wrong derivative looks like: each mistake is one typed error that names the value or the path."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import ops
from riftco.autodiff import Op
from riftco.errors import ConfigError, DTypeError, GradError, ShapeError

X = jnp.asarray([0.3, -1.2, 2.0])
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(jnp.sin, id="jnp.sin"),
        pytest.param(jnp.sum, id="jnp.sum"),
        pytest.param(jnp.asarray, id="jnp.asarray"),
        pytest.param(jnp.square, id="jnp.square"),
        pytest.param(lambda x: jnp.dot(X, x), id="jnp.dot"),
        pytest.param(lambda x: jnp.einsum("i,i->", x, X), id="jnp.einsum"),
        pytest.param(lambda x: jnp.where(X > 0, x, X), id="jnp.where"),
        pytest.param(lambda x: jnp.concatenate([X, x]), id="jnp.concatenate"),
        pytest.param(lambda x: jnp.stack([x, x]), id="jnp.stack"),
        pytest.param(lambda x: jnp.reshape(x, (3, 1)), id="jnp.reshape"),
        pytest.param(lambda x: jnp.maximum(x, 0), id="jnp.maximum"),
        pytest.param(lambda x: X.at[0].set(x[0]), id=".at[].set"),
        pytest.param(jax.nn.softmax, id="jax.nn.softmax"),
        pytest.param(jax.nn.relu, id="jax.nn.relu"),
        pytest.param(jax.lax.stop_gradient, id="lax.stop_gradient"),
        pytest.param(lambda x: jax.lax.add(x, X), id="lax.add"),
        pytest.param(lambda x: jax.lax.dot(x, X), id="lax.dot"),
        pytest.param(np.sin, id="np.sin"),
        pytest.param(np.sum, id="np.sum"),
        pytest.param(np.asarray, id="np.asarray"),
        pytest.param(lambda x: np.dot(np.ones(3), x), id="np.dot"),
        pytest.param(lambda x: np.stack([x, x]), id="np.stack"),
        pytest.param(lambda x: np.concatenate([np.ones(3), x]), id="np.concatenate"),
        pytest.param(lambda x: jax.jit(lambda v: v * 2.0)(x), id="jit inside"),
        pytest.param(lambda x: jax.jit(lambda v: v * x)(X), id="jit around a captured value"),
        pytest.param(lambda x: jax.vmap(lambda v: v * 2.0)(x), id="vmap inside"),
        pytest.param(lambda x: jax.lax.cond(True, lambda v: v, lambda v: v, x), id="lax.cond"),
        pytest.param(lambda x: jax.lax.scan(lambda c, v: (c + v, ()), x[0], X)[0], id="lax.scan"),
        pytest.param(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * x[0], X[0]), id="lax.fori_loop"),
        pytest.param(lambda x: 2.0**x, id="an operator riftco does not define"),
        pytest.param(float, id="float()"),
        pytest.param(lambda x: 1.0 if x[0] else 2.0, id="bool()"),
        pytest.param(lambda x: list(range(3))[x[0]], id="index"),
        pytest.param(lambda x: sum(x), id="iteration"),
        pytest.param(lambda x: [a for a in x], id="unpacking"),
    ],
)
def test_a_box_handed_to_anything_else_is_an_error(misuse):
    with pytest.raises(GradError, match=r"(argument 0|output of \w+): a value being differentiated \(float32"):
        riftco.grad(lambda x: ops.sum(misuse(x)))(X)


def test_a_missing_attribute_says_where_to_look():
    with pytest.raises(AttributeError, match=r"argument 0: .* has no attribute 'mean'; use the function of riftco.ops"):
        riftco.grad(lambda x: x.mean())(X)


def test_the_users_own_type_errors_pass_through():
    def f(x):
        return ops.sum(x, no_such_option=1)

    with pytest.raises(TypeError, match=r"no_such_option"):
        riftco.grad(f)(X)
    with pytest.raises(DTypeError, match=r"one dtype"):
        riftco.grad(lambda x: ops.sum(x * X.astype(jnp.bfloat16)))(X)


def test_comparisons_are_plain_and_never_silently_false():
    seen = []

    def f(x):
        seen.extend([x == X, x != X, x > 0, x <= X, 0 < x])
        return ops.sum(ops.where(x == X[0], x, 0.0))

    np.testing.assert_array_equal(riftco.grad(f)(X), [1, 0, 0])
    assert all(isinstance(one, jax.Array) and one.dtype == bool for one in seen)
    assert seen[0].all() and not seen[1].any()


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("arguments", "argnums", "path"),
    [
        (
            ({"layers": [{"w": X, "packed": jnp.arange(3, dtype=jnp.uint8)}]},),
            0,
            r"argument 0\.layers\.0\.packed: .*uint8",
        ),
        ((X, {"ids": jnp.arange(3)}), 1, r"argument 1\.ids: only floating .* got int32\[3\]"),
        ((X, 3), -1, "argument 1: only floating .* got int"),
        ((KEY,), 0, r"argument 0: only floating .* got key<fry>\[\]"),
        ((True,), 0, "argument 0: .* got bool"),
        (("text",), 0, "argument 0: .* got str"),
        ((X.astype(jnp.complex64),), 0, r"argument 0: .* got complex64"),
    ],
)
def test_leaves_that_are_not_floating_are_named(arguments, argnums, path):
    with pytest.raises(GradError, match=path):
        riftco.grad(lambda *a: jnp.ones(()), argnums)(*arguments)


def test_outputs_that_are_not_floating_are_named():
    with pytest.raises(GradError, match=r"vjp: output\.a\.1 must be a floating array; got int32\[3\].*has_aux"):
        riftco.vjp(lambda x: {"a": (x, jnp.arange(3))}, X)
    with pytest.raises(GradError, match=r"vjp: output must be a floating array; got str"):
        riftco.vjp(lambda x: "text", X)
    with pytest.raises(GradError, match=r"must return \(output, aux\); got Box"):
        riftco.vjp(lambda x: x, X, has_aux=True)


@pytest.mark.parametrize("f", [lambda x: x, lambda x: (ops.sum(x),), lambda x: {}, lambda x: x[:1]])
def test_grad_refuses_what_is_not_a_scalar(f):
    with pytest.raises(GradError, match=r"grad: the function must return a floating scalar; got .*Use riftco.vjp"):
        riftco.grad(f)(X)


@pytest.mark.parametrize("argnums", [1, -2, (0, 1), 0.0, "a", (0, 0), (0, -1)])
def test_argnums_out_of_range_or_twice(argnums):
    with pytest.raises((GradError, TypeError), match=r"argnums|not iterable"):
        riftco.grad(ops.sum, argnums)(X)


@pytest.mark.parametrize(
    ("cotangent", "message"),
    [
        ({"a": X}, r"structure of the output.*missing at output\.b\.0"),
        ({"a": X, "b": [X], "c": X}, r"unexpected at output\.c"),
        ([X, X], "structure"),
        (X, "structure"),
        ({"a": X, "b": [X[:2]]}, r"cotangent at output\.b\.0 must be float32\[3\]; got float32\[2\]"),
        ({"a": X.astype(jnp.float16), "b": [X]}, r"output\.a must be float32\[3\]; got float16\[3\]"),
        ({"a": jnp.arange(3), "b": [X]}, r"output\.a must be float32\[3\]; got int32\[3\]"),
        ({"a": 1.0, "b": [X]}, r"output\.a must be float32\[3\]; got float32\[\]"),
        ({"a": "one", "b": [X]}, r"output\.a must be float32\[3\]; got str"),
    ],
)
def test_wrong_cotangents_name_the_path(cotangent, message):
    _, pull = riftco.vjp(lambda x: {"a": x * 2.0, "b": [ops.exp(x)]}, X)
    with pytest.raises(GradError, match=message):
        pull(cotangent)
    ok = pull({"a": np.ones(3, np.float32), "b": [jnp.zeros(3)]})
    np.testing.assert_array_equal(ok[0], [2, 2, 2])


# ------------------------------------------------------------------------------------------------ captured values


@pytest.mark.tiny
@pytest.mark.parametrize("level", [1, 2])
def test_a_value_captured_by_a_scan_body_is_an_error(level):
    used = lambda x: riftco.scan(lambda c, _: (c * x[0], ()), x[1], None, length=2)[0]
    returned = lambda x: riftco.scan(lambda c, _: (c, x[0]), x[1], None, length=2)[1][0]
    as_carry = lambda x: riftco.scan(lambda c, _: (x[0], ()), x[1], None, length=2)[0]
    unrelated = lambda x: riftco.scan(lambda c, _: (c + x[0], ()), jnp.ones(()), None, length=2)[0]
    for f in (used, returned, as_carry, unrelated):
        g = f if level == 1 else lambda x, f=f: ops.sum(riftco.grad(f)(x) * x)
        with pytest.raises(GradError, match=r"scan: .*captured by closure.*pass it as scan\(..., \*shared\)"):
            riftco.grad(g)(X)
    whole = lambda x: riftco.scan(lambda c, _: (c, x), x[1], None, length=2)[1][0, 0]
    with pytest.raises(GradError, match=r"scan: .*\(argument 0, float32\[3\]\)"):
        riftco.grad(whole)(X)


def test_a_value_captured_by_a_checkpointed_function_is_an_error():
    for f in (
        lambda x: riftco.checkpoint(lambda y: ops.sum(y * x))(X),
        lambda x: riftco.checkpoint(lambda y: ops.sum(y * x))(x),
        lambda x: ops.sum(riftco.checkpoint(lambda y: x)(X)),
        lambda x: ops.sum(riftco.checkpoint(lambda y: {"a": [y, x]})(x)["a"][1]),
    ):
        with pytest.raises(GradError, match=r"checkpoint: .*captured by closure.*an argument of the function given to"):
            riftco.grad(f)(X)


def test_an_outer_value_captured_inside_an_inner_derivative():
    # By closure into an inner derivative it is fine; into a loop inside that derivative it is not.
    def inner(x):
        return riftco.grad(lambda y: riftco.scan(lambda c, v: (c * v * x[0], ()), y, X)[0])(x[1])

    with pytest.raises(GradError, match=r"scan: .*captured by closure"):
        riftco.grad(inner)(X)


def test_stop_gradient_makes_a_captured_value_a_constant():
    f = lambda x: riftco.scan(lambda c, v: (c + v * riftco.stop_gradient(x)[0], ()), x[1], x)[0]
    np.testing.assert_allclose(riftco.grad(f)(X), [0.3, 1.3, 0.3], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ nothing left behind


def test_a_box_kept_from_a_derivative_that_has_ended():
    kept = []
    riftco.grad(lambda x: kept.append(x * 2.0) or ops.sum(x))(X)
    for use in (
        lambda: kept[0] + 1.0,
        lambda: ops.sum(kept[0]),
        lambda: riftco.grad(lambda y: ops.sum(kept[0] * y))(X),
    ):
        with pytest.raises(
            GradError, match=r"output of mul \(float32\[3\]\) was kept from a derivative that has ended"
        ):
            use()
    with pytest.raises((TypeError, GradError), match=r"Box|being differentiated"):
        jnp.sum(kept[0])
    np.testing.assert_array_equal(riftco.stop_gradient(kept[0]), 2.0 * X)


class PlannedError(Exception):
    pass


def failing(where):
    def rule(name):
        def run(*args):
            if where == name:
                raise PlannedError(name)
            return {"impl": lambda x: x * 2.0, "fwd": lambda x: (op(x), x), "bwd": lambda x, ct: (ct * 2.0,)}[name](
                *args
            )

        return run

    op = Op("failing", *(rule(name) for name in ("impl", "fwd", "bwd")))
    return op


@pytest.mark.parametrize("where", ["impl", "fwd", "bwd"])
@pytest.mark.parametrize("wrap", ["plain", "scan", "checkpoint", "second order", "jit"])
def test_an_exception_inside_a_rule_leaves_no_trace(where, wrap):
    good = lambda x: ops.sum(riftco.scan(lambda c, v: (ops.tanh(c * v), c), x[0], x)[1])
    before = np.asarray(riftco.grad(good)(X))
    op = failing(where)
    bad = {
        "plain": lambda x: ops.sum(op(x)),
        "scan": lambda x: riftco.scan(lambda c, v: (c + op(v), ()), x[0], x)[0],
        "checkpoint": lambda x: riftco.checkpoint(lambda v: ops.sum(op(v)))(x),
        "second order": lambda x: ops.sum(riftco.grad(lambda v: ops.sum(op(v) * v))(x)),
        "jit": lambda x: ops.sum(op(x)),
    }[wrap]
    derivative = jax.jit(riftco.grad(bad)) if wrap == "jit" else riftco.grad(bad)
    with pytest.raises(PlannedError, match=where):
        derivative(X)
    np.testing.assert_array_equal(riftco.grad(good)(X), before)
    assert float(riftco.grad(lambda x: riftco.grad(lambda y: x * y)(x) * x)(jnp.asarray(3.0))) == 6.0


def test_a_vjp_that_failed_can_be_called_again():
    op = failing("none")
    _, pull = riftco.vjp(lambda x: op(x) * x, X)
    expected = pull(jnp.ones(3))
    with pytest.raises(GradError):
        pull(jnp.ones(2))
    assert operator.eq(*(np.asarray(p[0]).tobytes() for p in (expected, pull(jnp.ones(3)))))


# ------------------------------------------------------------------------------------------------ scans and checkpoints


@pytest.mark.parametrize(
    ("body", "init", "xs", "error", "message"),
    [
        (lambda c, x: ((c, c), ()), X, X, GradError, "carry of the structure"),
        (lambda c, x: ({"a": c["a"]}, ()), {"a": X, "b": X}, X, GradError, "carry of the structure"),
        (lambda c, x: c, X, X, GradError, r"must return \(carry, y\); got"),
        (lambda c, x: (c, (), ()), X, X, GradError, r"must return \(carry, y\); got tuple"),
        (
            lambda c, x: ({"a": c["a"][:1]}, ()),
            {"a": X},
            X,
            ShapeError,
            r"carry\.a must keep .*float32\[3\]; .*float32\[1\]",
        ),
        (lambda c, x: (c.astype(jnp.int32), ()), X, X, DTypeError, r"carry must keep .*float32\[3\]; .*int32\[3\]"),
        (lambda c, x: (c, ()), X, None, ShapeError, "Pass length="),
        (
            lambda c, x: (c, ()),
            X,
            {"a": X, "b": X[:2]},
            ShapeError,
            r"xs\.b must have a leading axis of 3 .*float32\[2\]",
        ),
        (lambda c, x: (c, ()), X, {"a": X[0]}, ShapeError, r"xs\.a must have a leading axis"),
    ],
)
def test_scans_that_do_not_fit_are_refused(body, init, xs, error, message):
    with pytest.raises(error, match=message):
        riftco.scan(body, init, xs)


def test_checkpoint_names_an_array_that_is_gone_when_it_runs_again():
    def body(c, x):
        mask = x > 0  # made inside the loop, and captured
        return riftco.checkpoint(lambda v: ops.where(mask, v, v * 2.0))(c), ()

    xs = jnp.stack([X, X])
    with pytest.raises(GradError, match=r"scan: .*no longer exists; .*riftco.checkpoint captured it by closure"):
        riftco.grad(lambda x: ops.sum(riftco.scan(body, x, xs)[0]))(X)

    def given(c, x):
        return riftco.checkpoint(lambda v, mask: ops.where(mask, v, v * 2.0))(c, x > 0), ()

    np.testing.assert_allclose(riftco.grad(lambda x: ops.sum(riftco.scan(given, x, xs)[0]))(X), [1, 4, 1])


@pytest.mark.parametrize(
    ("f", "args", "what"),
    [
        (lambda x: jnp.arange(3), (X,), "output"),
        (lambda x: x[:0], (X,), "output"),
        (lambda n: jnp.ones(2), (jnp.arange(3),), "input"),
        (lambda x: jnp.ones(2), (X[:0],), "input"),
    ],
)
def test_a_check_that_compares_nothing_is_refused(f, args, what):
    with pytest.raises(GradError, match=f"check_grads: a floating {what} that is not empty is required"):
        riftco.check_grads(f, args)


@pytest.mark.parametrize("options", [{"directions": 0}, {"order": 0}])
def test_a_check_of_no_direction_or_order_is_refused(options):
    with pytest.raises(ConfigError, match="check_grads: order and directions must be at least 1"):
        riftco.check_grads(lambda x: x * x, (X,), **options)

"""Products: matmul, einsum, linear."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from riftco.autodiff.tape import Op
from riftco.errors import ShapeError
from riftco.ops import validate
from riftco.ops.shape import broadcast_to, reshape, transpose
from riftco.types import Array

# A product of two matrices that contracts one axis of each. The family is closed under differentiation, and a
# transposed operand is never materialised. Everything `linear` does goes through it.


def _dot_impl(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())))


def _dot_fwd(a: Any, b: Any, contract: tuple[int, int], needs: tuple[bool, bool]) -> Any:
    return dot(a, b, contract=contract), (a if needs[1] else None, b if needs[0] else None)


def _dot_bwd(saved: Any, ct: Any, contract: tuple[int, int]) -> Any:
    a, b = saved
    free_a, free_b = 1 - contract[0], 1 - contract[1]
    da = db = None
    if b is not None:
        da = dot(ct, b, contract=(1, free_b)) if contract[0] == 1 else dot(b, ct, contract=(free_b, 1))
    if a is not None:
        db = dot(ct, a, contract=(0, free_a)) if contract[1] == 1 else dot(a, ct, contract=(free_a, 0))
    return da, db


dot = Op("dot", _dot_impl, _dot_fwd, _dot_bwd, takes_needs=True)


def sum_rows(x: Any) -> Any:
    """The sum of [..., D] over all axes but the last, as a product with ones.

    XLA may fuse what makes the rows into a plain sum, and the order in which a CPU then adds them depends on what was
    fused. A product takes its operand from memory, so gradients keep their bits whatever surrounds them: with block
    checkpointing, say, and without.
    """
    rows = reshape(x, (-1, x.shape[-1]))
    return reshape(dot(jnp.ones((rows.shape[0], 1), x.dtype), rows, contract=(0, 0)), x.shape[-1:])


def _matmul_fwd(a: Any, b: Any, needs: tuple[bool, bool]) -> Any:
    return _matmul(a, b), (a if needs[1] else None, b if needs[0] else None)


def _matmul_bwd(saved: Any, ct: Any) -> Any:
    a, b = saved
    return None if b is None else _matmul(ct, _swap(b)), None if a is None else _matmul(_swap(a), ct)


def _swap(x: Any) -> Any:
    return transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


_matmul = Op("matmul", impl=jnp.matmul, fwd=_matmul_fwd, bwd=_matmul_bwd, takes_needs=True)


def matmul(a: Array, b: Array) -> Array:
    """The matrix product over the last two axes.

    Args:
        a: floating array [..., M, N].
        b: floating array [..., N, O] of the same dtype and the same leading axes.

    Returns:
        [..., M, O].

    Raises:
        ShapeError: if ranks, leading axes or inner sizes differ. DTypeError: if dtypes do.

    Gradient:
        da = ct bᵀ, db = aᵀ ct. Saves what the wanted cotangents need. Any order.
    """
    a, b = validate.floating("matmul", "a", a), validate.floating("matmul", "b", b)
    validate.same_dtype("matmul", a, b)
    fits = a.ndim == b.ndim >= 2 and tuple(a.shape[:-2]) == tuple(b.shape[:-2]) and a.shape[-1] == b.shape[-2]
    validate.require(
        "matmul",
        fits,
        "arrays must be [..., M, N] and [..., N, O] with equal leading axes",
        f"{list(a.shape)} and {list(b.shape)}",
    )
    return _matmul(a, b)


def _parse(spec: str, operands: tuple[Any, ...]) -> tuple[list[str], str]:
    inputs, arrow, output = spec.replace(" ", "").partition("->")
    terms = inputs.split(",")
    sizes: dict[str, int] = {}
    ok = arrow == "->" and len(terms) == len(operands) and len(set(output)) == len(output)
    for term, operand in zip(terms, operands, strict=False):
        ok = ok and len(term) == operand.ndim and len(set(term)) == len(term) and (not term or term.isalpha())
        for letter, size in zip(term, operand.shape, strict=False):
            ok = ok and sizes.setdefault(letter, size) == size
    ok = ok and all(letter in sizes for letter in output)
    if not ok:
        raise ShapeError(
            f"einsum: the spec must name each axis of each operand once, with '->' and one size a letter; got {spec!r} "
            f"for {', '.join(str(list(o.shape)) for o in operands)}."
        )
    return terms, output


def _einsum_bwd(operands: list[Any], ct: Any, spec: str) -> Any:
    terms, output = _parse(spec, tuple(operands))
    sizes = {
        letter: n for term, o in zip(terms, operands, strict=True) for letter, n in zip(term, o.shape, strict=True)
    }
    cts = []
    for i, term in enumerate(terms):
        others = [(t, o) for j, (t, o) in enumerate(zip(terms, operands, strict=True)) if j != i]
        available = set(output).union(*(t for t, _ in others)) if others else set(output)
        reached = "".join(letter for letter in term if letter in available)
        inner = ",".join([output, *(t for t, _ in others)])
        part = _einsum([ct, *(o for _, o in others)], spec=f"{inner}->{reached}")
        # A letter that only this operand has was summed over: its cotangent is the same all along it.
        part = reshape(part, [sizes[letter] if letter in reached else 1 for letter in term])
        cts.append(broadcast_to(part, operands[i].shape))
    return (cts,)


_einsum = Op(
    "einsum",
    impl=lambda operands, spec: jnp.einsum(spec, *operands),
    fwd=lambda operands, spec: (_einsum(operands, spec=spec), operands),
    bwd=_einsum_bwd,
)


def einsum(spec: str, *operands: Array) -> Array:
    """Products and sums of named axes, as `numpy.einsum`.

    Args:
        spec: for example "bthk,bshk->bhts": an explicit output, no repeated letter inside a term, no ellipsis.
        *operands: floating arrays of one dtype.

    Raises:
        ShapeError: if the spec and the shapes do not match. DTypeError: if dtypes differ.

    Gradient:
        the einsum of ct with the other operands. Saves the operands. Any order.
    """
    arrays = [validate.floating("einsum", f"operand {i}", x) for i, x in enumerate(operands)]
    validate.same_dtype("einsum", *arrays)
    _parse(spec, tuple(arrays))
    return _einsum(arrays, spec=spec.replace(" ", ""))


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """`x Wᵀ + b` over the last axis.

    Args:
        x: floating array [..., I].
        weight: [O, I], of x's dtype.
        bias: [O], or None.

    Returns:
        [..., O].

    Raises:
        ShapeError: if the sizes do not fit. DTypeError: if dtypes differ.

    Gradient:
        dx = ct W, dW = ctᵀ x, db = sum of ct over the leading axes. Leading axes are flattened, so each is one matrix
        product. Saves x if dW is wanted and W if dx is. Any order.
    """
    x, weight = validate.floating("linear", "x", x), validate.floating("linear", "weight", weight)
    validate.same_dtype("linear", x, weight, *(() if bias is None else (bias,)))
    fits = x.ndim >= 1 and weight.ndim == 2 and x.shape[-1] == weight.shape[1]
    validate.require(
        "linear", fits, "x must be [..., I] and weight [O, I]", f"{list(x.shape)} and {list(weight.shape)}"
    )
    out = dot(reshape(x, (-1, x.shape[-1])), weight, contract=(1, 1))
    if bias is not None:
        out = add_bias(out, bias)
    return reshape(out, (*x.shape[:-1], weight.shape[0]))


_add_bias = Op(
    "add_bias",
    impl=lambda x, bias: x + jnp.broadcast_to(bias, x.shape),
    fwd=lambda x, bias: (_add_bias(x, bias), ()),
    bwd=lambda _, ct: (ct, sum_rows(ct)),
)


def add_bias(x: Array, bias: Array) -> Array:
    """`x + bias`, the bias repeated over the leading axes.

    Args:
        x: floating array [..., D].
        bias: [D], of x's dtype.

    Raises:
        ShapeError, DTypeError: if they do not fit.

    Gradient:
        dx = ct, dbias = the sum of ct over the leading axes. Saves nothing. Any order.
    """
    x, bias = validate.floating("add_bias", "x", x), validate.floating("add_bias", "bias", bias)
    validate.same_dtype("add_bias", x, bias)
    fits = x.ndim >= 1 and bias.ndim == 1 and x.shape[-1] == bias.shape[0]
    validate.require("add_bias", fits, "x must be [..., D] and bias [D]", f"{list(x.shape)} and {list(bias.shape)}")
    return _add_bias(x, bias)

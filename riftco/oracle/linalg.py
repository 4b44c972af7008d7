"""Matrix products, in NumPy float64."""

import numpy as np

from riftco.errors import ShapeError
from riftco.oracle.elementwise import as_float64


@np.errstate(all="ignore")
def matmul(a, b):
    """a[..., I, J] · b[..., J, K] -> [..., I, K]; equal ranks and equal leading dimensions."""
    a, b = as_float64(a), as_float64(b)
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul: a[..., I, J] and b[..., J, K] need equal leading dimensions; got {a.shape} and {b.shape}. "
            "Broadcast or reshape first."
        )
    return np.matmul(a, b)


@np.errstate(all="ignore")
def matmul_vjp(a, b, dy):
    """Cotangents (dy · bᵀ, aᵀ · dy)."""
    a, b, dy = as_float64(a), as_float64(b), as_float64(dy)
    return np.matmul(dy, np.swapaxes(b, -1, -2)), np.matmul(np.swapaxes(a, -1, -2), dy)


def _parse(spec: str, count: int) -> tuple[list[str], str]:
    """The letters of each operand and of the output."""
    left, arrow, output = spec.replace(" ", "").partition("->")
    inputs = left.split(",")
    repeated = any(len(set(letters)) != len(letters) for letters in [*inputs, output])
    if not arrow or "." in spec or repeated or len(inputs) != count:
        raise ShapeError(
            f"einsum: the spec must name {count} operands and the output ('ij,jk->ik'), without ellipsis and without "
            f"a letter twice in one of them; got {spec!r}. Write every axis out."
        )
    return inputs, output


@np.errstate(all="ignore")
def einsum(spec, *operands):
    """The sum over all letters that are not in the output of the product of the operands."""
    _parse(spec, len(operands))
    return np.einsum(spec, *[as_float64(operand) for operand in operands])


@np.errstate(all="ignore")
def einsum_vjp(spec, *operands_and_dy):
    """One cotangent per operand; the last argument is that of the output, after the operands.

    The cotangent of one operand is the einsum of dy with the other operands onto its letters. A letter that only this
    operand has was summed away on its own: an operand of ones copies the cotangent along it.
    """
    *operands, dy = [as_float64(operand) for operand in operands_and_dy]
    inputs, output = _parse(spec, len(operands))
    cotangents = []
    for position, (letters, operand) in enumerate(zip(inputs, operands, strict=True)):
        others = [other for index, other in enumerate(inputs) if index != position]
        other_operands = [other for index, other in enumerate(operands) if index != position]
        lonely = [letter for letter in letters if letter not in output and not any(letter in other for other in others)]
        ones = np.ones([operand.shape[letters.index(letter)] for letter in lonely])
        backward = ",".join([output, *others, "".join(lonely)]) + "->" + letters
        cotangents.append(np.einsum(backward, dy, *other_operands, ones))
    return tuple(cotangents)


@np.errstate(all="ignore")
def linear(x, weight, bias=None):
    """x[..., I] · weight[O, I]ᵀ + bias[O] -> [..., O]."""
    x, weight = as_float64(x), as_float64(weight)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: x[..., I] needs weight[O, I]; got x {x.shape} and weight {weight.shape}. "
            "Weights are stored with the output axis first."
        )
    y = np.matmul(x, weight.T)
    return y if bias is None else add_bias(y, bias)


@np.errstate(all="ignore")
def linear_vjp(x, weight, *bias_and_dy) -> tuple:
    """Cotangents of linear.

    Called as linear_vjp(x, weight, dy) -> (dx, dweight), or as linear_vjp(x, weight, bias, dy) -> (dx, dweight, dbias),
    where dbias is None if bias is.
    """
    x, weight, dy = as_float64(x), as_float64(weight), as_float64(bias_and_dy[-1])
    rows, row_cotangents = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    dx = np.matmul(dy, weight)
    dweight = np.matmul(row_cotangents.T, rows)
    if len(bias_and_dy) == 1:
        return dx, dweight
    return dx, dweight, None if bias_and_dy[0] is None else row_cotangents.sum(axis=0)


@np.errstate(all="ignore")
def add_bias(x, bias):
    """x[..., D] + bias[D]."""
    x, bias = as_float64(x), as_float64(bias)
    if x.ndim < 1 or bias.shape != x.shape[-1:]:
        raise ShapeError(
            f"add_bias: bias must have the shape of x's last axis; got x {x.shape} and bias {bias.shape}. "
            "Reshape the bias to one axis."
        )
    return x + bias


@np.errstate(all="ignore")
def add_bias_vjp(x, bias, dy):
    """Cotangents (dy, dy summed over all axes but the last)."""
    dy = as_float64(dy)
    return dy, dy.reshape(-1, dy.shape[-1]).sum(axis=0)

"""Rotary position embedding: pairs of channels turned by an angle that grows with the position."""

from typing import Any

import jax.numpy as jnp

from riftco.autodiff.tape import Op
from riftco.ops import validate
from riftco.ops.reduce import sum
from riftco.ops.shape import split
from riftco.types import Array


def _rotate(x: Any, cos: Any, sin: Any, sign: float) -> Any:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = (t[None, :, None, :] if t.ndim == 2 else t[:, :, None, :] for t in (cos, sin))
    return jnp.concatenate([first * cos - sign * (second * sin), second * cos + sign * (first * sin)], axis=-1)


def _rope_fwd(x: Any, cos: Any, sin: Any, sign: float, needs: tuple[bool, bool, bool]) -> Any:
    return _rope(x, cos, sin, sign=sign), (x if needs[1] or needs[2] else None, cos, sin)


def _rope_bwd(saved: Any, ct: Any, sign: float) -> Any:
    x, cos, sin = saved
    dx = _rope(ct, cos, sin, sign=-sign)  # the transpose of a rotation turns the other way
    if x is None:
        return dx, None, None
    first, second = split(x, 2)
    dfirst, dsecond = split(ct, 2)
    heads = (0, 2) if cos.ndim == 2 else 2
    dcos = sum(dfirst * first + dsecond * second, heads)
    dsin = sign * sum(dsecond * first - dfirst * second, heads)
    return dx, dcos, dsin


_rope = Op("rope", impl=_rotate, fwd=_rope_fwd, bwd=_rope_bwd, takes_needs=True)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate channel i of each head with channel i + K/2 by the angle of its position.

    Args:
        x: queries or keys [B, T, H, K], K even.
        cos: cosines [T, K/2], or [B, T, K/2] for positions of each row, of x's dtype (`rope_tables` of
            `riftco.models.rotary_tables` makes them).
        sin: sines, like `cos`.

    Returns:
        An array like x. Position 0 is left as it is.

    Raises:
        ShapeError: if K is odd or the tables do not fit. DTypeError: if dtypes differ.

    Gradient:
        dx = ct rotated back; dcos and dsin are summed over the heads (and rows). Saves the tables, and x only if the
        tables are differentiated. Any order.

    Source:
        Su et al. 2021, arXiv:2104.09864, eq. 34, in the split-half pairing of the Llama checkpoints.
    """
    x = validate.floating("rope", "x", x)
    cos, sin = validate.floating("rope", "cos", cos), validate.floating("rope", "sin", sin)
    validate.same_dtype("rope", x, cos, sin)
    validate.require("rope", x.ndim == 4 and x.shape[-1] % 2 == 0, "x must be [B, T, H, K] with K even", list(x.shape))
    batch, time, _, width = x.shape
    fits = tuple(cos.shape) == tuple(sin.shape) and tuple(cos.shape) in ((time, width // 2), (batch, time, width // 2))
    validate.require(
        "rope", fits, f"cos and sin must be [{time}, {width // 2}] or [{batch}, {time}, {width // 2}]", list(cos.shape)
    )
    return _rope(x, cos, sin, sign=1.0)

"""The box: a floating array whose history is being recorded, and the errors that speak of one.

Not here: how a program is recorded (tape.py).
"""

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from riftco.errors import GradError
from riftco.tree import describe

if TYPE_CHECKING:
    from riftco.autodiff.tape import Trace


class Box:
    """A floating array whose history is being recorded. Use `riftco.ops` and `+ - * / @` on it, never jnp or np."""

    __slots__ = ("origin", "trace", "value", "variable")
    __array_ufunc__ = None  # NumPy arrays on the left of an operator leave it to us
    __array_priority__ = 1000

    def __init__(self, value: Any, trace: "Trace", variable: int, origin: str) -> None:
        self.value, self.trace, self.variable, self.origin = value, trace, variable, origin

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """The dtype; always floating."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.value.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.value.shape, dtype=np.int64))

    def __len__(self) -> int:
        return self.value.shape[0]

    def __repr__(self) -> str:
        return f"Box({describe(self)}, {self.origin})"

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise foreign_function_error(self)

    def __getattr__(self, name: str) -> Any:
        # An AttributeError, so that hasattr() keeps its meaning; jax probes for protocols this way.
        raise AttributeError(
            f"{self.origin}: a value being differentiated ({describe(self)}) has no attribute {name!r}; "
            "use the function of riftco.ops."
        )

    def _concrete_error(self, *args: Any) -> Any:
        raise GradError(
            f"{self.origin}: a value being differentiated ({describe(self)}) has no Python number; "
            "return it as an auxiliary output (has_aux=True) or use riftco.ops.where."
        )

    __float__ = __int__ = __bool__ = __index__ = _concrete_error

    def __iter__(self) -> Any:
        raise GradError(
            f"{self.origin}: a value being differentiated ({describe(self)}) cannot be iterated over; "
            "index it, x[i], or use riftco.ops.split."
        )

    def __add__(self, other: Any) -> Any:
        return _operator("add")(self, other)

    def __radd__(self, other: Any) -> Any:
        return _operator("add")(other, self)

    def __sub__(self, other: Any) -> Any:
        return _operator("sub")(self, other)

    def __rsub__(self, other: Any) -> Any:
        return _operator("sub")(other, self)

    def __mul__(self, other: Any) -> Any:
        return _operator("mul")(self, other)

    def __rmul__(self, other: Any) -> Any:
        return _operator("mul")(other, self)

    def __truediv__(self, other: Any) -> Any:
        return _operator("div")(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _operator("div")(other, self)

    def __matmul__(self, other: Any) -> Any:
        return _operator("matmul")(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _operator("matmul")(other, self)

    def __pow__(self, other: Any) -> Any:
        return _operator("pow")(self, other)

    def __neg__(self) -> Any:
        return _operator("neg")(self)

    # A comparison carries no derivative, so its result is a plain boolean array.
    def __lt__(self, other: Any) -> Any:
        return unbox(self) < unbox(other)

    def __le__(self, other: Any) -> Any:
        return unbox(self) <= unbox(other)

    def __gt__(self, other: Any) -> Any:
        return unbox(self) > unbox(other)

    def __ge__(self, other: Any) -> Any:
        return unbox(self) >= unbox(other)

    def __eq__(self, other: object) -> Any:
        return unbox(self) == unbox(other)

    def __ne__(self, other: object) -> Any:
        return unbox(self) != unbox(other)

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Any:
        return _operator("getitem")(self, index)


def _operator(name: str) -> Callable[..., Any]:
    # Operators are sugar for riftco.ops, one layer up; looked up when used, so that nothing above is imported here.
    return getattr(importlib.import_module("riftco.ops.operators"), name)


def foreign_function_error(box: Box) -> GradError:
    """The error for a box that reached jnp, np or any other function that is not riftco's."""
    return GradError(
        f"{box.origin}: a value being differentiated ({describe(box)}) was handed to a jnp or np function, a jax "
        "transformation or an operator that riftco does not define, where its derivative would be lost; use riftco.ops "
        "and riftco.scan, put jit and vmap outside the derivative, or riftco.stop_gradient if none is wanted."
    )


def unbox(x: Any) -> Any:
    """The plain array under any number of boxes."""
    while isinstance(x, Box):
        x = x.value
    return x


def is_floating(x: Any) -> bool:
    """Whether `x` has a real floating dtype, which is what can be differentiated."""
    dtype = getattr(x, "dtype", None)
    return isinstance(x, float) if dtype is None else _is_floating_dtype(dtype)


@functools.lru_cache(maxsize=256)
def _is_floating_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def captured_error(who: str, box: Box) -> GradError:
    """The error for a differentiated value that a body or rule reached without being handed it."""
    argument = "scan(..., *shared)" if who == "scan" else f"an argument of the function given to {who}"
    return GradError(
        f"{who}: the function uses a value being differentiated that it captured by closure ({box.origin}, "
        f"{describe(box)}); pass it as {argument}."
    )

"""What the registry is made of: an op's specification, its samples and its bad inputs, and how samples are drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from riftco import ops, oracle


class Draw:
    """Reproducible float64 and integer arrays for one sample."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal numbers."""
        return np.asarray(self._rng.standard_normal(shape))

    def positive(self, *shape: int) -> np.ndarray:
        """Numbers from 0.5 up."""
        return np.abs(self.normal(*shape)) + 0.5

    def integers(self, high: int, *shape: int) -> np.ndarray:
        """Whole numbers in [0, high), as int32."""
        return self._rng.integers(0, high, shape).astype(np.int32)

    def booleans(self, *shape: int) -> np.ndarray:
        """True or False, evenly."""
        return self._rng.random(shape) < 0.5


@dataclass(frozen=True)
class Call:
    """The arguments of one call. The floating arrays of `args` are differentiated; `kwargs` are held fixed."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    """The arguments, as they would be written in a call."""
    return Call(args, kwargs)


@dataclass(frozen=True)
class Sample:
    """One call that every check makes.

    Args:
        name: what makes it worth trying.
        make: the call's arguments from a `Draw`; floating arrays are float64 and are converted for each check.
        differences: to which order finite differences can check it: 0 at infinities, NaN or a change of dtype, 1 at a
            kink whose two slopes are averaged.
        jit_only: the call is an error on concrete data, and has a defined result under jit.
        thorough: float32, bfloat16 and second derivatives are checked too, as they are for every op's first sample.
    """

    name: str
    make: Callable[[Draw], Call]
    differences: int = 2
    jit_only: bool = False
    thorough: bool = False


@dataclass(frozen=True)
class BadInput:
    """A call that must raise `error` with `fragment` in its message."""

    name: str
    run: Callable[[], Any]
    error: type[Exception]
    fragment: str


def _positional_vjp(name: str) -> Callable[..., tuple[Any, ...]]:
    def backward(args: tuple[Any, ...], dy: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return getattr(oracle, f"{name}_vjp")(*args, dy, **kwargs)

    return backward


@dataclass(frozen=True)
class OpSpec:
    """Everything that is known about a public op.

    Args:
        name: its name in `riftco.ops`.
        tolerance: its class in `tolerances.TOLERANCES`.
        samples: calls to check.
        bad_inputs: calls that must be refused.
        run: the op as a function of a sample's arguments; `riftco.ops.name` when None.
        forward: its twin as a function of the same arguments; `riftco.oracle.name` when None.
        backward: `(args, dy, kwargs) -> one cotangent for each of args`; `riftco.oracle.name_vjp` when None.
    """

    name: str
    tolerance: str
    samples: tuple[Sample, ...]
    bad_inputs: tuple[BadInput, ...]
    run: Callable[..., Any] = None  # type: ignore[assignment]
    forward: Callable[..., Any] = None  # type: ignore[assignment]
    backward: Callable[..., Any] = None  # type: ignore[assignment]
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        # A seed of the name's own: adding an op leaves every other sample as it was.
        object.__setattr__(self, "seed", sum(ord(c) * 31**i for i, c in enumerate(self.name)) % 2**31)
        if self.run is None:
            object.__setattr__(self, "run", getattr(ops, self.name, None))
        if self.forward is None:
            object.__setattr__(self, "forward", getattr(oracle, self.name, None))
        if self.backward is None and hasattr(oracle, f"{self.name}_vjp"):
            object.__setattr__(self, "backward", _positional_vjp(self.name))

    def applies(self, sample: Sample, check: str) -> bool:
        """Whether a check of `riftco.ops.check` is made on a sample."""
        thorough = sample.thorough or sample is self.samples[0]
        match check:
            case "float64":
                return True
            case "float32" | "bfloat16":
                return thorough
            case "differences":
                return sample.differences >= 1 and not sample.jit_only
            case "second order":
                return sample.differences >= 2 and not sample.jit_only and thorough
            case _:
                raise ValueError(f"applies: unknown check {check!r}")

    def draw(self, sample: Sample) -> Call:
        """The arguments of a sample."""
        return sample.make(Draw(self.seed))

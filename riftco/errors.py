"""The error family, and the switch for the checks on data.

Every message has the form *who: what was required; what came; what to do*. Facts known while tracing
(shape, dtype, static values, names) always raise. Facts about data (the log of a non-positive number, an
index out of range) raise on concrete arrays outside jit unless `domain_checks(False)` is in force.
"""

import contextlib
import contextvars
from collections.abc import Generator


class RiftcoError(Exception):
    """Base of every error that riftco raises for a user's mistake; the CLI prints it as one sentence."""


class ShapeError(RiftcoError, ValueError):
    """An array has a shape that the function does not accept."""


class DTypeError(RiftcoError, TypeError):
    """An array has a dtype that the function does not accept, or two dtypes differ."""


class DomainError(RiftcoError, ValueError):
    """Concrete data lie outside an op's domain (log of a non-positive, an all −inf softmax slice, …)."""


class IndexRangeError(DomainError, IndexError):
    """A concrete index or token id is out of range."""


class GradError(RiftcoError, RuntimeError):
    """A derivative cannot be taken as asked: a captured value, a Box handed to jnp, a wrong cotangent."""


class ConfigError(RiftcoError, ValueError):
    """A configuration, flag or option is not acceptable."""


class UnsupportedError(RiftcoError, NotImplementedError):
    """What was asked for is a known choice that this build does not have; nothing else is put in its place."""


class DataError(RiftcoError, ValueError):
    """A corpus, a token shard or a batch source is not usable."""


class TokenizerError(RiftcoError, ValueError):
    """A tokenizer's state, or a text or id handed to it, is not acceptable."""


class CheckpointError(RiftcoError, RuntimeError):
    """A checkpoint is damaged, incomplete, or belongs to another run."""


class BundleError(RiftcoError, RuntimeError):
    """A model bundle is damaged, incomplete, or may not be written where asked."""


class BackendError(RiftcoError, RuntimeError):
    """The device or backend asked for is not available; the message carries the reason."""


class CapacityError(RiftcoError, RuntimeError):
    """A request cannot be taken: the queue is full, or it would never fit."""


class TrainingError(RiftcoError, RuntimeError):
    """Training stopped: a non-finite gradient or loss, with the step and the batch that caused it."""


_DOMAIN_CHECKS: contextvars.ContextVar[bool] = contextvars.ContextVar("riftco_domain_checks", default=True)


def domain_checks_enabled() -> bool:
    """Whether ops look at concrete data for domain errors."""
    return _DOMAIN_CHECKS.get()


@contextlib.contextmanager
def domain_checks(enabled: bool) -> Generator[None, None, None]:
    """Turn the eager checks on data on or off within a `with` block (per thread and context)."""
    token = _DOMAIN_CHECKS.set(enabled)
    try:
        yield
    finally:
        _DOMAIN_CHECKS.reset(token)

"""Several processes as one program."""

import jax

from riftco.errors import BackendError

_HEARTBEAT_SECONDS = 30
_SHUTDOWN_SECONDS = 15


def connect(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout_seconds: int = 120,
) -> None:
    """Join the other processes; called once, before anything else touches jax's devices.

    On TPU hosts and under the usual cluster managers jax finds the arguments by itself. A process that is lost is
    noticed within a minute: at once by a collective operation that waits for it, else by its missing heartbeat.

    Args:
        coordinator: "host:port" of process 0, reachable by all.
        processes: how many there are.
        process: which one this is, from 0.
        timeout_seconds: how long to wait for the others.

    Raises:
        BackendError: the others were not there in time, or the arguments cannot be found.
    """
    # The CPU's own collectives do not cross processes; gloo's do. Other platforms do not read this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise BackendError(
            f"connect: every process must reach the coordinator within {timeout_seconds} s; "
            f"{str(error).splitlines()[0]}; check the address, the port, and that all processes were started"
        ) from error


def is_from_jax(error: BaseException | None) -> bool:
    """Whether a collective operation failed somewhere below, a checkpoint's barrier included."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None

"""The `riftco` command: `main(argv)` finds the verb, reads its options, runs it, and makes a sentence of any failure.

Exit status: 0; 1 for a failure; 2 for a wrong command line or configuration; 130 after Ctrl-C, 143 after SIGTERM.
RIFTCO_TRACEBACK=1 shows the traceback of any failure. Verbs are imported when they are typed, so `riftco --help` starts
without jax.
"""

import contextlib
import difflib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from riftco.errors import ConfigError, RiftcoError

_HELP = ("-h", "--help", "help")
# Asking for what this build does not have is a wrong command line too.
_USAGE = (ConfigError, NotImplementedError)


class Terminated(BaseException):
    """SIGTERM arrived."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the words after `riftco`; those of the process by default.

    Returns:
        The exit status.
    """
    with _quiet_libraries():
        return _run([str(word) for word in (sys.argv[1:] if argv is None else argv)], owns_process=argv is None)


def _run(words: list[str], *, owns_process: bool) -> int:
    try:
        with _sigterm():
            status = _dispatch(words)
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        # The reader has gone; without this the interpreter complains once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt, Terminated) as error:
        status = _failed(words, error, *_sentence(error))
        if owns_process and not _wants_traceback():
            # Threads of the checkpoint writer may still print what they met; the sentence is the last word.
            sys.stderr.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return status


def _sentence(error: BaseException) -> tuple[str, int]:
    """What to say about a failure, and the exit status."""
    match error:
        case RiftcoError():
            return str(error), getattr(error, "exit_code", 2 if isinstance(error, _USAGE) else 1)
        case KeyboardInterrupt():
            return "interrupted", 130
        case Terminated():
            return "terminated", 143
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{error.strerror or error}", 1
        case MemoryError():
            return "out of memory; use a smaller --batch-size or a smaller model", 1
        case ImportError():
            return f"{error}; `riftco doctor` lists what each extra installs", 1
    if "RESOURCE_EXHAUSTED" in str(error):
        return "the device ran out of memory; use a smaller --batch-size or a smaller model", 1
    text = f"unexpected {type(error).__name__}: {error}"
    return f"{text}; RIFTCO_TRACEBACK=1 shows where; please report it", 1


def _dispatch(words: list[str]) -> int:
    from riftco.cli import help, verbs

    if not words or words[0] in _HELP:
        print(help.top())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        import riftco

        print(riftco.__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in verbs.VERBS:
        _refuse_verb(name, tuple(verbs.VERBS), verbs.LATER)
    if name == "bench":
        from riftco.cli import bench

        return bench.dispatch(rest)
    table, sub = verbs.actions(name), ""
    if name in verbs.GROUPS:
        if not rest or rest[0] in _HELP:
            print(help.group(name))
            return 0 if rest else 2
        sub, rest = rest[0], rest[1:]
        if sub not in table:
            _refuse_verb(sub, tuple(table), (), name)
    return _act(f"{name} {sub}".strip(), table[sub], rest)


def _act(name: str, action: Any, words: list[str]) -> int:
    from riftco.cli import help, verbs
    from riftco.cli.console import Console
    from riftco.cli.options import UsageError
    from riftco.cli.parse import parse

    if any(word in _HELP[:2] for word in words):
        print(help.verb(name, action))
        return 0
    try:
        options = parse(
            action.options,
            words,
            positional=action.positional,
            known_elsewhere=verbs.option_names,
            passed_over=verbs.keys_of(action.reads_config_of) if action.reads_config_of else (),
        )
        console = Console(options.json)
        summary = action.run(options, console)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    console.finish({"verb": name, **summary})
    return int(summary.get("exit_status", 0))


def _refuse_verb(name: str, known: tuple[str, ...], later: tuple[str, ...], group: str = "") -> NoReturn:
    verbs = f"the verbs of riftco {group}".rstrip() + f" are {', '.join(known)}"
    if name in later:
        raise ConfigError(f"'{name}' is not part of this version; {verbs}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise ConfigError(f"there is no verb '{name}'; " + (f"did you mean {close[0]}? " if close else "") + verbs)


def _failed(words: list[str], error: BaseException, message: str, status: int) -> int:
    if _wants_traceback():
        import traceback

        traceback.print_exception(error)
    message = " ".join(message.split())
    if words and _wants_json(words):
        import json

        with contextlib.suppress(OSError):  # stdout itself may be what failed
            said = {"verb": words[0], "error": message, "exit_status": status}
            print(json.dumps(said, ensure_ascii=False), flush=True)
    print(f"riftco: {message}", file=sys.stderr, flush=True)
    return status


def _wants_json(words: list[str]) -> bool:
    from riftco.cli.parse import wants_json

    return "--json" in words if words[0] == "bench" else wants_json(words[1:])


def _wants_traceback() -> bool:
    return os.environ.get("RIFTCO_TRACEBACK", "0") not in ("", "0")


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Mute what prints the traceback of an error that is also raised: Orbax's log, and callbacks of its event loop."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("absl", "asyncio"))}
    hook = sys.unraisablehook
    if not _wants_traceback():
        sys.unraisablehook = lambda _: None
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger, level in loggers.items():
            logger.setLevel(level)


@contextlib.contextmanager
def _sigterm() -> Iterator[None]:
    """SIGTERM as an exception while a command runs, where signals can be had at all."""

    def raise_it(signum: int, frame: Any) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

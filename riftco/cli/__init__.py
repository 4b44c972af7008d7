"""The `riftco` command: `main(argv)` finds the verb, reads its options, runs it, and makes a sentence of any failure.

Exit status: 0; 1 for a failure; 2 for a wrong command line or configuration; 130 after Ctrl-C, 143 after SIGTERM.
RIFTCO_TRACEBACK=1 shows the traceback of any failure. Verbs are imported when they are typed, so `riftco --help` starts
without jax.
"""

import contextlib
import difflib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from riftco.errors import ConfigError, RiftcoError

_HELP = ("-h", "--help", "help")


class Terminated(BaseException):
    """SIGTERM arrived."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the words after `riftco`; those of the process by default.

    Returns:
        The exit status.
    """
    words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        with _sigterm():
            return _dispatch(words)
    except RiftcoError as error:
        return _failed(
            words, error, str(error), getattr(error, "exit_code", 2 if isinstance(error, ConfigError) else 1)
        )
    except KeyboardInterrupt as error:
        return _failed(words, error, "interrupted", 130)
    except Terminated as error:
        return _failed(words, error, "terminated", 143)
    except BrokenPipeError:
        # The reader has gone; without this the interpreter complains once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _failed(words, error, f"{where}{error.strerror or error}", 1)
    except MemoryError as error:
        return _failed(words, error, "out of memory; use a smaller --batch-size or a smaller model", 1)
    except ImportError as error:
        return _failed(words, error, f"{error}; `riftco doctor` lists what each extra installs", 1)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return _failed(words, error, "the device ran out of memory; use a smaller --batch-size or model", 1)
        text = f"unexpected {type(error).__name__}: {error}"
        return _failed(words, error, f"{text}; RIFTCO_TRACEBACK=1 shows where; please report it", 1)


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
        options = parse(action.options, words, positional=action.positional, known_elsewhere=verbs.option_names)
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
    if os.environ.get("RIFTCO_TRACEBACK", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    message = " ".join(message.split())
    if "--json" in words:
        import json

        print(json.dumps({"verb": words[0], "error": message, "exit_status": status}, ensure_ascii=False), flush=True)
    print(f"riftco: {message}", file=sys.stderr, flush=True)
    return status


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

"""`riftco tokenizer train|encode|decode|inspect`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

from riftco.cli.console import Console
from riftco.cli.options import Common, UsageError, flag, flag_name
from riftco.cli.verbs import Action
from riftco.errors import ConfigError, DataError, TokenizerError

_DEFAULT_VOCABULARY, _DEFAULT_FREQUENCY = 512, 2


def build(kind: str, text: str, vocab_size: int | None, min_frequency: int | None, pattern: str | None = "gpt2") -> Any:
    """Train a tokenizer of a kind on training text, or load the one of a directory.

    Args:
        kind: "byte", "bpe" (split before merging by `pattern`), or a directory or file with a tokenizer.json.
        text: the training text.
        vocab_size: the most ids of a BPE; None for 512.
        min_frequency: how often a pair must occur to become a token; None for 2.
        pattern: a published split pattern's name, or None for merges across spaces.
    """
    from riftco import tokenizers

    if kind == "bpe":
        return tokenizers.train(
            "bpe",
            text,
            vocab_size=_DEFAULT_VOCABULARY if vocab_size is None else vocab_size,
            min_frequency=_DEFAULT_FREQUENCY if min_frequency is None else min_frequency,
            pattern=pattern,
        )
    if kind == "byte":
        return tokenizers.train("byte", text)
    return open_tokenizer(kind)


def refuse_for_others(kind: str, **given: Any) -> None:
    """Raise UsageError where an option that shapes a BPE was given for a tokenizer that is none, or is there already.

    Args:
        kind: as for `build`.
        **given: options by field name; None, "" or () where they were not given.
    """
    names = [flag_name(name) for name, value in given.items() if value not in (None, "", ())]
    if names and kind != "bpe":
        why = "one id a byte value of its text" if kind == "byte" else "what its tokenizer.json says"
        raise UsageError(f"{names[0]} belongs to --tokenizer bpe; {kind} has {why}; leave {names[0]} out")


def open_tokenizer(path: str | None) -> Any:
    """The tokenizer of a tokenizer.json, a directory with one, or a run directory."""
    from riftco import tokenizers

    if not path:
        raise UsageError("--tokenizer is required: a tokenizer.json, or a directory that holds one")
    if not Path(path).exists():
        raise TokenizerError(f"tokenizer: {path} is neither byte, bpe nor a path that exists; check the path")
    final = Path(path) / "final" / "tokenizer.json"
    return tokenizers.load(final if final.is_file() else path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(Common):
    """Options of `tokenizer train`."""

    data: tuple[str, ...] = flag((), "text files, globs or .jsonl files with a text field", metavar="FILE …")
    tokenizer: Literal["byte", "bpe"] = flag("bpe", "the kind")
    vocab_size: int | None = flag(None, "the most ids of a BPE; 256 bytes are always there", shown="512")
    min_frequency: int | None = flag(None, "how often a pair must occur to become a token of a BPE", shown="2")
    pattern: str = flag(
        "",
        "how a BPE splits text before merging: gpt2, llama3, qwen2, smollm, or none for merges across spaces",
        metavar="NAME",
        shown="gpt2",
    )
    special: tuple[str, ...] = flag((), "special tokens of a BPE, such as '<|endoftext|>'")
    validation_fraction: float = flag(0.0, "share of the text, from its end, that is held out from training")
    out_dir: str = flag("tokenizer", "where tokenizer.json goes", metavar="DIR")
    force: bool = flag(False, "replace a tokenizer.json that is there")


def run_train(options: TrainOptions, console: Console) -> dict[str, Any]:
    """Train, save, and say how well it compresses its own text."""
    from riftco import data, tokenizers

    target = Path(options.out_dir) / "tokenizer.json"
    if target.exists() and not options.force:
        raise ConfigError(f"tokenizer: {target} exists; choose another --out-dir or pass --force")
    shape = {name: getattr(options, name) for name in ("vocab_size", "min_frequency", "pattern", "special")}
    refuse_for_others(options.tokenizer, **shape)
    text = data.load_texts(_files(options.data), validation_fraction=options.validation_fraction).train
    settings: dict[str, Any] = {}
    if options.tokenizer == "bpe":
        settings = {
            "vocab_size": _DEFAULT_VOCABULARY if options.vocab_size is None else options.vocab_size,
            "min_frequency": _DEFAULT_FREQUENCY if options.min_frequency is None else options.min_frequency,
            "pattern": None if options.pattern.lower() == "none" else options.pattern or "gpt2",
            "special_tokens": options.special,
        }
    trained = tokenizers.train(options.tokenizer, text, **settings)
    saved = trained.save(_made(target.parent))
    ratio = len(text.encode()) / max(1, len(trained.encode_array(text)))
    console.say(f"{saved}: {trained.vocab_size:,} ids, {ratio:.2f} bytes a token on its training text")
    return {
        "path": saved,
        "vocab_size": trained.vocab_size,
        "bytes_per_token": ratio,
        "fingerprint": trained.fingerprint(),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeOptions(Common):
    """Options of `tokenizer encode`."""

    tokenizer: str | None = flag(None, "a tokenizer.json, or a directory that holds one", metavar="DIR")
    text: str | None = flag(None, "what to encode", shown="standard input")


def run_encode(options: EncodeOptions, console: Console) -> dict[str, Any]:
    """Print the ids of a text on one line."""
    tokenizer = open_tokenizer(options.tokenizer)
    ids = tokenizer.encode(_standard_input() if options.text is None else options.text)
    console.say(" ".join(map(str, ids)))
    return {"ids": ids, "tokens": len(ids)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(Common):
    """Options of `tokenizer decode`."""

    tokenizer: str | None = flag(None, "a tokenizer.json, or a directory that holds one", metavar="DIR")
    ids: tuple[str, ...] = flag((), "token ids", metavar="N …", shown="standard input")


def run_decode(options: DecodeOptions, console: Console) -> dict[str, Any]:
    """Print the text of ids."""
    tokenizer = open_tokenizer(options.tokenizer)
    words = [word for text in options.ids or (_standard_input(),) for word in text.replace(",", " ").split()]
    if wrong := [word for word in words if not word.lstrip("-").isdigit()]:
        raise UsageError(f"--ids must be integers; got {wrong[0]!r}")
    text = tokenizer.decode([int(word) for word in words])
    console.say(text)
    return {"text": text, "tokens": len(words)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(Common):
    """Options of `tokenizer inspect`."""

    tokenizer: str | None = flag(None, "a tokenizer.json, or a directory that holds one", metavar="DIR")
    show: int = flag(20, "how many of the last-learned tokens are shown")


def run_inspect(options: InspectOptions, console: Console) -> dict[str, Any]:
    """Print what a tokenizer is made of."""
    tokenizer = open_tokenizer(options.tokenizer)
    summary = describe(tokenizer)
    for name, value in summary.items():
        console.say(f"{name.replace('_', ' '):<16}{value if value is not None else '—'}")
    shown = [piece.decode("utf-8", "backslashreplace") for piece in tokenizer.vocabulary[-max(0, options.show) :]]
    if options.show > 0:
        console.say(f"{'last tokens':<16}{' '.join(repr(piece) for piece in shown)}")
    return summary


def describe(tokenizer: Any) -> dict[str, Any]:
    """The facts that `inspect` prints about a tokenizer."""
    pattern = getattr(tokenizer, "pattern_name", None) or getattr(tokenizer, "pattern", None)
    return {
        "type": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "merges": len(getattr(tokenizer, "merges", ())),
        "pattern": pattern,
        "special_tokens": tokenizer.special_tokens,
        "longest_token": max(map(len, tokenizer.vocabulary)),
        "fingerprint": tokenizer.fingerprint(),
    }


def _files(data: tuple[str, ...]) -> tuple[str, ...]:
    if not data:
        raise UsageError("--data is required: text files, globs, or .jsonl files with a text field")
    return data


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out-dir {directory} cannot be written: {error.strerror or error}") from error
    return directory


def _standard_input() -> str:
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"standard input must be UTF-8; {error}") from None


ACTIONS = {
    "train": Action(
        TrainOptions,
        run_train,
        "learn a tokenizer from text",
        "data",
        "riftco tokenizer train --data 'texts/*.txt' --vocab-size 4096",
    ),
    "encode": Action(
        EncodeOptions,
        run_encode,
        "print the ids of a text",
        "text",
        "riftco tokenizer encode --tokenizer tokenizer 'once upon'",
    ),
    "decode": Action(
        DecodeOptions,
        run_decode,
        "print the text of ids",
        "ids",
        "riftco tokenizer decode --tokenizer tokenizer 72 105",
    ),
    "inspect": Action(
        InspectOptions,
        run_inspect,
        "print what a tokenizer is made of",
        "tokenizer",
        "riftco tokenizer inspect tokenizer",
    ),
}

"""Race the tokenizer against the `tokenizers` library on one core: `python -m riftco.cli.bench_tokenizer`.

Both sides train on and encode the same text, the Python standard library's own sources, with GPT-2's split
pattern, in alternating runs of one process. Ratios are what the figures are for; absolute speeds are this
machine's at this moment.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from riftco.errors import RiftcoError


def standard_library_text(size: int) -> str:
    """The sources of the running Python, concatenated in path order and cut to about `size` bytes of UTF-8.

    Repeated from the start where the sources are shorter.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    total = 0
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    while total < size:
        before = total
        for path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # the test suite of Python holds files that are wrong on purpose
            parts.append(text)
            total += len(text.encode("utf-8"))
            if total >= size:
                break
        if total == before:
            raise FileNotFoundError(f"no Python sources under {root}")
    return "".join(parts).encode("utf-8")[:size].decode("utf-8", "ignore")


def _seconds(function: Callable[[], Any]) -> float:
    """CPU seconds of the process: other users of the machine do not count."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def _race(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The best of alternating runs of each."""
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(repeats)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def measure(text: str, vocab_size: int, repeats: int) -> dict[str, float]:
    """Speeds in MB per CPU second, and ratios ours / theirs; ids are checked to be equal first."""
    try:
        import tokenizers
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel
        from tokenizers.trainers import BpeTrainer
    except ImportError as error:
        raise RiftcoError(
            "bench tokenizer: the library `tokenizers`, the peer of the race, is required; it is not installed; "
            "pip install 'riftco[test]' installs it"
        ) from error

    from riftco.tokenizers import BPETokenizer

    data = text.encode("utf-8")
    megabytes = len(data) / 1e6

    def train_theirs() -> None:
        other = tokenizers.Tokenizer(BPE())
        other.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        trainer = BpeTrainer(
            vocab_size=vocab_size, min_frequency=2, initial_alphabet=ByteLevel.alphabet(), show_progress=False
        )
        other.train_from_iterator(text.splitlines(keepends=True), trainer)

    ours, theirs = _race(lambda: BPETokenizer.train(data, vocab_size, pattern="gpt2"), train_theirs, repeats)
    figures = {"megabytes": megabytes, "train_ours": megabytes / ours, "train_theirs": megabytes / theirs}
    figures["train_ratio"] = theirs / ours

    trained = BPETokenizer.train(data, vocab_size, pattern="gpt2")
    state = trained.to_state()
    with tempfile.TemporaryDirectory() as folder:
        file = str(trained.save(folder))
        if tokenizers.Tokenizer.from_file(file).encode(text).ids != trained.encode(text):
            raise AssertionError("the two libraries give different ids")
        # A fresh tokenizer each time: both sides start with empty caches.
        for name, encode in (
            ("encode", lambda: BPETokenizer.from_state(state).encode(text)),
            ("encode_array", lambda: BPETokenizer.from_state(state).encode_array(text)),
        ):
            ours, theirs = _race(encode, lambda: tokenizers.Tokenizer.from_file(file).encode(text), repeats)
            figures |= {f"{name}_ours": megabytes / ours, f"{name}_theirs": megabytes / theirs}
            figures[f"{name}_ratio"] = theirs / ours
        lines = text.splitlines(keepends=True)
        other = tokenizers.Tokenizer.from_file(file)
        ours, theirs = _race(lambda: trained.encode(text), lambda: other.encode_batch_fast(lines), repeats)
        figures["encode_warm_against_batch_fast_ratio"] = theirs / ours
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line a figure, or one JSON object with --json; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench tokenizer", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the text (default 10)")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; the best counts")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    # Read by the library's thread pool when it starts, so it must be set before the first call into it.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    text = standard_library_text(int(arguments.megabytes * 1e6))
    figures = measure(text, arguments.vocab_size, arguments.repeats)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(
                f"{name:40s} {value:8.2f}{'x' if name.endswith('ratio') else ' MB' if name == 'megabytes' else ' MB/s'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""riftco.data: reading, splitting, shards, windows, sources, held-out walks, generated corpora."""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riftco import data, tokenizers
from riftco.data import encoding, shards
from riftco.data.text import CHUNK_BYTES
from riftco.errors import ConfigError, DataError, ShapeError

CORPUS = Path(__file__).resolve().parents[1] / "corpus"


class Bytes:
    """A stand-in tokenizer: an id is a byte; `wide` shifts ids past uint16."""

    def __init__(self, wide=False):
        self._base = 70_000 if wide else 0
        self.vocab_size = self._base + 256

    def fingerprint(self):
        return hashlib.sha256(f"bytes {self._base}".encode()).hexdigest()

    def encode(self, text):
        return [self._base + byte for byte in (text.encode() if isinstance(text, str) else text)]

    def token_bytes(self, token):
        return bytes([token - self._base]) if token >= self._base else b""

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode()


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---------------------------------------------------------------- reading


def test_paths_are_sorted_unique_and_in_the_order_given(tmp_path):
    b, a, c = (write(tmp_path / name, name) for name in ("b.txt", "a.txt", "c.md"))
    assert data.expand_paths([c, tmp_path / "*.txt", b]) == (c, a, b)
    odd = write(tmp_path / "x[1].txt", "a file whose name looks like a pattern")
    assert data.expand_paths(str(odd)) == (odd,)


@pytest.mark.tiny
def test_unusable_files_are_one_sentence_each(tmp_path):
    write(tmp_path / "empty.txt", "")
    for path, words in [
        (tmp_path / "no.txt", "does not exist"),
        (tmp_path / "*.none", "matches no file"),
        (tmp_path, "is a directory"),
    ]:
        with pytest.raises(DataError, match=words) as caught:
            data.expand_paths(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"empty\.txt' is empty"):
        data.read_text(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="does not exist"):
        data.read_text(tmp_path / "no.txt")
    with pytest.raises(DataError, match="at least one file"):
        data.expand_paths([])


@pytest.mark.parametrize("offset", [0, 5, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 7])
def test_a_byte_that_is_not_utf8_is_named_by_file_and_offset(tmp_path, offset):
    path = write(tmp_path / "bad.txt", b"a" * offset + b"\xff" + b"b" * 9)
    with pytest.raises(DataError, match=rf"bad\.txt' has byte 0xff at offset {offset},"):
        data.read_text(path)


def test_characters_across_a_chunk_and_a_character_cut_off_at_the_end(tmp_path):
    text = "x" * (CHUNK_BYTES - 1) + "€" + "\r\n\x00\ufeffend"
    assert data.read_text(write(tmp_path / "good.txt", text)) == text
    start = CHUNK_BYTES - 2
    path = write(tmp_path / "bad.txt", b"x" * start + b"\xe2\x82z")  # the bad character spans two chunks
    with pytest.raises(DataError, match=f"byte 0xe2 at offset {start},"):
        data.read_text(path)
    with pytest.raises(DataError, match="byte 0xe2 at offset 3,"):
        data.read_text(write(tmp_path / "cut.txt", b"abc\xe2\x82"))


def test_json_lines(tmp_path):
    good = write(tmp_path / "good.jsonl", '{"text": "one\u2028"}\n\n{"text": "two", "id": 2}')
    assert list(data.iterate_row_texts(good)) == ["one\u2028", "two"]
    assert [number for number, _ in data.iterate_rows(good)] == [1, 3]
    for line, words in [
        ("{", "not JSON"),
        ("[1]", "a list"),
        ('{"txt": "a"}', "the key 'text'"),
        ('{"text": 3}', "a int"),
        ('{"text": ""}', "empty string"),
        ('{"text": "\\ud800"}', "lone surrogate"),
    ]:
        with pytest.raises(DataError, match=r"bad\.jsonl' line 2: ") as caught:
            list(data.iterate_row_texts(write(tmp_path / "bad.jsonl", '{"text": "fine"}\n' + line)))
        assert words in str(caught.value)
    with pytest.raises(DataError, match="has none"):
        list(data.iterate_rows(write(tmp_path / "blank.jsonl", "\n \n")))
    row = write(tmp_path / "rows.jsonl", '{"prompt": "p", "completion": "c", "more": 1}')
    assert data.read_instructions(row) == [{"prompt": "p", "completion": "c"}]


# ---------------------------------------------------------------- splits


@pytest.mark.tiny
@pytest.mark.parametrize(("length", "fraction", "size"), [(10, 0.1, 1), (11, 0.1, 2), (5, 0.01, 1), (438, 0.1, 44)])
def test_split_takes_the_last_characters(length, fraction, size):
    text = "".join(chr(0x100 + i) for i in range(length))
    train, validation = data.split_text(text, fraction)
    assert len(validation) == size and train + validation == text


def test_split_refuses_what_it_cannot_do():
    for fraction in (0, 1, -0.1, float("nan"), True, "0.1"):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            data.split_text("abc", fraction)
    with pytest.raises(DataError, match="leave none for training"):
        data.split_text("ab", 0.9)


def test_the_same_file_or_text_on_both_sides_is_refused(tmp_path):
    a, same, other = (write(tmp_path / f"{n}.txt", t) for n, t in [("a", "abc"), ("same", "abc"), ("other", "xyz")])
    row = write(tmp_path / "row.jsonl", '{"text": "abc"}')
    with pytest.raises(DataError, match=r"a\.txt' is in both"):
        data.load_texts(a, validation_paths=tmp_path / "." / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt' and .*same\.txt' have the same SHA-256"):
        data.load_texts([other, a], validation_paths=same)
    with pytest.raises(DataError, match="both have the same SHA-256"):
        data.load_texts(a, validation_paths=row)
    with pytest.raises(DataError, match="same SHA-256"):
        data.refuse_identical_texts("abc", "abc")
    with pytest.raises(ConfigError, match="not both"):
        data.load_texts(a, validation_paths=other, validation_fraction=0.5)
    assert data.load_texts(a, validation_paths=other).validation == "xyz"


def test_a_corpus_is_its_documents_joined(tmp_path):
    a = write(tmp_path / "a.txt", "first")
    b = write(tmp_path / "b.jsonl", '{"text": "second"}\n{"text": "third"}')
    split = data.load_texts([a, b], validation_fraction=0, separator="|")
    assert split.train == "first|second|third" and split.validation is None
    assert [source.bytes for source in split.sources] == [5, b.stat().st_size]
    assert data.load_texts([a, b]).validation == "rd"  # 18 characters, a tenth rounded up


def test_find_splits(tmp_path):
    assert data.find_splits(tmp_path) == {}
    train, valid = write(tmp_path / "train.jsonl", "x"), write(tmp_path / "valid.jsonl", "y")
    assert data.find_splits(tmp_path) == {"train": train, "validation": valid}
    write(tmp_path / "validation.txt", "z")
    with pytest.raises(DataError, match="one validation file"):
        data.find_splits(tmp_path)


# ---------------------------------------------------------------- shards


def prepared(tmp_path, text="The cat sat. " * 40, tokenizer=None, **options):
    source = write(tmp_path / "text.txt", text)
    return data.prepare(source, tmp_path / "set", tokenizer or Bytes(), **options)


@pytest.mark.tiny
@pytest.mark.parametrize(("wide", "dtype"), [(False, "<u2"), (True, "<u4")])
def test_shards_hold_the_ids_and_the_manifest_says_how(tmp_path, wide, dtype):
    text = "Grüße, cat. " * 50
    tokenizer = Bytes(wide)
    dataset = prepared(tmp_path, text, tokenizer, validation_fraction=0.25, tokens_per_shard=100)
    train, validation = data.split_text(text, 0.25)
    for name, part in (("train", train), ("validation", validation)):
        ids = np.array(tokenizer.encode(part))
        split = dataset.manifest.splits[name]
        raw = b"".join((dataset.directory / shard.file).read_bytes() for shard in split.shards)
        np.testing.assert_array_equal(np.frombuffer(raw, dtype), ids)
        np.testing.assert_array_equal(dataset.split(name).read(0, len(ids)), ids)
        assert (split.characters, split.utf8_bytes, split.tokens) == (len(part), len(part.encode()), len(ids))
        assert [shard.tokens for shard in split.shards[:-1]] == [100] * (len(split.shards) - 1)
        assert split.token_sha256 == hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
    (source,) = dataset.manifest.sources
    assert (source.bytes, source.split) == (len(text.encode()), "all")
    assert source.sha256 == hashlib.sha256(text.encode()).hexdigest()
    data.check(dataset.directory, tokenizer=tokenizer)
    assert sorted(os.listdir(tmp_path)) == ["set", "text.txt"]  # nothing left aside


def test_the_same_data_in_other_shards_has_the_same_fingerprints(tmp_path):
    one = prepared(tmp_path, tokens_per_shard=7)
    two = data.prepare(tmp_path / "text.txt", tmp_path / "two", Bytes())
    assert one.fingerprint == two.fingerprint and one.train.digest == two.train.digest
    sources = [data.UniformWindowSource(d.train, 8, 4, 1) for d in (one, two)]
    sources.append(data.UniformWindowSource(two.train.read(0, len(two.train)), 8, 4, 1))
    assert len({source.fingerprint for source in sources}) == 1
    for step in range(5):
        for source in sources[1:]:
            np.testing.assert_array_equal(source.batch(step).tokens, sources[0].batch(step).tokens)


def test_an_existing_directory_is_kept_unless_forced_and_never_if_it_is_no_dataset(tmp_path):
    first = prepared(tmp_path)
    with pytest.raises(DataError, match="exists; choose another or use force"):
        prepared(tmp_path)
    second = prepared(tmp_path, "other words " * 30, force=True)
    assert second.fingerprint != first.fingerprint
    mine = tmp_path / "mine"
    mine.mkdir()
    data.prepare(tmp_path / "text.txt", mine, Bytes())  # an empty directory may be filled
    other = tmp_path / "other"
    other.mkdir()
    precious = write(other / "thesis.tex", "years")
    write(other / "manifest.json", "{}")
    with pytest.raises(DataError, match="force replaces only a dataset"):
        data.prepare(tmp_path / "text.txt", other, Bytes(), force=True)
    assert precious.read_text() == "years"


def test_a_failure_leaves_the_old_dataset_and_no_traces(tmp_path):
    old = prepared(tmp_path).fingerprint
    broken = Bytes()
    broken.encode = lambda text: [256]
    with pytest.raises(DataError, match=r"must lie in 0 \.\. 255; the tokenizer gave 256"):
        prepared(tmp_path, "text " * 20, broken, force=True)
    assert data.open_dataset(tmp_path / "set").fingerprint == old
    assert sorted(os.listdir(tmp_path)) == ["set", "text.txt"]
    blocked = write(tmp_path / "file", "not a directory")
    with pytest.raises(DataError, match="cannot write"):
        data.prepare(tmp_path / "text.txt", blocked / "set", Bytes())


def test_the_tokenizer_is_inside_when_the_directory_appears(tmp_path):
    class Saved(Bytes):
        def save(self, directory):
            assert not (tmp_path / "set").exists()
            write(directory / "tokenizer.json", "{}")

    prepared(tmp_path, tokenizer=Saved())
    assert (tmp_path / "set" / "tokenizer.json").is_file()


def test_a_source_that_changes_while_it_is_read_is_an_error(tmp_path):
    class Meddler(Bytes):
        def encode(self, text):
            write(tmp_path / "text.txt", "changed")
            return super().encode(text)

    with pytest.raises(DataError, match=r"text\.txt' did; prepare again"):
        prepared(tmp_path, tokenizer=Meddler(), validation_fraction=0)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_shards_split_a_corpus_of_many_documents_as_load_texts_does(tmp_path, fraction):
    write(tmp_path / "a.txt", "first document ")
    write(tmp_path / "b.jsonl", "".join(json.dumps({"text": f"row {n} é"}) + "\n" for n in range(20)))
    write(tmp_path / "c.txt", "last document")
    paths = [tmp_path / "*.txt", tmp_path / "b.jsonl"]
    dataset = data.prepare(paths, tmp_path / "set", Bytes(), fraction)
    texts = data.load_texts(paths, validation_fraction=fraction)
    for tokens, text in ((dataset.train, texts.train), (dataset.validation, texts.validation)):
        assert Bytes().decode(tokens.read(0, len(tokens)).tolist()) == text
    assert dataset.manifest.sources == texts.sources


def test_an_explicit_pair_goes_to_its_splits(tmp_path):
    a, b = write(tmp_path / "a.txt", "train " * 9), write(tmp_path / "b.txt", "held out")
    dataset = data.prepare(a, tmp_path / "set", Bytes(), validation_paths=b)
    assert bytes(dataset.validation.read(0, 99).astype(np.uint8)) == b"held out"
    assert [source.split for source in dataset.manifest.sources] == ["train", "validation"]
    with pytest.raises(DataError, match="is in both"):
        data.prepare(a, tmp_path / "two", Bytes(), validation_paths=a)
    whole = data.prepare(a, tmp_path / "whole", Bytes(), 0)
    assert whole.validation is None
    with pytest.raises(DataError, match="split 'validation' is not in"):
        whole.split("validation")


def test_damage_is_named_by_file(tmp_path):
    dataset = prepared(tmp_path, tokens_per_shard=200)
    shard = dataset.directory / "train-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    data.open_dataset(dataset.directory)  # sizes agree
    with pytest.raises(DataError, match=r"train-00001\.bin' must have the SHA-256"):
        data.check(dataset.directory)
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train-00001\.bin' must hold 400 bytes .* holds 398"):
        data.open_dataset(dataset.directory)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin' is missing"):
        data.open_dataset(dataset.directory)


def test_ids_outside_the_vocabulary_are_found_by_check(tmp_path):
    dataset = prepared(tmp_path)
    path = dataset.directory / "manifest.json"
    write(path, path.read_text().replace('"vocab_size": 256', '"vocab_size": 100'))
    with pytest.raises(DataError, match=r"train-00000\.bin' must hold ids below the vocabulary size 100"):
        data.check(dataset.directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=2), "version is 2"),
        (lambda m: m.update(format="other"), "format is not"),
        (lambda m: m.update(dtype="int8"), "'dtype' is 'int8'"),
        (lambda m: m.update(extra=1), "missing or unknown: extra"),
        (lambda m: m["splits"].pop("train"), "'splits' must be train"),
        (lambda m: m["splits"]["train"].update(tokens=3), "do not hold its 3 tokens"),
        (lambda m: m["splits"]["train"].update(utf8_bytes=-1), "splits.train.utf8_bytes' is not an integer"),
        (lambda m: m["splits"]["train"]["shards"][0].update(file="../x"), "not a plain file name"),
        (lambda m: m["splits"]["train"]["shards"][0].pop("sha256"), "splits.train.shards.0.sha256"),
        (lambda m: m.update(vocab_size=True), "'vocab_size' is not an integer"),
        (lambda m: m.update(sources={}), "'sources' is not a list"),
    ],
)
def test_a_bad_manifest_is_refused_by_field(tmp_path, change, words):
    path = prepared(tmp_path).directory / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    write(path, json.dumps(content))
    with pytest.raises(DataError, match=r"manifest\.json") as caught:
        data.open_dataset(path.parent)
    assert words in str(caught.value)


def test_opening_what_is_no_dataset_or_of_another_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"riftco data prepare"):
        data.open_dataset(tmp_path)
    write(tmp_path / "manifest.json", "{")
    with pytest.raises(DataError, match="not JSON"):
        data.open_dataset(tmp_path)
    directory = prepared(tmp_path).directory
    with pytest.raises(DataError, match="tokenizer that made it"):
        data.open_dataset(directory, tokenizer=Bytes(wide=True))


def test_manifest_round_trips(tmp_path):
    dataset = prepared(tmp_path)
    assert json.loads(dataset.manifest.to_json())["splits"]["train"]["tokens"] == len(dataset.train)
    assert data.open_dataset(dataset.directory).manifest == dataset.manifest


def test_check_report_and_show(tmp_path):
    dataset = prepared(tmp_path, "The cat\nsat on thé mat. " * 20, tokens_per_shard=100)
    report = data.check(dataset.directory, context=16)
    assert report.tokens == {"train": len(dataset.train), "validation": len(dataset.validation)}
    assert report.files == sum(len(split.shards) for split in dataset.manifest.splits.values()) > 3
    assert "bytes a token" in str(report)
    with pytest.raises(DataError, match=r"at least 1001 tokens \(context \+ 1\)"):
        data.check(dataset.directory, context=1000)
    shown = data.show(dataset.directory, 4, 14, Bytes())
    assert "text    cat\\nsat on th\\xc3" in shown and "tokens  c|a|t|\\n|s" in shown
    assert shown.endswith("then    \\xa9 (169)")
    with pytest.raises(DataError, match=r"index must lie in 0 \.\. "):
        data.show(dataset.directory, len(dataset.train) - 15, 15, Bytes())


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="ab1 .\n\té中", min_size=1, max_size=300), st.integers(1, 40), st.integers(1, 50))
def test_stretches_join_to_the_text_and_end_between_a_word_and_white_space(text, piece, limit):
    pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
    parts = list(encoding.stretches(pieces, limit))
    assert "".join(parts) == text and all(0 < len(part) <= limit for part in parts)
    for left, right in itertools.pairwise(parts):
        if not (left[-1].isalnum() and right[0].isspace()):
            assert len(left) == limit


def test_encoding_in_stretches_gives_the_ids_of_the_whole():
    text = (CORPUS / "tiny.txt").read_text() + " x3.14\r\n\r\n  def f():\n\treturn 'ß' "
    tokenizer = tokenizers.BPETokenizer.train(text.encode(), vocab_size=400, pattern="gpt2")
    whole = list(tokenizer.encode(text))
    ids = np.concatenate([part for _, part in encoding.encode_pieces(tokenizer, [text], limit=300)])
    np.testing.assert_array_equal(ids, whole)
    np.testing.assert_array_equal(data.encode_text(tokenizer, text), whole)
    lengths = data.token_byte_lengths(tokenizer)
    assert lengths[ids].sum() == len(text.encode()) and lengths.shape == (tokenizer.vocab_size,)


def test_byte_lengths_count_bytes_of_half_characters():
    lengths = data.token_byte_lengths(Bytes())
    assert lengths.dtype == np.int32 and lengths[Bytes().encode("é€")].sum() == 5
    assert shards.shard_dtype(65_536) == "uint16" and shards.shard_dtype(65_537) == "uint32"


# ---------------------------------------------------------------- windows and sources

TOKENS = np.array([(i * i + (3 * i) // 2 + i % 7) % 27 for i in range(438)])


def sources(seed=7):
    sequences = [TOKENS[:40], TOKENS[40:47], TOKENS[47:300]]
    return [
        data.UniformWindowSource(TOKENS, 16, 4, seed),
        data.RandomWindowBatchSource(TOKENS, 16, 4, seed),
        data.SequenceWindowBatchSource(sequences, 16, 4, seed),
        data.ExampleWindowBatchSource(sequences, 16, 4, seed),
    ]


@pytest.mark.tiny
def test_parity_source_draws_the_golden_starts():
    source = data.RandomWindowBatchSource(TOKENS, context=16, batch_size=4, seed=7)
    starts = [start for _ in range(2) for start in source.next().ids[:, 1].tolist()]
    assert starts == [165, 77, 202, 333, 24, 37, 420, 274]


@pytest.mark.tiny
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.kind)
def test_batches_are_windows_with_shifted_targets(source):
    batch = source.batch(0)
    origin = [0] if source.kind.startswith(("uniform", "random")) else [0, 40, 47]
    for row, (sequence, start) in enumerate(batch.ids.tolist()):
        place = origin[sequence] + start
        np.testing.assert_array_equal(batch.tokens[row], TOKENS[place : place + 16])
        np.testing.assert_array_equal(batch.targets[row], TOKENS[place + 1 : place + 17])
    assert batch.tokens.dtype == batch.targets.dtype == np.int32 and batch.weights is None
    assert batch.tokens.flags.c_contiguous and batch.targets.flags.c_contiguous
    assert batch.describe().startswith(f"{source.kind} rows {batch.ids[0, 0]}:{batch.ids[0, 1]}")
    assert batch.target_count == 64


@pytest.mark.parametrize("kind", range(4))
def test_rows_of_a_batch_are_the_rows_of_the_whole(kind):
    whole, parts = sources()[kind], [sources()[kind] for _ in range(2)]
    for step in range(3):
        batch = whole.batch(step)
        halves = [part.batch(step, rows=(2 * i, 2 * i + 2)) if kind == 0 else part.next((2 * i, 2 * i + 2))
                  for i, part in enumerate(parts)]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate([half.targets for half in halves]), batch.targets)
        if kind == 0:
            whole.next()
    with pytest.raises(DataError, match="0 <= start < stop <= batch size 4"):
        whole.next(rows=(2, 5))


@pytest.mark.parametrize("kind", range(4))
def test_a_source_restored_from_json_goes_on_with_the_same_batches(kind):
    source = sources()[kind]
    data.fixed_batches(source, 3)
    state = json.loads(json.dumps(source.state()))
    ahead = data.fixed_batches(source, 4)
    again = sources()[kind]
    again.next()
    again.restore(state)
    assert again.batches_emitted == 3
    for left, right in zip(ahead, data.fixed_batches(again, 4), strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)


@pytest.mark.parametrize("kind", range(4))
def test_a_foreign_state_is_refused_before_anything_changes(kind):
    source = sources()[kind]
    source.next()
    good = source.state()
    other = sources()[(kind + 1) % 4].state()
    bad = [None, {}, other, {**good, "fingerprint": "0" * 64}, {**good, "batches_emitted": -1}]
    bad += (
        [{**good, "batches_emitted": 9, "random_state": broken} for broken in (None, [3, [1, 2], None])] if kind else []
    )
    for state in bad:
        with pytest.raises(DataError, match="restore"):
            source.restore(state)
        assert source.state() == good


@pytest.mark.tiny
def test_uniform_batches_are_a_pure_function_of_seed_and_step():
    one, two = data.UniformWindowSource(TOKENS, 16, 4, 7), data.UniformWindowSource(TOKENS, 16, 4, 7)
    np.testing.assert_array_equal(one.batch(100).tokens, two.batch(100).tokens)
    one.batch(5), one.next()
    np.testing.assert_array_equal(one.batch(100).ids, two.batch(100).ids)
    assert len({tuple(one.starts(step)) for step in range(50)}) == 50
    assert tuple(data.UniformWindowSource(TOKENS, 16, 4, 8).starts(0)) != tuple(one.starts(0))
    # Pinned, so that a run can be resumed under another NumPy: Philox words, not a Generator's draws.
    assert data.UniformWindowSource(TOKENS, 16, 4, 7).starts(3).tolist() == PINNED_STARTS


PINNED_STARTS = [418, 199, 158, 89]


def test_uniform_starts_are_uniform_and_reach_both_ends():
    source = data.UniformWindowSource(np.arange(20) % 5, 10, 1000, 0)
    counts = np.bincount(np.concatenate([source.starts(step) for step in range(10)]), minlength=10)
    assert len(counts) == 10 and counts.min() > 850 and counts.max() < 1150
    only = data.UniformWindowSource(np.arange(11), 10, 3, 0).batch(0)  # one window, drawn again and again
    assert only.ids[:, 1].tolist() == [0, 0, 0]


def test_examples_are_equally_likely_and_sequences_by_their_windows():
    sequences = [np.arange(4), np.arange(103)]
    counts = []
    for kind in (data.ExampleWindowBatchSource, data.SequenceWindowBatchSource):
        source = kind(sequences, 3, 1000, 1)
        counts.append(int((source.next().ids[:, 0] == 0).sum()))
    assert 400 < counts[0] < 600 and counts[1] < 40


def test_short_sequences_are_dropped_and_counted():
    source = data.SequenceWindowBatchSource([[1], [2, 3, 4, 5], [6, 7]], 2, 5, 0)
    assert source.dropped == 2 and set(source.next().ids[:, 0]) == {1}


def test_a_sequential_source_refuses_another_step():
    source = sources()[1]
    source.batch(0)
    with pytest.raises(DataError, match="step 5 was asked for and the next is 1"):
        source.batch(5)


@pytest.mark.tiny
@pytest.mark.parametrize("kind", ["UniformWindowSource", "RandomWindowBatchSource"])
def test_a_corpus_shorter_than_the_context_states_context_plus_one(kind):
    with pytest.raises(DataError, match=r"at least 17 tokens \(context \+ 1\) are required; got 16"):
        getattr(data, kind)(TOKENS[:16], 16, 2, 0)
    for sequences in ([], [[1, 2], [3]]):
        with pytest.raises(DataError, match=r"at least 17 tokens"):
            data.ExampleWindowBatchSource(sequences, 16, 2, 0)


@pytest.mark.parametrize("bad", [dict(context=0), dict(batch_size=True), dict(batch_size=2.0), dict(seed=-1)])
def test_bad_options_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        data.UniformWindowSource(TOKENS, **{"context": 4, "batch_size": 2, "seed": 0, **bad})


@pytest.mark.parametrize("tokens", [[[1, 2], [3]], [0.5] * 30, [[1, 2]] * 30, [-1] * 30, [2**31] * 30, [2**70] * 30])
def test_tokens_that_are_no_row_of_ids_are_refused(tokens):
    with pytest.raises(DataError, match="token ids must"):
        data.UniformWindowSource(tokens, 4, 2, 0)


def test_fingerprints_tell_data_options_and_kinds_apart():
    prints = [source.fingerprint for source in sources()]
    prints += [
        data.UniformWindowSource(TOKENS, *options).fingerprint for options in [(15, 4, 7), (16, 5, 7), (16, 4, 8)]
    ]
    changed = TOKENS.copy()
    changed[-1] += 1
    prints += [data.UniformWindowSource(changed, 16, 4, 7).fingerprint]
    assert len(set(prints)) == len(prints)
    for dtype in (np.uint16, np.uint32, np.int64):
        assert data.UniformWindowSource(TOKENS.astype(dtype), 16, 4, 7).fingerprint == prints[0]


def test_parity_with_the_reference_implementation():
    reference = pytest.importorskip("riftco_transformer.training.engine")
    sequences = [TOKENS[:40].tolist(), TOKENS[40:47].tolist(), TOKENS[47:300].tolist()]
    for name, tokens in [
        ("RandomWindowBatchSource", TOKENS.tolist()),
        ("SequenceWindowBatchSource", sequences),
        ("ExampleWindowBatchSource", sequences),
    ]:
        theirs = getattr(reference, name)(tokens, batch_size=4, context_size=16, random_seed=29)
        ours = getattr(data, name)(tokens, 16, 4, 29)
        for _ in range(6):
            expected, batch = theirs.next_batch(), ours.next()
            assert batch.tokens.tolist() == [list(row) for row in expected.inputs]
            assert batch.targets.tolist() == [list(row) for row in expected.targets]
        state = theirs.checkpoint_state()
        assert ours.state() == {
            "type": state.source_type,
            "fingerprint": state.fingerprint,
            "batches_emitted": state.batches_emitted,
            "random_state": [state.random_state[0], list(state.random_state[1]), state.random_state[2]],
        }


def test_batches_do_not_share_memory_with_the_tokens():
    tokens = np.arange(30, dtype=np.int32)
    batch = data.UniformWindowSource(tokens, 4, 3, 0).batch(0)
    before = batch.tokens.copy()
    tokens[:] = 0
    np.testing.assert_array_equal(batch.tokens, before)


def test_a_batch_checks_its_shapes():
    ids = np.zeros((2, 3), np.int32)
    with pytest.raises(ShapeError, match="targets must have the shape"):
        data.Batch(ids, ids[:, 1:])
    with pytest.raises(ShapeError, match=r"\[B, T\]"):
        data.Batch(ids[0], ids[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.Batch(ids, ids).tokens = ids
    weighted = data.Batch(ids, ids + 1, np.array([[1, 0, 1], [0, 0, 0]], np.float32))
    assert weighted.target_count == 2 and weighted.byte_count(np.array([9, 3])) == 6


# ---------------------------------------------------------------- held-out walk


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda lengths: max(lengths) >= 2),
    st.integers(1, 9),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_target_after_the_first_is_scored_once(lengths, context, batch_size, padded):
    ids = iter(range(1, 1000))
    sequences = [[next(ids) for _ in range(length)] for length in lengths]
    windows = data.evaluation_windows(sequences, context, batch_size, padded=padded)
    scored = []
    for batch in windows:
        weights = np.ones(batch.tokens.shape) if batch.weights is None else batch.weights
        assert (batch.tokens.shape == (batch_size, context)) if padded else (len(batch.tokens) <= batch_size)
        for row, (sequence, start) in enumerate(batch.ids.tolist()):
            for place in np.flatnonzero(weights[row]).tolist():
                assert batch.tokens[row, place] == sequences[sequence][start + place]
                assert batch.targets[row, place] == sequences[sequence][start + place + 1]
                scored.append(int(batch.targets[row, place]))
    assert sorted(scored) == sorted(token for sequence in sequences for token in sequence[1:])
    assert windows.target_count == len(scored) == sum(batch.target_count for batch in windows)
    assert windows.skipped == sum(length < 2 for length in lengths)
    assert windows.sequences + windows.skipped == len(lengths)


@pytest.mark.tiny
def test_one_row_gives_at_most_two_widths_and_padding_one_shape():
    shapes = [batch.tokens.shape for batch in data.evaluation_windows(TOKENS, 16, 4)]
    assert shapes == [(4, 16)] * 6 + [(3, 16), (1, 5)] and 27 * 16 + 5 == 437
    padded = data.evaluation_windows(TOKENS, 16, 4, padded=True)
    assert {batch.tokens.shape for batch in padded} == {(4, 16)} and len(padded) == 7
    assert next(iter(padded)).weights.dtype == np.float32
    assert list(padded)[-1].ids[-1].tolist() == [0, 432]


def test_chunks_of_one_width_keep_their_order():
    sequences = [list(range(2 + n % 3)) for n in range(300)]
    for width in (1, 2, 3):
        owners = [
            n for b in data.evaluation_windows(sequences, 9, 7) if b.tokens.shape[1] == width for n in b.ids[:, 0]
        ]
        assert owners == [n for n in range(300) if 1 + n % 3 == width]


def test_held_out_windows_of_a_dataset_cross_shards(tmp_path):
    dataset = prepared(tmp_path, tokens_per_shard=10)
    direct = data.evaluation_windows(dataset.validation.read(0, 10**6), 7, 3)
    for left, right in zip(direct, data.evaluation_windows(dataset.validation, 7, 3), strict=True):
        np.testing.assert_array_equal(left.targets, right.targets)
    with pytest.raises(DataError, match="at least 2 tokens"):
        data.evaluation_windows([[1], []], 4, 2)


# ---------------------------------------------------------------- corpora


@pytest.mark.tiny
def test_corpus_files_have_the_hashes_that_their_readme_states():
    readme = (CORPUS / "README.md").read_text()
    for name in ("tiny.txt", "instructions.jsonl"):
        assert f"{data.file_sha256(CORPUS / name)}  {name}" in readme
    assert 20_000 < len(data.read_text(CORPUS / "tiny.txt")) < 40_000
    rows = data.read_instructions(CORPUS / "instructions.jsonl")
    assert len(rows) >= 60 and len({row["prompt"] for row in rows}) == len(rows)


@pytest.mark.tiny
def test_stories_are_deterministic_varied_and_clean():
    text = data.generate_stories(200_000, seed=1)
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == STORIES_SHA256
    assert 200_000 <= len(text) < 202_000 and text.startswith(data.generate_stories(5000, seed=1))
    assert data.generate_stories(2000, seed=2)[:200] != text[:200]
    vocabulary = set("".join(c if c.isalpha() else " " for c in text).lower().split())
    stories = text.strip().split("\n\n")
    assert len(vocabulary) > 500 and len(set(stories)) == len(stories)
    assert "{" not in text and "  " not in text and " a a" not in text and text.count('"') % 2 == 0
    for story in stories:
        assert story[0].isupper() and story[-1] in '."' and " a o" not in f" {story}".replace(" a one", "")


STORIES_SHA256 = "6e1870ad65178121b0e55e98743a051c8065a1957ec1b48ed5341ba2eb4750c4"


@pytest.mark.tiny
def test_generated_instructions_are_right():
    rows = data.generate_instructions(900, seed=3)
    assert rows == data.generate_instructions(900, seed=3) != data.generate_instructions(900, seed=4)
    sums = 0
    for row in rows:
        assert set(row) == {"prompt", "completion"} and row["completion"].endswith(".")
        words = row["prompt"].rstrip("?").split()
        if words[0] == "What" and words[3] in ("plus", "minus"):
            left, right = int(words[2]), int(words[4])
            assert int(row["completion"][:-1]) == (left + right if words[3] == "plus" else left - right) >= 0
            sums += 1
        if row["prompt"].startswith("Repeat"):
            assert row["prompt"].endswith(row["completion"][:-1])
        if "larger" in row["prompt"]:
            numbers = [int(word.strip(",?")) for word in row["prompt"].split() if word.strip(",?").isdigit()]
            assert row["completion"] == f"{max(numbers)} is larger."
    assert sums == 100


def test_generation_does_not_touch_the_global_generator():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    data.generate_stories(1000), data.generate_instructions(20)
    assert random.random() == expected


def test_the_code_blocks_of_the_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (CORPUS.parent / "docs" / "data.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})


@pytest.mark.tiny
def test_data_loads_no_jax():
    code = "import sys, riftco.data; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=CORPUS.parent).returncode == 0

"""Tokenizers: known answers, the definition as oracle, the `tokenizers` library as peer, and the file format."""

import json
import random
import subprocess
import sys
import time
import unicodedata

import numpy as np
import pytest
import tokenizers as peer
from hypothesis import given, settings
from hypothesis import strategies as st

from riftco.errors import TokenizerError
from riftco.oracle import bpe as oracle
from riftco.tokenizers import (
    STAGES,
    AddedToken,
    BPETokenizer,
    ByteTokenizer,
    Foreign,
    Splitter,
    from_state,
    load,
    to_json,
    train,
)
from riftco.tokenizers.bpe_encode import ChunkCache, Merger
from riftco.tokenizers.patterns import _BLOCK

SAMPLES = [
    "",
    " ",
    "hello world, it's we'll I'M don't 'S",
    "  two  spaces\tand\ttabs \n\n\n next\r\nline\r\n\r\n   \r end ",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 ☃️ e\u0301 caf\u00e9",
    "漢字とかな 한국어 العربية हिन्दी ไทย",
    "1 22 333 4444 55555 3.14159 1e-9 ١٢٣ Ⅷ ½",
    "def f(x: int) -> int:\n    return x  # comment\n\n\nclass A:\n\tpass\n",
    "\x00\x01\x1c\x1f\x7f\x85\xa0\u2028\u3000\ufeff",
    "a" * 300 + "^" * 300 + " " * 300,
    "ſ'ſ 'ſ K",
]
CORPUS = ("".join(SAMPLES) + "the quick brown fox jumps over the lazy dog. It's 1234! " * 20).encode()
NAMES = sorted(STAGES)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_start|>user")

# Assigned since Unicode 3.2: the tables of newer letters that libraries bring are of different ages.
_OLD = st.characters(exclude_categories=["Cs"]).filter(lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn")
texts = st.text(st.one_of(st.sampled_from("ab '\n\r\t.1é漢👍\u00a0"), _OLD), max_size=40)


def peer_of(tokenizer, tmp_path):
    return peer.Tokenizer.from_file(str(tokenizer.save(tmp_path)))


def peer_ids(other, text):
    return other.encode(text, add_special_tokens=False).ids


# ---- known answers


@pytest.mark.tiny
def test_byte_known_answers():
    tokenizer = ByteTokenizer.train(b"cab\ncab")
    assert tokenizer.vocabulary == (b"\n", b"a", b"b", b"c")
    assert tokenizer.encode("cab\ncab") == [3, 1, 2, 0, 3, 1, 2]
    assert tokenizer.decode([3, 1, 2, 0]) == "cab\n"
    restored = ByteTokenizer(b"za")
    assert restored.encode("az") == [1, 0]


@pytest.mark.tiny
def test_bpe_known_answers():
    tokenizer = BPETokenizer.train(b"abababab", 258, 2)
    assert tokenizer.merges == ((97, 98, 256), (256, 256, 257))
    assert tokenizer.encode("abababab") == [257, 257]
    assert BPETokenizer.train(b"abababab", 257, 2).encode(b"abababab") == [256] * 4
    assert BPETokenizer.train(b"abac", 257, 1).merges == ((97, 98, 256),)
    assert BPETokenizer.train(b"ababacac", 257).token_bytes(256) == b"ab"
    assert BPETokenizer.train(b"aaaaa", 257, 1).encode("aaaaa") == [256, 256, 97]
    assert BPETokenizer.train(b"aaa", 300, 2).merges == ((97, 97, 256),), "(a, a) counts twice in aaa"
    assert BPETokenizer.train(b"abcabc", 300, 3).merges == ()
    assert BPETokenizer.train(b"abc", 300, 1).vocab_size == 258


# ---- the definition


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60).map(lambda b: bytes(97 + x % 3 for x in b)), st.integers(256, 290), st.integers(1, 3))
def test_unsplit_training_and_encoding_follow_the_definition(corpus, vocab_size, min_frequency):
    corpus = corpus or b"a"
    tokenizer = BPETokenizer.train(corpus, vocab_size, min_frequency)
    assert tokenizer.merges == oracle.train([corpus], vocab_size, min_frequency)
    for data in (corpus, corpus[::-1] * 3, corpus + b"abc"):
        expected = oracle.encode(data, tokenizer.merges)
        assert tokenizer.encode(data) == expected
        merger = tokenizer._merger
        assert merger.is_ordered
        assert merger._merge_ordered(list(data)) == merger._merge_heap(list(data)) == expected
        assert tokenizer.decode_bytes(expected) == oracle.decode(expected, tokenizer.merges) == data


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab c", min_size=1, max_size=12), min_size=1, max_size=6), st.integers(256, 285))
def test_split_training_follows_the_definition(words, vocab_size):
    corpus = "".join(words)
    tokenizer = BPETokenizer.train(corpus.encode(), vocab_size, 1, "gpt2")
    chunks = [chunk.encode() for chunk in Splitter("gpt2").split(corpus)]
    assert tokenizer.merges == oracle.train(chunks, vocab_size, 1, unique_pieces=True)
    assert len(set(tokenizer.vocabulary)) == tokenizer.vocab_size


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 12), st.binary(min_size=1, max_size=50))
def test_any_list_of_merges_is_applied_lowest_first(rnd: random.Random, count, data):
    """Also merges in an order that no training gives, which foreign files may hold."""
    data = bytes(97 + x % 2 for x in data)
    pieces = sorted({"".join(rnd.choices("ab", k=rnd.randint(2, 5))) for _ in range(count)} | {"a", "b"})
    id_of = {piece: 97 + i for i, piece in enumerate(pieces)}
    ids = [id_of[chr(b)] for b in data]
    splits = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in id_of and p[i:] in id_of]
    rnd.shuffle(splits)
    merger = Merger([(id_of[x], id_of[y], id_of[x + y]) for x, y in splits])
    expected = oracle.encode_lowest_first(ids, [(id_of[x], id_of[y], id_of[x + y]) for x, y in splits])
    assert merger._merge_short(list(ids)) == merger._merge_heap(list(ids)) == expected
    if merger.is_ordered:
        assert merger._merge_ordered(list(ids)) == expected


def test_lists_in_an_order_that_no_training_gives_are_told_apart():
    assert Merger([(97, 98, 256), (256, 99, 257), (99, 256, 258)]).is_ordered
    assert not Merger([(256, 99, 257), (97, 98, 256)]).is_ordered
    assert not Merger([(99, 256, 257), (97, 98, 256)]).is_ordered
    assert not Merger([(97, 98, 256), (256, 99, 257), (98, 97, 256)]).is_ordered, "256 is made once more later"


def test_random_corpora_with_long_runs_agree_between_the_three_encoders(rng):
    data = bytes(rng.choice([97, 98, 32], 4000, p=[0.7, 0.2, 0.1]).tolist())
    tokenizer = BPETokenizer.train(data, 600)
    merger = tokenizer._merger
    assert merger._merge_ordered(list(data)) == merger._merge_heap(list(data)) == merger._merge_short(list(data))
    assert tokenizer.encode(data) == oracle.encode(data, tokenizer.merges)


def test_long_inputs_take_no_quadratic_time():
    """A smoke alarm, not a benchmark: quadratic time would be minutes."""
    begin = time.process_time()
    for pattern in (None, "gpt2"):
        tokenizer = BPETokenizer.train(b"aaaaaaaa^^^^ the cat " * 200, 300, 2, pattern)
        assert tokenizer.decode(tokenizer.encode("a" * 100_000)) == "a" * 100_000
        assert tokenizer.decode(tokenizer.encode("^" * 1_000_000)) == "^" * 1_000_000
    heap = Merger([(97, 97, 98), (98, 98, 99), (99, 97, 100)])
    assert len(heap._merge_heap([97] * 100_000)) == 25_000
    assert time.process_time() - begin < 20


# ---- split patterns


@pytest.mark.parametrize("name", NAMES)
def test_named_patterns_split_as_the_peer_does(name):
    tokenizer = BPETokenizer((), pattern=name)
    step = peer.Tokenizer.from_str(json.dumps(to_json(tokenizer))).pre_tokenizer
    for text in SAMPLES:
        ours = Splitter(name).split(text)
        assert "".join(ours) == text
        offsets = [span for _, span in step.pre_tokenize_str(text)]
        assert ours == [text[start:stop] for start, stop in offsets]


@pytest.mark.parametrize("name", NAMES)
def test_ascii_engine_blocks_and_stages_agree(name):
    splitter = Splitter(name)
    text = "".join(chr(random.Random(7).choice(range(128))) for _ in range(1)) + "".join(
        random.Random(1).choices([chr(i) for i in range(128)] + list("  ab1\n'"), k=20_000)
    )
    assert splitter._ascii.findall(text) == splitter._unicode.findall(text)
    long = (text + "é x1 ") * 12
    assert len(long) > 3 * _BLOCK
    assert splitter.split(long) == splitter._unicode.findall(long)
    for before in ("x", "!", "\n", "é"):
        edge = "x" * (_BLOCK - 4) + before + " " * 9 + "\n  y 1" + "é" * _BLOCK
        assert splitter.split(edge) == splitter._unicode.findall(edge)
    staged = Splitter(("(?!)", *STAGES[name]))  # not known by name, so run stage by stage
    assert staged.name is None
    assert staged.split(text) == splitter.split(text)


def test_custom_pattern_keeps_what_it_does_not_match():
    assert Splitter(r"[0-9]+").split("ab12cd3") == ["ab", "12", "cd", "3"]
    assert Splitter(r"(?=[A-Z])").split("abCdE") == ["ab", "Cd", "E"]
    assert Splitter(None).split("a b") == ["a b"]
    assert Splitter(STAGES["llama3"]).pattern == "llama3"
    with pytest.raises(TokenizerError, match="valid regex"):
        Splitter("(")
    with pytest.raises(TokenizerError, match="set operations"):
        Splitter(r"[\w&&[^a]]")
    with pytest.raises(TypeError):
        Splitter(3)  # type: ignore[arg-type]


# ---- text and bytes


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from([None, *NAMES, r"\w+"]))
def test_decode_inverts_encode(text, pattern):
    tokenizer = BPETokenizer.train(CORPUS[:400], 300, 2, pattern)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text.encode()) == tokenizer.encode_array(text).tolist()
    assert sum(len(tokenizer.token_bytes(id)) for id in ids) == len(text.encode())
    assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([None, *NAMES]))
def test_any_bytes_survive(data, pattern):
    tokenizer = BPETokenizer.train(data + CORPUS[:200], 300, 2, pattern)
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.binary(max_size=40), texts.map(str.encode)))
def test_streaming_is_decoding_and_never_half_a_character(data):
    tokenizer = ByteTokenizer(range(256))
    stream = tokenizer.decode_stream()
    pushed = [stream.push(id) for id in tokenizer.encode(data)]
    flushed = stream.flush()
    assert "".join(pushed) + flushed == tokenizer.decode(list(data))
    try:
        whole = data.decode()
    except UnicodeDecodeError:
        return
    assert "".join(pushed) == whole
    assert flushed == ""


def test_stream_waits_for_the_whole_character():
    stream = ByteTokenizer(range(256)).decode_stream()
    assert [stream.push(byte) for byte in "é".encode()] == ["", "é"]
    assert stream.push(0xE6) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(0x80) == "\ufffd"
    with pytest.raises(TokenizerError):
        stream.push(256)


def test_special_tokens_are_matched_longest_first_and_only_when_allowed():
    tokenizer = BPETokenizer.train(CORPUS, 400, 2, "gpt2", SPECIAL)
    assert tokenizer.vocab_size == 256 + len(tokenizer.merges) + 3
    first = 256 + len(tokenizer.merges)
    assert tokenizer.special_tokens == {content: first + i for i, content in enumerate(SPECIAL)}
    assert tokenizer.eos_id == first
    assert tokenizer.bos_id is None
    text = "a<|im_start|>user b<|im_start|>x<|endoftext|>"
    ids = tokenizer.encode(text)
    assert [id for id in ids if id >= first] == [first + 2, first + 1, first]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=True) == "a bx"
    plain = tokenizer.encode(text, allow_special=False)
    assert max(plain) < first
    assert plain == tokenizer.encode(text.encode())
    assert tokenizer.byte_lengths[first] == 0
    with pytest.raises(TokenizerError, match="also a learned token"):
        BPETokenizer([(97, 98, 256)], added_tokens=[AddedToken("ab", 257)])
    for pattern in (None, "gpt2"):
        passed_over = BPETokenizer.train(b"the the the", 300, 2, pattern, ("he",))
        assert b"he" in passed_over.vocabulary[256 + len(passed_over.merges) :]
        assert b"th" in passed_over.vocabulary
    with pytest.raises(TokenizerError, match="comes twice"):
        BPETokenizer.train(b"x", 300, 2, None, ("<a>", "<a>"))


@pytest.mark.parametrize("pattern", [None, "gpt2", r"\S+|\s+"])
def test_encode_file_is_encode_in_pieces(tmp_path, pattern):
    path = tmp_path / "text.txt"
    data = CORPUS * 5
    path.write_bytes(data)
    for tokenizer in (BPETokenizer.train(CORPUS, 330, 2, pattern), ByteTokenizer.train(CORPUS)):
        parts = list(tokenizer.encode_file(path, block_bytes=997))
        assert np.concatenate(parts).tolist() == tokenizer.encode(data)
        assert (len(parts) > 3) == (pattern == "gpt2" or tokenizer.kind == "byte")


def test_ids_are_small_unsigned_integers():
    assert BPETokenizer.train(CORPUS).encode_array("abc").dtype == np.uint16
    vocabulary = {**{c: i for i, c in enumerate(map(chr, range(33, 127)))}, "ab": 65_600}
    wide = BPETokenizer([(64, 65, 65_600)], foreign=Foreign(vocabulary))
    assert wide.encode_array("abc").dtype == np.uint32
    assert wide.encode("abc") == [65_600, 66]
    assert BPETokenizer.train(CORPUS).encode_array("").tolist() == []


def test_cache_is_bounded():
    cache = ChunkCache(str.encode, entries=3)
    for chunk in ["a", "b", "c", "d", "x" * 1000]:
        assert cache[chunk] == chunk.encode()
        assert len(cache) <= 3
    assert "x" * 1000 not in cache


# ---- refusals


def test_wrong_types_are_type_errors():
    for value in (True, 300.0, "300", None):
        with pytest.raises(TypeError):
            BPETokenizer.train(b"abc", value)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            BPETokenizer.train(b"abc", 300, value)  # type: ignore[arg-type]
    tokenizer = BPETokenizer.train(b"abc")
    for ids in ([True], [1.0], ["1"], "12", b"12", 5, np.zeros(2), np.zeros((2, 2), int)):
        with pytest.raises(TypeError):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    for text in (5, None, ["a"]):
        with pytest.raises(TypeError):
            tokenizer.encode(text)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ByteTokenizer([True])
    for special in ("<a>", [b"<a>"], [3]):
        with pytest.raises(TypeError):
            BPETokenizer.train(b"abc", 300, special_tokens=special)  # type: ignore[arg-type]
    assert tokenizer.decode(np.array([97, 98], np.uint16)) == tokenizer.decode([np.int64(97), 98]) == "ab"


def test_wrong_values_are_tokenizer_errors():
    for vocab_size, min_frequency in ((255, 2), (-1, 2), (2**32, 2), (300, 0), (300, -1)):
        with pytest.raises(TokenizerError, match=r"must lie in"):
            BPETokenizer.train(b"abc", vocab_size, min_frequency)
    with pytest.raises(TokenizerError, match="at least one byte"):
        BPETokenizer.train(b"")
    with pytest.raises(TokenizerError, match="at least one byte"):
        ByteTokenizer.train(b"")
    with pytest.raises(TokenizerError, match=r"byte 122 .*not in the vocabulary"):
        ByteTokenizer.train(b"abc").encode("abz")
    for tokenizer in (BPETokenizer.train(b"abc"), ByteTokenizer.train(b"abc")):
        for id in (-1, tokenizer.vocab_size):
            with pytest.raises(TokenizerError, match="ids must lie in"):
                tokenizer.decode([0, id])
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode("a\udc80")
    with pytest.raises(TokenizerError, match="not UTF-8"):
        BPETokenizer(()).decode([0xFF], errors="strict")
    assert BPETokenizer(()).decode([0xFF]) == "\ufffd"
    with pytest.raises(TokenizerError, match="vocab_size"):
        BPETokenizer.train(b"abc", 256, special_tokens=["<a>"])
    with pytest.raises(TokenizerError, match="kind"):
        train("unigram", b"abc")
    with pytest.raises(TokenizerError, match="no vocab_size"):
        train("byte", b"abc", vocab_size=3)


def test_restoring_checks_the_state():
    good = BPETokenizer.train(b"abababab", 258, 2).to_state()
    for merges, message in (
        ([[97, 98, 257]], "sequential"),
        ([[97, 256, 256]], "below its id"),
        ([[97, 98, 256], [97, 98, 257]], "repeats"),
        ([[97, 98]], r"must be \(left, right, id\)"),
        ([[-1, 98, 256]], "must lie in"),
        ([[97, 97, 256]] + [[i, i, i + 1] for i in range(256, 350)], "all pieces together"),
    ):
        with pytest.raises(TokenizerError, match=message):
            BPETokenizer.from_state({**good, "merges": merges})
    with pytest.raises(TypeError):
        BPETokenizer.from_state({**good, "merges": [[True, 98, 256]]})
    for broken in ({**good, "kind": "byte"}, {**good, "format": 2}, {**good, "extra": 1}):
        with pytest.raises(TokenizerError):
            BPETokenizer.from_state(broken)
    with pytest.raises(TokenizerError, match="no merges"):
        ByteTokenizer.from_state({"format": 1, "kind": "byte", "byte_values": [1], "merges": []})
    for values, message in (([], "at least one"), ([1, 1], "comes twice"), ([256], "must lie")):
        with pytest.raises(TokenizerError, match=message):
            ByteTokenizer(values)
    with pytest.raises(TokenizerError, match="kind"):
        from_state({"kind": "word"})
    with pytest.raises(TokenizerError, match="role"):
        BPETokenizer((), roles={"eos": "</s>"})


# ---- tokenizer.json

OWN = {
    "byte": lambda: ByteTokenizer.train(CORPUS),
    "byte-in-own-order": lambda: ByteTokenizer(bytes(range(255, -1, -1))),
    "unsplit": lambda: BPETokenizer.train(CORPUS, 400),
    "no-merges": lambda: BPETokenizer(()),
    **{name: lambda name=name: BPETokenizer.train(CORPUS, 420, 2, name, SPECIAL) for name in NAMES},
    "regex": lambda: BPETokenizer.train(CORPUS, 400, 2, r"[^\s]+|\s"),
    "stages": lambda: BPETokenizer.train(CORPUS, 400, 2, (r"\p{N}+", r"\p{L}+")),
    "roles": lambda: BPETokenizer.train(CORPUS, 400, 2, "qwen2", SPECIAL, roles={"pad": SPECIAL[0], "eos": SPECIAL[1]}),
}


@pytest.mark.parametrize("name", OWN)
def test_file_gives_the_peer_the_same_ids_and_comes_back_equal(name, tmp_path):
    tokenizer = OWN[name]()
    other = peer_of(tokenizer, tmp_path)
    for text in [*SAMPLES, "x<|im_start|>user hi<|endoftext|>"]:
        if name == "byte":
            text = "".join(c for c in text if set(c.encode()) <= set(tokenizer.byte_values))
        ids = tokenizer.encode(text)
        assert peer_ids(other, text) == ids
        assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) == text
    assert other.get_vocab_size() == tokenizer.vocab_size
    again = load(tmp_path)
    assert type(again) is type(tokenizer)
    assert again == tokenizer
    assert again.fingerprint() == tokenizer.fingerprint()
    assert from_state(json.loads(json.dumps(tokenizer.to_state()))) == tokenizer
    before = (tmp_path / "tokenizer.json").read_bytes()
    assert again.save(tmp_path / "other" / "t.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "tokenizer.json"], "nothing left beside the file"


@settings(max_examples=100, deadline=None)
@given(texts)
def test_peer_agrees_on_any_text(text):
    for tokenizer, other in _PAIRS:
        assert peer_ids(other, text) == tokenizer.encode(text)


_TRAINED = [BPETokenizer.train(CORPUS, 400, 2, name) for name in [None, *NAMES]]
_PAIRS = [(t, peer.Tokenizer.from_str(json.dumps(to_json(t)))) for t in _TRAINED]


def test_fingerprints_tell_tokenizers_apart():
    prints = {make().fingerprint() for make in OWN.values()}
    assert len(prints) == len(OWN)


def test_duplicate_pieces_are_kept_in_a_form_that_others_refuse(tmp_path):
    merges = [(97, 98, 256), (98, 99, 257), (97, 257, 258), (256, 99, 259)]  # 258 and 259 are both "abc"
    tokenizer = BPETokenizer(merges)
    path = tokenizer.save(tmp_path)
    assert load(tmp_path) == tokenizer
    with pytest.raises(Exception, match=r"riftco|variant"):
        peer.Tokenizer.from_file(str(path))


def _foreign(ignore_merges=False):
    """A file as the peer library trains and writes it: its own id order, special tokens first."""
    other = peer.Tokenizer(peer.models.BPE())
    other.pre_tokenizer = peer.pre_tokenizers.Sequence(
        [peer.pre_tokenizers.Digits(individual_digits=True), peer.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    other.decoder = peer.decoders.ByteLevel()
    trainer = peer.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im start|>"],
        initial_alphabet=peer.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    other.train_from_iterator([CORPUS.decode()] * 2, trainer)
    other.add_tokens(["brown fox"])
    document = json.loads(other.to_str())
    document["model"]["ignore_merges"] = ignore_merges
    if ignore_merges:
        document["model"]["vocab"]["Ġlazy"] = document["model"]["vocab"].pop("Ġlazy", 502)
        document["model"]["merges"] = document["model"]["merges"][:60]
        document["pre_tokenizer"] = to_json(BPETokenizer((), pattern="llama3"))["pre_tokenizer"]
    return document


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("spelling", ["pairs", "strings"])
def test_foreign_files_with_their_own_ids(tmp_path, ignore_merges, spelling):
    document = _foreign(ignore_merges)
    if spelling == "strings":
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im start|>"}, "pad_token": null}')
    other = peer.Tokenizer.from_str(json.dumps(document))
    tokenizer = load(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.foreign is not None
    assert tokenizer.pattern == ("llama3" if ignore_merges else "smollm")
    assert tokenizer.eos_id == 1
    for text in [*SAMPLES, CORPUS.decode(), "the brown fox<|im start|> lazy", "a" * 1000]:
        ids = tokenizer.encode(text)
        assert ids == peer_ids(other, text)
        assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode(text.encode(), allow_special=False) == tokenizer.encode(text.encode())
    rewritten = peer_of(tokenizer, tmp_path / "out")
    assert peer_ids(rewritten, CORPUS.decode()) == peer_ids(other, CORPUS.decode())
    assert rewritten.get_vocab() == other.get_vocab()
    assert load(tmp_path / "out") == tokenizer


def test_foreign_normalizer_unknown_bytes_and_gaps(tmp_path):
    document = to_json(BPETokenizer.train(CORPUS, 300, 2, "qwen2"))
    document["normalizer"] = {"type": "NFC"}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))
    other, tokenizer = peer.Tokenizer.from_file(str(file)), load(file)
    assert tokenizer.encode("e\u0301") == peer_ids(other, "e\u0301") == tokenizer.encode("é")
    assert tokenizer.decode_bytes(tokenizer.encode("e\u0301".encode())) == "e\u0301".encode(), (
        "bytes are taken as they are"
    )

    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "[PAD]": 9}
    kwargs = {"added_tokens": (AddedToken("<unk>", 0),)}
    merges = [(1, 2, 3)]
    tokenizer = BPETokenizer(merges, foreign=Foreign(vocabulary, unk_token="<unk>"), **kwargs)
    other = peer_of(tokenizer, tmp_path / "unk")
    assert tokenizer.encode("abxxa") == peer_ids(other, "abxxa") == [3, 0, 0, 1]
    strict = BPETokenizer(merges, foreign=Foreign(vocabulary))
    with pytest.raises(TokenizerError, match="byte 120"):
        strict.encode("abx")
    assert strict.vocab_size == 10
    with pytest.raises(TokenizerError, match="unused"):
        strict.decode([5])
    assert strict.token_bytes(9) == b"[PAD]"


def test_a_foreign_file_without_some_bytes_leaves_them_out_as_the_library_does(tmp_path):
    document = to_json(BPETokenizer([(0, 1, 2)], foreign=Foreign({"a": 0, "b": 1, "ab": 2})))
    del document["decoder"]["riftco"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    other, tokenizer = peer.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load(tmp_path)
    assert tokenizer.encode("axbab") == peer_ids(other, "axbab") == [2, 2]
    assert tokenizer.encode("x") == peer_ids(other, "x") == []
    tokenizer.save(tmp_path / "again")
    assert load(tmp_path / "again") == tokenizer == from_state(tokenizer.to_state())
    strict = BPETokenizer([(0, 1, 2)], foreign=Foreign({"a": 0, "b": 1, "ab": 2}))
    strict.save(tmp_path / "strict")
    assert load(tmp_path / "strict") == strict != tokenizer
    assert "drop_unknown" not in strict.to_state()["foreign"]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("normalizer", lambda d: d.update(normalizer={"type": "Lowercase"})),
        ("model.type", lambda d: d["model"].update(type="Unigram")),
        ("model.type", lambda d: d["model"].update(type="WordPiece")),
        ("model.byte_fallback", lambda d: d["model"].update(byte_fallback=True)),
        ("model.dropout", lambda d: d["model"].update(dropout=0.1)),
        ("model.end_of_word_suffix", lambda d: d["model"].update(end_of_word_suffix="</w>")),
        ("model.continuing_subword_prefix", lambda d: d["model"].update(continuing_subword_prefix="##")),
        ("pre_tokenizer", lambda d: d.update(pre_tokenizer={"type": "Metaspace"})),
        ("pre_tokenizer", lambda d: d.update(pre_tokenizer=None)),
        ("pre_tokenizer", lambda d: d.update(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True})),
        ("decoder", lambda d: d.update(decoder={"type": "Metaspace"})),
        ("decoder", lambda d: d.update(decoder=None)),
        ("post_processor", lambda d: d.update(post_processor={"type": "BertProcessing"})),
        ("truncation", lambda d: d.update(truncation={"max_length": 5})),
        ("lstrip", lambda d: d["added_tokens"][0].update(lstrip=True)),
        ("single_word", lambda d: d["added_tokens"][0].update(single_word=True)),
        (r"merges\[0\]", lambda d: d["model"].update(merges=["a b c"])),
        (r"merges\[0\]", lambda d: d["model"].update(merges=[["no", "pe"]])),
        ("well-formed", lambda d: d.pop("model")),
        ("well-formed", lambda d: d["model"].pop("vocab")),
        ("riftco.format", lambda d: d["decoder"]["riftco"].update(format=99)),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, field, change):
    document = to_json(BPETokenizer.train(CORPUS, 300, 2, "gpt2", SPECIAL))
    change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match=field):
        load(tmp_path)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(TokenizerError, match="missing"):
        load(tmp_path / "missing")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(TokenizerError, match="JSON is required"):
        load(tmp_path / "broken.json")
    with pytest.raises(TokenizerError, match="cannot be written"):
        ByteTokenizer(b"a").save(tmp_path / "broken.json" / "x")


@pytest.mark.parity
def test_transformers_opens_the_directory(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = BPETokenizer.train(CORPUS, 420, 2, "llama3", SPECIAL)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer.tokenizer_config(model_max_length=64)))
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert other.eos_token_id == tokenizer.eos_id
    for text in SAMPLES:
        ids = other.encode(text, add_special_tokens=False)
        assert ids == tokenizer.encode(text)
        assert other.decode(ids) == text


@pytest.mark.tiny
def test_import_brings_no_jax():
    code = "import sys, riftco.tokenizers, riftco.oracle.bpe; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

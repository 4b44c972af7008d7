"""Examples for post-training: formats, weights by hand, packing, sources, splits, generated compositions, the verbs."""

import hashlib
import itertools
import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from riftco import cli, data, models
from riftco.data import compositions, packing, splits
from riftco.data.sft import Encoded
from riftco.errors import ConfigError, DataError
from riftco.tokenizers import AddedToken, BPETokenizer, ByteTokenizer
from tests.training_program import compilation_cache

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
END = "<|endoftext|>"
USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def bytewise(**roles):
    """Every byte is a token, and so is what each role names."""
    added = [AddedToken(content, 256 + index) for index, content in enumerate(roles.values())]
    return BPETokenizer([], added_tokens=added, roles=roles)


def plain():
    return bytewise(eos=END)


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(tmp_path, *rows):
    return data.read_examples(write(tmp_path / "rows.jsonl", *rows))


def learned(tokenizer, encoded):
    """The stretches of text whose tokens count."""
    pairs = zip(encoded.ids, encoded.weights, strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[1] > 0)
    return [tokenizer.decode([id for id, _ in group]) for is_learned, group in groups if is_learned]


def example(n, weights=None, base=0):
    ids = np.arange(base, base + n, dtype=np.int32) % 30
    return Encoded(ids, np.ones(n, np.float32) if weights is None else np.asarray(weights, np.float32), f"f:{base}")


def encoded_set(lengths, context, rng=None):
    items = []
    for index, n in enumerate(lengths):
        ids = (np.arange(n) * 7 + index * 11) % 30 if rng is None else rng.integers(0, 30, n)
        weights = (np.arange(n) >= n // 2).astype(np.float32)
        items.append(Encoded(ids.astype(np.int32), weights, f"f:{index}"))
    return data.EncodedSet(tuple(items), context, "response", data.EncodingReport(len(items), len(items)))


# ---------------------------------------------------------------- formats


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("kind", "row", "messages", "context"),
    [
        ("messages", {"messages": [USER, ANSWER], "id": 3}, [USER, ANSWER], 0),
        ("completion", {"prompt": "q", "completion": "a"}, [USER, ANSWER], 1),
        ("response", {"prompt": "q", "response": "a"}, [USER, ANSWER], 1),
        ("completion", {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, [USER, ANSWER, USER, ANSWER], 3),
        ("completion", {"prompt": [USER], "completion": "a"}, [USER, ANSWER], 1),
        ("alpaca", {"instruction": "q", "output": "a"}, [USER, ANSWER], 1),
        ("alpaca", {"instruction": "q", "input": " ", "output": "a"}, [USER, ANSWER], 1),
        ("alpaca", {"instruction": "q", "input": "x", "output": "a"}, [{**USER, "content": "q\n\nx"}, ANSWER], 1),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, [USER], 0),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
            [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            0,
        ),
    ],
)
def test_each_format_is_detected_and_becomes_a_conversation(tmp_path, kind, row, messages, context):
    file = read(tmp_path, "", row, "  ", row)
    assert file.format == kind and [r.where for r in file.rows] == [f"{file.path}:2", f"{file.path}:4"]
    assert list(file.rows[0].messages) == messages and file.rows[0].given == context
    assert file.sha256 == hashlib.sha256(Path(file.path).read_bytes()).hexdigest()


@pytest.mark.tiny
def test_texts_and_preferences(tmp_path):
    assert read(tmp_path, {"text": "t\u2028"}).rows[0].text == "t\u2028"
    better, worse = ({**ANSWER, "content": text} for text in ("yes", "no"))
    for row in (
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [better], "rejected": [worse]},
        {"chosen": [USER, better], "rejected": [USER, worse]},
    ):
        file = read(tmp_path, row)
        found = file.rows[0]
        assert file.format == "preference"
        assert (list(found.prompt), list(found.chosen), list(found.rejected)) == ([USER], [better], [worse])


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ({"text": "t"}, '{"text": ', "not JSON"),
        ({"text": "t"}, "[" * 100_000, "not JSON"),
        ({"text": "t"}, "[1]", "a list"),
        ({"text": "t"}, {"text": " "}, "white space alone"),
        ({"text": "t"}, {"text": "\ud800"}, "lone surrogate"),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "response": "a"}, "the key 'completion'"),
        ({"prompt": "q", "completion": "a"}, {"prompt": "", "completion": "a"}, "an empty string"),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": 3}, "a int"),
        ({"prompt": "q", "completion": "a"}, {"prompt": [], "completion": "a"}, "an empty list"),
        ({"instruction": "q", "output": "a"}, {"instruction": "q", "input": 3, "output": "a"}, "as 'input'"),
        ({"messages": [USER]}, {"messages": "q"}, "a list of messages as 'messages'"),
        ({"messages": [USER]}, {"messages": [USER, {"content": "x"}]}, "messages[1]; file"),
        ({"messages": [USER]}, {"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER]}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
        ({"messages": [USER]}, {"messages": [{"role": "user", "content": "\udc00"}]}, "lone surrogate"),
        ({"chosen": [USER], "rejected": [USER]}, {"chosen": "a", "rejected": "b"}, "the key 'prompt'"),
        ({"chosen": [USER], "rejected": [USER]}, {"prompt": "q", "chosen": "b"}, "the key 'rejected'"),
    ],
)
def test_every_fault_is_named_by_file_and_line(tmp_path, good, bad, words):
    with pytest.raises(DataError) as caught:
        read(tmp_path, good, "", bad)
    message = str(caught.value)
    assert "rows.jsonl' line 3: " in message and words in message and "\n" not in message


def test_files_that_hold_no_examples(tmp_path):
    with pytest.raises(DataError, match=r"known format .*\{\"prompt\", \"completion\"\}.*line 1: it has 'a'"):
        read(tmp_path, {"a": 1})
    with pytest.raises(DataError, match=r"turn each \{from, value\}"):
        read(tmp_path, {"conversations": []})
    with pytest.raises(DataError, match="at least one row"):
        read(tmp_path, "", " ")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2: byte 0xff"):
        data.read_examples(tmp_path / "bytes.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        data.load_examples(tmp_path / "none.jsonl")


def test_a_directory_of_splits(tmp_path):
    with pytest.raises(DataError, match=r"no train\.jsonl"):
        data.load_examples(tmp_path)
    write(tmp_path / "train.jsonl", {"text": "a"})
    write(tmp_path / "valid.jsonl", {"prompt": "q", "response": "a"})
    found = data.load_examples(tmp_path)
    assert {name: file.format for name, file in found.items()} == {"train": "text", "validation": "response"}
    write(tmp_path / "test.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match="must all hold preferences or none"):
        data.load_examples(tmp_path)
    write(tmp_path / "test.jsonl", {"text": "b"}, {"text": " a\n"})
    with pytest.warns(UserWarning, match=r"train\.jsonl:1 is .*test\.jsonl:2$"):
        data.load_examples(tmp_path)


# ---------------------------------------------------------------- weights


@pytest.mark.tiny
def test_the_answer_and_its_end_are_learned_and_nothing_else(tmp_path):
    tokenizer, row = plain(), read(tmp_path, {"prompt": " q? ", "completion": "yes "}).rows[0]
    found = data.encode_example(tokenizer, row)
    text = "### User:\nq?\n### Assistant:\nyes" + END + "\n"
    assert tokenizer.decode(found.ids) == text
    assert len(found.ids) == len(text) - len(END) + 1
    before = len("### User:\nq?\n### Assistant:\n")
    assert found.weights.tolist() == [0.0] * before + [1.0] * len("yes") + [1.0] + [0.0]
    assert found.ids.dtype == np.int32 and found.weights.dtype == np.float32 and found.targets == 4
    everything = data.encode_example(tokenizer, row, loss_on="all")
    assert everything.weights.all() and everything.targets == len(found.ids) - 1
    assert (everything.ids == found.ids).all()
    with pytest.raises(ConfigError, match="loss_on"):
        data.encode_example(tokenizer, row, loss_on="prompt")  # pyright: ignore[reportArgumentType]


def test_answers_in_a_conversation(tmp_path):
    tokenizer = bytewise(bos="<s>", eos="</s>")
    chat = [{"role": "system", "content": "s"}, USER, ANSWER, USER, {**ANSWER, "content": "b"}]
    row = read(tmp_path, {"messages": chat}).rows[0]
    assert learned(tokenizer, data.encode_example(tokenizer, row)) == ["a</s>", "b</s>"]
    assert learned(tokenizer, data.encode_example(tokenizer, row, template=CHATML)) == ["a</s>", "b</s>"]
    own = tokenizer.with_chat_template(CHATML)
    found = data.encode_example(own, row)
    assert own.decode(found.ids).startswith("<s>system\ns</s>\n<s>user\n")
    # What stands in a prompt is context, an answer there too.
    given = read(tmp_path, {"prompt": chat[:4], "completion": "b"}).rows[0]
    for template in (None, CHATML):
        assert learned(tokenizer, data.encode_example(tokenizer, given, template=template)) == ["b</s>"]
    blank = read(tmp_path, {"messages": [USER, {**ANSWER, "content": " "}, USER, ANSWER]}).rows[0]
    assert learned(tokenizer, data.encode_example(tokenizer, blank)) == ["a</s>"]


def test_the_first_token_is_never_doubled(tmp_path):
    tokenizer = bytewise(bos="<s>", eos="</s>")
    first, last = tokenizer.bos_id, tokenizer.eos_id
    row = read(tmp_path, {"prompt": "q", "response": "a"}).rows[0]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    ids = data.encode_example(tokenizer, row, template=template).ids.tolist()
    assert ids.count(first) == 1 and ids[0] == first and ids[-2:] == [ord("a"), last]
    # A text: only what the tokenizer's own file adds, and the end once.
    for text in ("t", "t</s>"):
        assert data.encode_example(tokenizer, data.Example("f:1", text=text)).ids.tolist() == [ord("t"), last]
    document = {
        **json.loads((tokenizer.save(tmp_path)).read_text()),
        "post_processor": {
            "type": "Sequence",
            "processors": [
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [first], "tokens": ["<s>"]}},
                },
            ],
        },
    }
    from riftco.tokenizers import hf_read

    foreign = hf_read.from_json(document, roles={"bos": "<s>", "eos": "</s>"})
    for text in ("t", "<s>t"):
        assert data.encode_example(foreign, data.Example("f:1", text=text)).ids.tolist() == [first, ord("t"), last]


def test_a_tokenizer_without_special_tokens(tmp_path):
    tokenizer = ByteTokenizer.train(b"### User:\nAssistant qa.")
    row = read(tmp_path, {"prompt": "q", "completion": "a."}).rows[0]
    assert learned(tokenizer, data.encode_example(tokenizer, row)) == ["a.\n"]
    whole = data.encode_example(tokenizer, data.Example("f:1", text="qa"))
    assert tokenizer.decode(whole.ids) == "qa" and whole.weights.all()
    with pytest.raises(DataError, match=r"data: f:7: .*byte"):
        data.encode_example(tokenizer, data.Example("f:7", (USER, {**ANSWER, "content": "z"})))
    with pytest.raises(DataError, match="data: f:7: chat template: nothing doing"):
        data.encode_example(
            tokenizer, data.Example("f:7", (USER, ANSWER)), template="{{ raise_exception('nothing doing') }}"
        )


def test_what_is_cut_and_what_is_left_out_is_counted(tmp_path):
    tokenizer = plain()
    head = len("### User:\nq\n### Assistant:\n")
    rows = read(
        tmp_path,
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "completion": "long answer"},
        {"prompt": "a prompt that is long", "completion": "a"},
        {"prompt": "q", "completion": "  "},
    ).rows
    context = head + 3
    with pytest.warns(
        UserWarning, match=r"2 left out: 1 have no response, 1 lose the response to truncation \(.*:3, .*:4\)"
    ):
        found = data.encode_examples(tokenizer, rows, context)
    report = found.report
    assert (report.read, report.kept, report.no_response, report.cut_response) == (4, 2, 1, 1)
    assert report.truncated == 1 and report.dropped_tokens == head + len("long answer") + 2 - (context + 1)
    assert report.tokens == (head + 3) + (context + 1) and report.targets == 2 + 4
    assert [len(item.ids) for item in found.items] == [head + 3, context + 1]
    assert "2 of 4 examples" in str(report) and "rows.jsonl:3" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = data.encode_examples(tokenizer, rows[:3], 1000)
    assert not whole.report.skipped and whole.report.truncated == 0
    for bad, words in [(rows[3:], "1 have no response"), (rows[2:3], "1 lose the response"), ((), "none were given")]:
        with pytest.raises(DataError, match=rf"at least one example with a response.*{words}"):
            data.encode_examples(tokenizer, bad, context)
    # Every target counts under "all", so the example that lost its answer stays.
    assert data.encode_examples(tokenizer, rows[2:3], context, loss_on="all").report.targets == context
    assert found.fingerprint != whole.fingerprint
    with pytest.raises(ConfigError, match="context"):
        data.encode_examples(tokenizer, rows, 0)


def test_a_cut_leaves_as_many_inputs_as_fit_and_their_targets():
    assert [len(example(n).cut(4).ids) for n in (3, 5, 6, 9)] == [3, 5, 5, 5]
    assert example(9).cut(4).weights.shape == (5,) and example(1).targets == 0 and example(5).targets == 4


def test_preferences_are_pairs_that_differ(tmp_path):
    tokenizer = plain()
    rows = read(
        tmp_path,
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": "same", "rejected": "same "},
        {"prompt": "q", "chosen": "yes", "rejected": ""},
    ).rows
    with pytest.warns(UserWarning, match="1 have no response, 1 have two identical answers"):
        found = data.encode_preferences(tokenizer, rows, 100)
    ((chosen, rejected),) = found.items
    assert learned(tokenizer, chosen) == ["yes" + END] and learned(tokenizer, rejected) == ["no" + END]
    examples = read(tmp_path, {"prompt": "q", "completion": "a"}).rows
    with pytest.raises(DataError, match="objective dpo"):
        data.encode_examples(tokenizer, rows, 100)
    with pytest.raises(DataError, match="objective sft"):
        data.encode_preferences(tokenizer, examples, 100)
    with pytest.raises(DataError, match="PreferenceSource"):
        data.PackedExampleSource(found, 1, 0)
    with pytest.raises(DataError, match="pairs"):
        data.PreferenceSource(data.encode_examples(tokenizer, examples, 100), 1, 0)
    batch = data.PreferenceSource(found, 2, 0).batch(3)
    n, m = len(chosen.ids) - 1, len(rejected.ids) - 1
    assert batch.tokens.shape == (2, n + m)
    assert batch.segment_ids is not None and batch.segment_ids[0].tolist() == [1] * n + [2] * m
    assert batch.positions is not None and batch.positions[1].tolist() == [*range(n), *range(m)]
    assert batch.targets[0, n:].tolist() == rejected.ids[1:].tolist()


# ---------------------------------------------------------------- packing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=40), st.integers(12, 30))
def test_first_fit_is_first_fit(sizes, capacity):
    bins: list[list[int]] = []
    for index, size in enumerate(sizes):
        for held in bins:
            if sum(sizes[i] for i in held) + size <= capacity:
                held.append(index)
                break
        else:
            bins.append([index])
    assert packing.first_fit(sizes, capacity) == bins


def test_an_example_that_does_not_fit_is_an_error():
    with pytest.raises(DataError, match="a row of 4 tokens; one has 5"):
        packing.first_fit([1, 5], 4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=20), st.integers(0, 2**64 - 1), st.integers(1, 3))
def test_packed_rows_hold_every_example_whole_once_an_epoch(lengths, seed, batch_size):
    encoded = encoded_set(lengths, context=8)
    source = data.PackedExampleSource(encoded, batch_size, seed)
    first = source.epoch(0)
    assert sorted(itertools.chain(*first)) == list(range(len(lengths)))
    assert source.epoch(0) == first == data.PackedExampleSource(encoded, batch_size, seed).epoch(0)
    stream = first + source.epoch(1) + source.epoch(2)
    for step in range(len(stream) // batch_size):
        batch = source.batch(step)
        assert batch.segment_ids is not None and batch.positions is not None and batch.weights is not None
        assert (batch.weights.sum(axis=1) > 0).all()
        for row, items in enumerate(stream[step * batch_size : (step + 1) * batch_size]):
            assert batch.segment_ids[row].max() == len(items)
            for segment, item in enumerate(items, start=1):
                here, one = batch.segment_ids[row] == segment, encoded.items[item]
                assert batch.tokens[row][here].tolist() == one.ids[:-1].tolist()
                assert batch.targets[row][here].tolist() == one.ids[1:].tolist()
                assert batch.weights[row][here].tolist() == one.weights[1:].tolist()
                assert batch.positions[row][here].tolist() == list(range(len(one.ids) - 1))
            empty = batch.segment_ids[row] == 0
            assert not batch.weights[row][empty].any() and not batch.tokens[row][empty].any()


@pytest.mark.parametrize("make", [data.PackedExampleSource, data.PaddedExampleSource])
def test_a_source_is_a_function_of_seed_and_step_and_can_be_resumed(make):
    encoded = encoded_set([3, 5, 8, 2, 9, 4, 6], context=8)
    source = make(encoded, 4, 11)
    batches = [source.next() for _ in range(9)]
    state = json.loads(json.dumps(source.state()))
    later = make(encoded, 4, 11)
    later.restore(state)
    assert later.batches_emitted == 9 and same(later.next(), source.next())
    assert all(same(later.batch(step), batch) for step, batch in reversed(list(enumerate(batches))))
    half = later.batch(2, rows=(1, 3))
    assert (half.tokens == batches[2].tokens[1:3]).all() and (half.ids == batches[2].ids[1:3]).all()
    for other in (make(encoded, 4, 12), make(encoded, 2, 11), make(encoded_set([3, 5, 8], 8), 4, 11)):
        with pytest.raises(DataError, match="other data or options"):
            other.restore(state)
    assert source.epochs_before(0) == 0 and source.epochs_before(8) > source.epochs_before(7) > 1
    assert not same(make(encoded, 7, 11).batch(0), make(encoded, 7, 11).batch(1))
    with pytest.raises(ConfigError, match="batch_size"):
        make(encoded, 0, 11)


def same(one, other):
    names = ("tokens", "targets", "weights", "segment_ids", "positions", "ids")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_padded_rows_hold_one_example_each():
    encoded = encoded_set([3, 5, 2], context=8)
    batch = data.PaddedExampleSource(encoded, 3, 0).batch(0)
    assert batch.tokens.shape == (3, 4) and batch.segment_ids is None and batch.positions is None
    assert batch.weights is not None and batch.ids is not None and sorted(batch.ids[:, 0].tolist()) == [0, 1, 2]
    for row, (item, _) in enumerate(batch.ids.tolist()):
        one = encoded.items[item]
        n = len(one.ids) - 1
        assert batch.targets[row, :n].tolist() == one.ids[1:].tolist() and not batch.weights[row, n:].any()


# ---------------------------------------------------------------- through the model

ROPE = models.DecoderConfig(30, 24, 16, 2, 1, 24, kv_heads=1, norm="rms", mlp="swiglu", position="rope")
LEARNED = models.DecoderConfig(30, 24, 16, 2, 1, 24)
_forward = jax.jit(models.forward, static_argnums=2, static_argnames=("attention",))


def packed_row(rng):
    examples = [example(n, base=int(rng.integers(30))) for n in (8, 5, 9)]
    return examples, packing.lay_out([examples], 24, np.zeros((1, 2), np.int64), "test", segmented=True)


@pytest.mark.parametrize("config", [ROPE, LEARNED], ids=["rope", "learned"])
def test_packed_logits_are_those_of_each_example_alone(config, rng):
    params = models.init(jax.random.key(0), config)
    examples, batch = packed_row(rng)
    packed = _forward(params, batch.tokens, config, segment_ids=batch.segment_ids, positions=batch.positions)
    without = _forward(params, batch.tokens, config)
    start = 0
    for one in examples:
        n = len(one.ids) - 1
        padded = np.zeros((1, 24), np.int32)
        padded[0, :n] = one.ids[:-1]
        alone = np.asarray(_forward(params, padded, config))[0, :n]
        np.testing.assert_allclose(np.asarray(packed)[0, start : start + n], alone, atol=1e-5)
        # The check can fail: without segments and positions later examples differ.
        if start:
            assert np.abs(np.asarray(without)[0, start : start + n] - alone).max() > 1e-3
        start += n


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_changing_one_packed_example_leaves_the_others_bit_identical(attention, rng):
    params = models.init(jax.random.key(1), LEARNED)
    _, batch = packed_row(rng)
    assert batch.segment_ids is not None
    options = {"segment_ids": batch.segment_ids, "positions": batch.positions, "attention": attention}
    before = np.asarray(_forward(params, batch.tokens, LEARNED, **options))
    for segment in (1, 2, 3):
        here = batch.segment_ids == segment
        after = np.asarray(_forward(params, np.where(here, (batch.tokens + 5) % 30, batch.tokens), LEARNED, **options))
        assert (after[~here] == before[~here]).all()
        assert (after[here] != before[here]).any(axis=-1).all()


def test_the_step_and_the_evaluator_pass_segments_and_positions_on():
    from riftco import train

    encoded = encoded_set([14, 9, 6, 12, 13, 7, 20, 5], context=24, rng=np.random.default_rng(3))
    params = models.init(jax.random.key(2), LEARNED)
    total = targets = 0.0
    for one in encoded.items:
        padded = packing.lay_out([[one]], 24, np.zeros((1, 2), np.int64), "test", segmented=False)
        options = {"weights": padded.weights, "reduction": "sum"}
        total += float(_loss(params, padded.tokens, padded.targets, LEARNED, **options))
        targets += one.targets
    windows = data.ExampleWindows(encoded, 2)
    result = train.evaluate(params, LEARNED, windows)
    assert result.targets == targets == windows.target_count and result.sequences == 8
    assert len(list(windows)) == len(windows) == 2
    assert result.loss == pytest.approx(total / targets, abs=1e-5)
    # One row of three is filled up: the same mean from a batch that is not full.
    assert train.evaluate(params, LEARNED, data.ExampleWindows(encoded, 3)).loss == pytest.approx(result.loss, abs=1e-5)

    source = data.PackedExampleSource(encoded, len(data.PackedExampleSource(encoded, 1, 0).epoch(0)), 0)
    for accumulate in (1, source.batch_size):
        run = train.TrainConfig(
            max_steps=1, batch_size=source.batch_size // accumulate, grad_accumulation_steps=accumulate
        )
        step = train.make_train_step(LEARNED, run)
        state = train.init_state(LEARNED, run, params=params)
        _, metrics = step(state, source.batch(0).arrays(), np.int32(0))
        assert float(metrics.loss) == pytest.approx(total / targets, abs=1e-5)
        assert int(metrics.targets) == targets and bool(metrics.ok)


_loss = jax.jit(models.loss, static_argnums=3, static_argnames=("reduction",))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with compilation_cache(tmp_path_factory.getbasetemp() / "compiled"):
        yield


def test_a_run_on_packed_examples_resumes_bit_for_bit(tmp_path, rng, compiled):
    from riftco import train

    encoded = encoded_set([4, 9, 6, 12, 3, 7, 10, 5], context=24, rng=rng)
    make = lambda steps, **more: train.TrainConfig(max_steps=steps, batch_size=2, lr_schedule="constant", **more)
    whole = train.train(ROPE, make(5), data.PackedExampleSource(encoded, 2, 3))
    out = str(tmp_path / "run")
    train.train(ROPE, make(3, out_dir=out), data.PackedExampleSource(encoded, 2, 3))
    rest = train.train(ROPE, make(5, out_dir=out, resume="auto"), data.PackedExampleSource(encoded, 2, 3))
    assert rest.step == 5
    jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)


def test_fixed_batches_keep_their_segments(rng):
    from riftco import train

    _, batch = packed_row(rng)
    source = train.FixedBatchSource([batch])
    assert same(source.batch(0), batch)
    other = packing.lay_out([packed_row(rng)[0][:1]], 24, np.zeros((1, 2), np.int64), "test", segmented=True)
    assert train.FixedBatchSource([other]).fingerprint != source.fingerprint


# ---------------------------------------------------------------- splits


def rows(n):
    return [{"prompt": f"question {i}", "response": f"answer {i}", "category": i % 3} for i in range(n)]


def test_splits_are_those_of_the_reference_implementation(tmp_path):
    reference = pytest.importorskip("riftco_transformer.data.splitting")
    splitter = reference.StableHashSplitter(seed=7)
    made = data.split_examples(write(tmp_path / "rows.jsonl", *rows(60)), tmp_path / "out")
    found = data.load_examples(tmp_path / "out")
    for name, file in found.items():
        for one in file.rows:
            prompt, response = (message["content"] for message in one.messages)
            assert splitter.assign({"prompt": prompt, "response": response}) == name
    assert sum(side.rows for side in made.files.values()) == 60 and len(made.files) == 3


def test_splits_are_deterministic_stable_and_without_duplicates(tmp_path):
    first = write(tmp_path / "a.jsonl", *rows(40), rows(1)[0], {"prompt": "question  1 ", "response": "answer\n1"})
    made = data.split_examples(first, tmp_path / "a", seed=3)
    assert (made.read, made.exact_duplicates, made.space_duplicates) == (42, 1, 1)
    again = data.split_examples(first, tmp_path / "b", seed=3)
    assert again == made == splits.read_splits(tmp_path / "a")
    for name in ["splits.json", *(side.file for side in made.files.values())]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    # In another order, and with more rows beside it, a row stays on its side.
    data.split_examples(write(tmp_path / "c.jsonl", *reversed(rows(80))), tmp_path / "c", seed=3)
    sides = lambda place: {
        (one.messages[0]["content"], name) for name, file in data.load_examples(place).items() for one in file.rows
    }
    assert sides(tmp_path / "a") < sides(tmp_path / "c")
    assert sides(tmp_path / "a") != sides_of_seed(first, tmp_path / "d", sides)


def sides_of_seed(path, out, sides):
    data.split_examples(path, out, seed=4)
    return sides(out)


def test_splitting_by_prompt_keeps_a_prompt_on_one_side(tmp_path):
    many = [{"prompt": f"q {i % 12}", "completion": f"a {i}"} for i in range(72)]
    path = write(tmp_path / "rows.jsonl", *many)
    loose = data.split_examples(path, tmp_path / "loose", seed=1)
    assert loose.shared_prompts > 0 and "split by prompt" in str(loose)
    strict = data.split_examples(path, tmp_path / "strict", seed=1, by="prompt", validation_fraction=0.3)
    assert strict.shared_prompts == 0 and len(strict.files) > 1
    where: dict[str, set[str]] = {}
    for name, file in data.load_examples(tmp_path / "strict").items():
        for one in file.rows:
            where.setdefault(one.messages[0]["content"], set()).add(name)
    assert all(len(names) == 1 for names in where.values())


@pytest.mark.parametrize(
    "row",
    [
        {"text": "t {}"},
        {"messages": [USER, {"role": "assistant", "content": "{}"}]},
        {"instruction": "q {}", "output": "a"},
        {"prompt": "q", "chosen": "a {}", "rejected": "b"},
    ],
)
def test_every_format_can_be_split_and_keeps_its_rows(tmp_path, row):
    many = [json.loads(json.dumps({**row, "more": 1}).replace("{}", str(i))) for i in range(20)]
    made = data.split_examples(write(tmp_path / "rows.jsonl", *many), tmp_path / "out", seed=0, test_fraction=0)
    kept = [line for side in made.files.values() for line in (tmp_path / "out" / side.file).read_text().splitlines()]
    assert sorted(kept) == sorted(json.dumps(one, sort_keys=True, separators=(",", ":")) for one in many)
    assert data.load_examples(tmp_path / "out")["train"].format == made.row_format


def test_splits_are_verified_when_they_are_read(tmp_path):
    path, out = write(tmp_path / "rows.jsonl", *rows(40)), tmp_path / "out"
    data.split_examples(path, out)
    valid, manifest = out / "valid.jsonl", out / "splits.json"
    content = valid.read_bytes()
    valid.write_bytes(content.replace(b"answer", b"Answer", 1))
    with pytest.raises(DataError, match=r"valid\.jsonl' must have the SHA-256"):
        data.load_examples(out)
    valid.unlink()
    with pytest.raises(DataError, match="these differ: validation"):
        data.load_examples(out)
    valid.write_bytes(content)
    data.load_examples(out)
    good = manifest.read_text()
    for old, new in [
        ('"version": 1', '"version": 2'), ('"file": "valid.jsonl"', '"file": "../x"'), ('"seed": 7,', ""),
        ("{", "["), ('"seed": 7', '"seed": 7, "more": 1'),
    ]:  # fmt: skip
        manifest.write_text(good.replace(old, new, 1))
        with pytest.raises(DataError, match=r"splits\.json' must be what"):
            data.load_examples(out)
    manifest.write_text(good)
    with pytest.raises(DataError, match="must be new"):
        data.split_examples(path, out)
    data.split_examples(path, out, seed=9, force=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds notes\.txt besides"):
        data.split_examples(path, out, seed=9, force=True)
    assert (found := data.read_splits(out)) is not None and found.seed == 9
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "keep.txt", "mine")
    with pytest.raises(DataError, match="force replaces only splits"):
        data.split_examples(path, tmp_path / "full", force=True)
    assert (tmp_path / "full" / "keep.txt").read_text() == "mine\n"


def test_splits_that_cannot_be_made(tmp_path):
    path = write(tmp_path / "rows.jsonl", *rows(3))
    for options, words in [
        ({"validation_fraction": -0.1}, "validation_fraction"),
        ({"test_fraction": float("nan")}, "test_fraction"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave some for training"),
        ({"by": "row"}, "by must be"),
        ({"seed": -1}, "seed"),
    ]:
        with pytest.raises(ConfigError, match=words):
            data.split_examples(path, tmp_path / "out", **options)
    with pytest.raises(DataError, match="fall to training"):
        data.split_examples(path, tmp_path / "out", validation_fraction=0.99999, test_fraction=0)
    bad = write(tmp_path / "bad.jsonl", rows(1)[0], '{"prompt": "q", "response": "a", "x": NaN}')
    with pytest.raises(DataError, match=r"strict JSON; file '.*bad\.jsonl' line 2"):
        data.split_examples(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- generated compositions


def test_compositions_hold_pairs_out_of_training_and_answer_rightly():
    made = data.generate_compositions(1200, seed=5)
    assert {name: len(side) for name, side in made.items()} == {"train": 1200, "validation": 300, "test": 300}
    prompts = {name: {row["prompt"] for row in side} for name, side in made.items()}
    assert (
        not prompts["train"] & (prompts["validation"] | prompts["test"]) and not prompts["validation"] & prompts["test"]
    )
    for name in ("train", "validation"):
        assert not any(row["held_out"] for row in made[name])
    assert [row["held_out"] for row in made["test"]] == [True, False] * 150
    seen = {tuple(row["operations"]) for row in made["train"]}
    held = {tuple(row["operations"]) for row in made["test"] if row["held_out"]}
    assert held == compositions.HELD_OUT and not held & seen and {pair[::-1] for pair in held} == held
    names = set(compositions.OPERATIONS)
    assert {(name,) for name in names} < seen
    pairs = [pair for pair in seen if len(pair) == 2]
    assert {first for first, _ in pairs} == {second for _, second in pairs} == names
    for row in itertools.chain(*made.values()):
        text, _, words = row["prompt"].partition(": ")
        result = words.split(", ")
        for step in text.lower().split(", then "):
            result = BY_HAND[step](result)
        assert row["completion"] == ", ".join(result)
    assert data.generate_compositions(1200, seed=5) == made != data.generate_compositions(1200, seed=6)
    assert data.generate_compositions(30, seed=5)["train"] == made["train"][:30]


BY_HAND = {
    "reverse the words": lambda w: list(reversed(w)),
    "sort the words": lambda w: sorted(w),
    "drop the first word": lambda w: w[1:],
    "drop the last word": lambda w: w[: len(w) - 1],
    "say the first word twice": lambda w: w[:1] + w,
    "move the first word to the end": lambda w: w[1:] + w[:1],
    "swap the first and the last word": lambda w: w[-1:] + w[1:-1] + w[:1],
    "spell the last word": lambda w: [*w[:-1], "-".join(list(w[-1]))],
}


# ---------------------------------------------------------------- the verbs


def run(capsys, *words):
    code = cli.main([str(word) for word in words])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_show_marks_what_is_learned(tmp_path, capsys, monkeypatch):
    plain().save(tmp_path / "tokenizer")
    path = write(tmp_path / "rows.jsonl", {"prompt": "q", "completion": "ä b"}, {"prompt": "q", "completion": " "})
    show = ["data", "show", path, "--tokenizer", tmp_path / "tokenizer"]
    code, out, _ = run(capsys, *show)
    assert code == 0 and "rows.jsonl:1, completion" in out and "33 tokens, 5 of them learned" in out
    assert f"⟦\\xc3|\\xa4| |b|{END}⟧" in out and out.count("⟦") == 1
    code, out, _ = run(capsys, *show, "--json", "--max-seq-length", 30)
    summary = json.loads(out)
    assert summary["counted"] == 4 and summary["dropped"] == 2 and len(summary["tokens"]) == 33
    assert [token["weight"] for token in summary["tokens"][26:]] == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert summary["where"].endswith("rows.jsonl:1")
    code, out, _ = run(capsys, *show, "--json", "--loss-on", "all")
    assert json.loads(out)["counted"] == 32
    code, out, err = run(capsys, *show, "--index", 1)
    assert code == 0 and "0 of them learned" in out and "nothing of it is learned" in err
    code, out, err = run(capsys, *show, "--index", 2)
    assert code == 1 and "--index must lie in 0 .. 1" in err
    code, out, err = run(capsys, *show, "--split", "test")
    assert code == 2 and "--split test is not in" in err
    code, out, err = run(capsys, "data", "show", path)
    assert code == 2 and "--tokenizer is required" in err
    write(path, {"prompt": "q", "chosen": "yes", "rejected": "no"})
    code, out, _ = run(capsys, *show)
    assert "chosen: " in out and f"⟦y|e|s|{END}⟧" in out and f"⟦n|o|{END}⟧" in out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, out, _ = run(capsys, *show)
    assert code == 0 and "\x1b[" in out and "⟦" not in out and END in out


def test_split_and_generate_verbs(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", *rows(30))
    code, out, _ = run(capsys, "data", "split", path, "--out-dir", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["read"] == 30
    assert sum(map(len, data.load_examples(tmp_path / "out").values())) == 30
    code, _, err = run(capsys, "data", "split", path, "--out-dir", tmp_path / "out")
    assert code == 1 and "must be new" in err
    code, _, err = run(capsys, "data", "split")
    assert code == 2 and "--data is required" in err
    code, out, _ = run(capsys, "data", "generate", "--rows", 12, "--out-dir", tmp_path / "made")
    assert code == 0 and "12 train, 3 validation, 3 test" in out
    assert data.load_examples(tmp_path / "made")["train"].format == "completion"


def test_the_corpus_of_instructions_can_be_learned_from():
    found = data.encode_examples(plain(), data.load_examples(CORPUS / "instructions.jsonl")["train"].rows, 512)
    assert len(found) == 70 and not found.report.skipped and found.report.truncated == 0

"""`riftco chat`: over a pipe and in a terminal, what is remembered, what is run again, and what ends an answer."""

import contextlib
import functools
import io
import json
import os
import select
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import bundle
from riftco.cli import main, models
from riftco.cli.chat import _shortened
from riftco.cli.conversation import Conversation, turn_end
from riftco.errors import RiftcoError
from riftco.generation import Session
from riftco.interchange import convert
from riftco.models import DecoderConfig, init
from riftco.tokenizers import BPETokenizer, ByteTokenizer

TEXT = "the cat sat on the mat. é漢🦊 " * 8 + "### User: ### Assistant: ### System:\n abcdefghijklmnopqrstuvwxyz/"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CONFIG = DecoderConfig(290, 96, 16, 2, 1, 32, norm="rms", mlp="swiglu", position="rope")


@functools.cache
def tokenizer_of(kind):
    if kind == "byte":
        return ByteTokenizer.train(TEXT)
    return BPETokenizer.train(TEXT, 290, 2, "gpt2", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])


@functools.cache
def params_of():
    return init(jax.random.key(0), CONFIG)


def model_of(kind="bpe", template=CHATML):
    tokenizer = tokenizer_of(kind).with_chat_template(template)
    return models.Loaded("here", params_of(), CONFIG, tokenizer, {}, ())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("chat") / "model"
    bundle.save(place, params_of(), CONFIG, tokenizer_of("bpe"), chat_template=CHATML)
    return place


def chat(capsys, monkeypatch, lines, *words):
    """Run the verb over a pipe; (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    capsys.readouterr()
    status = main(["chat", *map(str, words)])
    return status, *capsys.readouterr()


def written(monkeypatch, tokens):
    """Let every answer be these ids; the prompts that were asked for are collected."""
    prompts = []

    def stream(session, prompt_ids, **options):
        prompts.append((list(prompt_ids), options))
        for token in tokens:
            if token in options["stop_ids"]:
                return
            yield token

    monkeypatch.setattr("riftco.generation.stream", stream)
    return prompts


# ---- the verb ------------------------------------------------------------------------------------------------------


def test_each_line_gets_an_answer_and_equal_seeds_give_equal_ones(place, capsys, monkeypatch):
    words = (place, "--max-tokens", 6, "--temperature", 1, "--seed", 3)
    lines = ["the cat", "", "and the mat?"]
    status, out, err = chat(capsys, monkeypatch, lines, *words)
    assert status == 0
    status, line, _ = chat(capsys, monkeypatch, lines, *words, "--json")
    found = json.loads(line)
    assert status == 0 and line.count("\n") == 1 and [turn["user"] for turn in found["turns"]] == ["the cat", lines[2]]
    assert out == "".join(turn["assistant"] + "\n" for turn in found["turns"])
    lengths = [len(turn["ids"]) for turn in found["turns"]]
    assert [turn["finish_reason"] for turn in found["turns"]] == ["length" if n == 6 else "stop" for n in lengths]
    assert 6 in lengths and max(lengths) == 6 and err.count("cut off by --max-tokens") == lengths.count(6)
    other = json.loads(chat(capsys, monkeypatch, lines, *words[:-1], 4, "--json")[1])
    assert other["turns"][0]["ids"] != found["turns"][0]["ids"]


def test_commands(place, capsys, monkeypatch):
    lines = ["hello", "/reset", "/system be brief", "again", "/help", "/nothing", "/exit", "never"]
    status, line, err = chat(capsys, monkeypatch, lines, place, "--max-tokens", 2, "--system", "first", "--json")
    found = json.loads(line)
    assert status == 0 and [turn["user"] for turn in found["turns"]] == ["again"] and found["system"] == "be brief"
    for said in ("(a new conversation)", "with this system message", "/exit ", "there is no /nothing"):
        assert said in err


def test_a_directory_with_a_gguf_file_and_no_template_will_do(place, tmp_path, capsys, monkeypatch):
    convert(place, tmp_path / "g", to="gguf", verify=False)
    words = ("--max-tokens", 2, "--temperature", 0, "--json")
    found = json.loads(chat(capsys, monkeypatch, ["the"], tmp_path / "g", *words)[1])
    assert found["turns"] == json.loads(chat(capsys, monkeypatch, ["the"], place, *words)[1])["turns"]
    plain = json.loads(chat(capsys, monkeypatch, ["the"], place, *words, "--chat-template", "plain")[1])
    assert plain["turns"] != found["turns"]


@pytest.mark.tiny
def test_what_cannot_be_is_refused(tmp_path, capsys, monkeypatch):
    bundle.save(tmp_path / "ids", params_of(), CONFIG, None)
    for words, status, says in (
        ((), 2, "--model is required"),
        ((tmp_path / "none",), 1, "does not exist"),
        ((tmp_path / "ids",), 1, "must have a tokenizer.json"),
        ((tmp_path / "ids", "--max-tokens", 0), 2, "--max-tokens must be at least 1"),
        ((tmp_path / "ids", "--temperature", -1), 2, "--temperature must be at least 0"),
    ):
        found, out, err = chat(capsys, monkeypatch, [], *words)
        assert (found, out) == (status, "") and says in err.splitlines()[-1]


def test_a_shorter_context_is_the_same_function(place, capsys, monkeypatch):
    words = (place, "--max-tokens", 4, "--temperature", 0, "--json")
    found = json.loads(chat(capsys, monkeypatch, ["the", "cat"], *words, "--max-seq-length", 64)[1])
    assert found["turns"] == json.loads(chat(capsys, monkeypatch, ["the", "cat"], *words)[1])["turns"]
    status, _, err = chat(capsys, monkeypatch, ["the"], *words, "--max-seq-length", 97)
    assert status == 2 and "--max-seq-length must be 1 to 96" in err
    learned = DecoderConfig(290, 96, 16, 2, 1, 32)
    rotary = DecoderConfig(9, 4096, 8, 1, 1, 8, position="rope")
    assert _shortened(learned, None) == learned and _shortened(rotary, None).context == 2048
    with pytest.raises(RiftcoError, match="as many as it has positions"):
        _shortened(learned, 32)


# ---- the conversation ----------------------------------------------------------------------------------------------


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("kind", "template", "expected"),
    [
        ("bpe", CHATML, (("<|im_end|>",), ())),
        ("bpe", "{% for m in messages %}[{{ m['content'] }}]{% endfor %}", ((), ("]",))),
        ("byte", None, ((), ("\n",))),
        ("bpe", "{% for m in messages %}{{ m['content'] }}{% endfor %}", ((), ())),
        ("bpe", "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}", ((), ())),
    ],
)
def test_what_ends_a_turn_is_read_off_the_template(kind, template, expected):
    tokenizer = tokenizer_of(kind).with_chat_template(template)
    ids, texts = turn_end(tokenizer)
    assert (tuple(tokenizer.decode([id]) for id in ids), texts) == expected


def test_an_answer_comes_in_whole_characters_and_ends_where_the_template_says(monkeypatch):
    tokenizer = tokenizer_of("bpe")
    end = tokenizer.special_tokens["<|im_end|>"]
    fox = [tokenizer.encode(bytes([byte]))[0] for byte in "🦊".encode()]
    prompts = written(monkeypatch, [*tokenizer.encode("hi "), *fox, 289, end, *tokenizer.encode("never")])
    talk = Conversation(model_of(), settings=GREEDY, max_tokens=40, system="be kind")
    pieces = list(talk.answer("who?"))
    assert "".join(pieces) == "hi 🦊" and "�" not in "".join(pieces)
    assert talk.turns[0]["finish_reason"] == "stop" and end not in talk.turns[0]["ids"]
    list(talk.answer("and now?"))
    text = tokenizer.decode(prompts[1][0])
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwho?<|im_end|>\n"
        "<|im_start|>assistant\nhi 🦊<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    )
    # The plain template of a tokenizer without an end token ends an answer with the line.
    written(monkeypatch, tokenizer_of("byte").encode("the cat\nsat"))
    talk = Conversation(model_of("byte", None), settings=GREEDY, max_tokens=40)
    assert "".join(talk.answer("who")) == "the cat" and talk.turns[0]["finish_reason"] == "stop"


def test_the_oldest_turns_go_when_the_context_is_full(monkeypatch):
    notes = []
    prompts = written(monkeypatch, tokenizer_of("bpe").encode("x"))
    talk = Conversation(model_of(), settings=GREEDY, max_tokens=30, system="sys", note=notes.append)
    for number in range(8):
        assert list(talk.answer(f"m{number}")) == ["x"]
    texts = [tokenizer_of("bpe").decode(ids) for ids, _ in prompts]
    assert all(len(ids) + min(options["max_tokens"], 24) <= CONFIG.context for ids, options in prompts)
    assert all("<|im_start|>system\nsys" in text for text in texts) and "m7" in texts[7] and "m0" not in texts[7]
    first = next(number for number in range(8) if "m0" not in texts[number])
    assert notes[0].endswith("the first turn)") and len(notes) == 8 - first and f"m{first - 1}" in texts[first]
    assert len(talk.turns) == 8 and f"m{talk.dropped}" in texts[7]
    with pytest.raises(RiftcoError, match="leave room for an answer in the model's 96 tokens"):
        list(talk.answer("xyz " * 40))
    assert len(talk.turns) == 8
    talk.reset()
    assert list(talk.answer("m8")) == ["x"] and "sys" not in tokenizer_of("bpe").decode(prompts[-1][0])


def test_a_message_that_does_not_fit_is_said_and_the_conversation_goes_on(place, capsys, monkeypatch):
    status, line, err = chat(capsys, monkeypatch, ["xyz " * 60, "the"], place, "--max-tokens", 1, "--json")
    assert status == 0 and "shorten it" in err and [turn["user"] for turn in json.loads(line)["turns"]] == ["the"]


def test_what_the_session_holds_is_not_run_again(monkeypatch):
    runs = []
    prefill, step = Session.prefill, Session.step
    monkeypatch.setattr(Session, "prefill", lambda self, ids: runs.append(len(ids)) or prefill(self, ids))
    monkeypatch.setattr(Session, "step", lambda self, token: runs.append("step") or step(self, token))
    session, fresh = Session(params_of(), CONFIG), Session(params_of(), CONFIG)
    ids = np.random.default_rng(0).integers(0, 290, 60).tolist()
    for end, expected in ((20, [20]), (24, ["step"] * 4), (24, [24]), (57, [57])):
        runs.clear()
        logits = session.resume(ids[:end])
        assert runs == expected and session.size == end
        fresh.reset()
        assert jnp.allclose(logits, prefill(fresh, ids[:end]), atol=1e-5)
    runs.clear()
    other = [(ids[0] + 1) % 290, *ids[1:60]]
    assert jnp.array_equal(session.resume(other), (fresh.reset(), prefill(fresh, other))[1]) and runs == [60]
    runs.clear()
    other = other[:20]
    assert jnp.array_equal(session.resume(other), (fresh.reset(), prefill(fresh, other))[1]) and runs == [20]
    for wrong in ([], [*other, 290], ids * 2):
        with pytest.raises(RiftcoError):
            session.resume(wrong)
        assert session.size == 20
    assert jnp.array_equal(step(session, 5), step(fresh, 5))


def test_the_second_turn_goes_on_from_the_first(monkeypatch):
    runs = []
    prefill = Session.prefill
    monkeypatch.setattr(Session, "prefill", lambda self, ids: runs.append(len(ids)) or prefill(self, ids))
    talk = Conversation(model_of(), settings=GREEDY, max_tokens=3)
    tokenizer = tokenizer_of("bpe")
    list(talk.answer("the cat"))
    again = tokenizer.encode(talk.turns[0]["assistant"], allow_special=False) == talk.turns[0]["ids"]
    list(talk.answer("sat"))
    assert len(runs) == (1 if again else 2)
    answers = [turn["ids"] for turn in talk.turns]
    fresh = Conversation(model_of(), settings=GREEDY, max_tokens=3)
    fresh.turns = [dict(talk.turns[0])]
    list(fresh.answer("sat"))
    assert fresh.turns[1]["ids"] == answers[1]


def test_an_interrupted_answer_is_kept_and_the_session_is_not(monkeypatch):
    talk = Conversation(model_of(), settings=GREEDY, max_tokens=8)
    pieces = talk.answer("the cat")
    first = next(pieces)
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)
    assert talk.turns[0]["finish_reason"] == "interrupted" and talk.turns[0]["assistant"] == first
    assert talk._session.size == 0
    assert list(talk.answer("sat")) and len(talk.turns) == 2


# ---- the terminal --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are of POSIX")
def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(place):
    import pty

    terminal, other = pty.openpty()
    words = ["chat", str(place), "--max-tokens", "90", "--device", "cpu"]
    program = f"import sys; from riftco.cli import main; sys.exit(main({words!r}))"
    # A session of its own, whose terminal this is, so that ^C typed there becomes a signal.
    code = f"import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{program}"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=other, stdout=other, stderr=other)
    os.close(other)
    shown = ""

    def until(text, seconds=60):
        nonlocal shown
        stop = time.monotonic() + seconds
        while text not in shown and time.monotonic() < stop:
            if select.select([terminal], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    shown += os.read(terminal, 4096).decode(errors="replace")
        assert text in shown, shown
        shown = shown.partition(text)[2]

    try:
        until("/help lists the commands")
        until("> ")
        os.write(terminal, b"the cat\n")
        until("the cat\r\n")
        os.write(terminal, b"\x03")
        until("> ")
        os.write(terminal, b"/reset\n")
        until("(a new conversation)")
        until("> ")
        time.sleep(0.5)  # a signal between the prompt and the wait for a key would be seen at the next key only
        os.write(terminal, b"\x03")
        until("^D or /exit leaves")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)

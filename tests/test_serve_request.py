"""Requests are checked in one sentence each; sequences end where they should and never tell half of anything."""

import dataclasses

import numpy as np
import pytest

from riftco.errors import ConfigError
from riftco.serve.request import Request, TokenLogprob
from riftco.serve.sequence import Sequence, text_of
from riftco.tokenizers import ByteTokenizer
from riftco.tokenizers.stream import StopFilter

pytestmark = pytest.mark.tiny
LETTERS = ByteTokenizer.train("abcdefgh €😀")
END = 5


def run(
    text: str | list[int], limit: int = 100, stop_ids: tuple[int, ...] = (), **options
) -> tuple[Sequence, list[str]]:
    """A sequence that draws the tokens of a text, and the text of each of its pieces."""
    request = Request([0], max_tokens=limit, **options)
    ids = LETTERS.encode(text) if isinstance(text, str) else text
    sequence = Sequence(request, [0], 0, limit, frozenset(stop_ids), 0, 8, LETTERS)
    for token in ids:
        if sequence.finish_reason is None:
            sequence.accept(token, TokenLogprob(token, -1.0, ()))
    return sequence, [piece.text for piece in sequence.take_pieces()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of prompt_ids, messages and prompt must be given; got none"),
        ({"prompt_ids": [1], "prompt": "a"}, "got prompt_ids and prompt"),
        ({"prompt_ids": "abc"}, "prompt_ids must be a list of token ids; got str"),
        ({"prompt_ids": [1.5]}, "every id of prompt_ids must be an integer; got 1.5"),
        ({"prompt_ids": [-1]}, "every id of prompt_ids must be at least 0; got -1"),
        ({"prompt": [1]}, "prompt must be text; got list"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 without echo"),
        ({"max_tokens": 2.0}, "max_tokens must be an integer"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must not be above max_tokens; got 4 and 3"),
        ({"temperature": -0.1}, "temperature must be at least 0; got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number; got nan"),
        ({"temperature": 1e39}, "temperature must be a finite number"),
        ({"temperature": "1"}, "temperature must be a finite number; got '1'"),
        ({"temperature": None}, "temperature must be a finite number; got None"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1; got 1.1"),
        ({"min_p": -1}, "min_p must be from 0 to 1; got -1"),
        ({"seed": "x"}, "seed must be an integer; got 'x'"),
        ({"n": 0}, "n must be from 1 to 128; got 0"),
        ({"n": 10**9}, "n must be from 1 to 128"),
        ({"stop": [""]}, "stop must be one or more strings, none empty"),
        ({"stop": 3}, "stop must be one or more strings"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False; got 1"),
        ({"logit_bias": [1]}, "logit_bias must map ids to numbers; got list"),
        ({"logit_bias": {1: float("nan")}}, "a logit_bias must be a number below"),
        ({"logit_bias": {1: np.inf}}, "a logit_bias must be a number below"),
        ({"logit_bias": {"1": 1.0}}, "every id of logit_bias must be an integer"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": np.inf}, "presence_penalty must be a finite number"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20; got 21"),
        ({"logprobs": True}, "logprobs must be an integer"),
        ({"deadline": -1}, "deadline must be at least 0"),
        ({"adapter": 3}, "adapter must be a name or None; got 3"),
    ],
)
def test_each_mistake_is_one_sentence(options, message):
    given = options if not options or "prompt_ids" in options or "prompt" in options else {"prompt_ids": [1], **options}
    with pytest.raises(ConfigError, match=message) as caught:
        Request(**given)
    assert str(caught.value).startswith("Request: ") and "\n" not in str(caught.value)


def test_a_request_is_a_value():
    request = Request(np.array([1, 2]), stop="end", logit_bias={np.int32(3): 1}, max_tokens=np.int64(3))
    assert request.prompt_ids == (1, 2) and request.stop == ("end",) and request.logit_bias == {3: 1.0}
    assert request == Request([1, 2], stop=["end"], logit_bias={3: 1.0}, max_tokens=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Request([1], 5)  # type: ignore[misc]


@pytest.mark.parametrize("stop", [("def",), ("def", "de f"), ("f", "cdef"), ("defg", "cd")])
def test_no_part_of_a_stop_string_is_told(stop):
    sequence, pieces = run("abcdefgh", stop=stop)
    whole = "abcdefgh"
    # The first end decides; where two stop strings end together, the one that begins first.
    end = min(whole.find(s) + len(s) for s in stop if s in whole)
    want = whole[: min(whole.find(s) for s in stop if s in whole and whole.find(s) + len(s) == end)]
    assert sequence.text == "".join(pieces) == want and sequence.finish_reason == "stop"
    assert sequence.drawn == LETTERS.encode(whole[:end])  # the tokens that were drawn, the stop string's among them


def test_what_only_looked_like_a_stop_string_is_told_in_the_end():
    sequence, pieces = run("abcd", stop="cdx", limit=4)
    assert sequence.text == "abcd" and sequence.finish_reason == "length" and pieces == ["a", "b", "", "cd"]
    sequence, pieces = run([*LETTERS.encode("abc"), END], stop="cdx", stop_ids=(END,))
    assert sequence.text == "abc" and sequence.finish_reason == "stop" and sequence.drawn == LETTERS.encode("abc")
    sequence, _ = run("abc", stop="cdx")
    sequence.finish("cancelled")
    assert sequence.text == "abc"


def test_characters_come_whole_and_a_cut_one_is_replaced():
    sequence, pieces = run("a€b😀", limit=9)
    assert pieces == ["a", "", "", "€", "b", "", "", "", "😀"] and sequence.text == "a€b😀"
    sequence, pieces = run("a€", limit=3)
    assert pieces == ["a", "", "\ufffd"] and sequence.finish_reason == "length"
    assert text_of(LETTERS, LETTERS.encode("a€")[:3]) == "a\ufffd" and text_of(LETTERS, [0, 99]) == " "


def test_min_tokens_comes_before_stop_strings_and_bans_stop_ids():
    sequence, _ = run("abab", stop="b", min_tokens=2)
    assert sequence.text == "aba" and sequence.finish_reason == "stop"
    sequence = Sequence(Request([0], min_tokens=2), [0], 0, 9, frozenset([END]), 0, 8, LETTERS)
    assert [sequence.bans_stop_ids(count) for count in range(4)] == [True, True, False, False]


def test_a_draw_that_failed_ends_with_an_error():
    sequence, _ = run([1, -1, 2])
    assert sequence.finish_reason == "error" and sequence.drawn == [1]


def test_a_filter_passes_nothing_after_the_stop():
    waiting = StopFilter(["end"])
    assert [waiting.push(piece) for piece in ("an e", "n", "dless", "x")] == ["an ", "", "", ""]
    assert waiting.found and waiting.flush() == ""

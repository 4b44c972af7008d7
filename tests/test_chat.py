"""Chat templates: the sandbox and its bounds, the answers' places, and transformers as the judge of the text."""

import importlib.util
import os
import time
import warnings

import pytest

from riftco.errors import TokenizerError
from riftco.tokenizers import BPETokenizer, ByteTokenizer, chat, chat_sandbox, hf_read, to_json

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2 + 3? "},
    {"role": "assistant", "content": "It is 5 — fünf."},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "10"},
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content ~ '\n\n' %}{% elif m.role == 'user' %}"
    "{{ '[INST] ' ~ ns.system ~ m.content | trim ~ ' [/INST]' }}"
    "{% set ns.system = '' %}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}{% endfor %}"
)
TAGGED = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- macro turn(role, text) -%}<|{{ role }}|>{{ text }}{%- endmacro %}
{{- bos_token }}<|system|>{{ system }}
{% for m in messages if m.content is string %}
    {%- if m.role == 'assistant' %}<|assistant|>
        {%- generation %}{{ m.content.strip() }}{{ eos_token }}{% endgeneration %}
    {%- else %}{{ turn(m.role, m.content.split('</think>')[-1].lstrip('\n')) }}{% endif %}
    {%- if not loop.last %}{{ '\n' }}{% else %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{{ {"a": [1, "é<"]} | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# Earlier answers lose what stands before </think>; the last one keeps it.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
    "{{ 'A:' + m.content.split('</think>')[-1] + '$\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'A:<think></think>' + m.content + '$\n' }}"
    "{% else %}{{ 'Q:' + m.content + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
TEMPLATES = {"plain": chat.PLAIN, "chatml": CHATML, "inst": INST, "tagged": TAGGED}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def parts(rendered):
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.tiny
def test_the_plain_template_is_the_training_text_and_its_prompt_a_prefix():
    rendered = chat.render(CHAT)
    assert rendered.text == (
        "### System:\nBe brief.\n### User:\nWhat is 2 + 3?\n### Assistant:\nIt is 5 — fünf.\n"
        "### User:\nAnd twice that?\n### Assistant:\n10\n"
    )
    assert parts(rendered) == ["It is 5 — fünf.\n", "10\n"]
    ended = chat.render(CHAT, special_tokens={"eos_token": "<e>"})
    assert parts(ended) == ["It is 5 — fünf.<e>", "10<e>"]
    assert ended.text.startswith(
        chat.render_text(CHAT[:2], add_generation_prompt=True, special_tokens={"eos_token": "<e>"})
    )


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (CHATML, {"eos_token": "<|im_end|>"}, ["It is 5 — fünf.<|im_end|>", "10<|im_end|>"]),
        (CHATML, {}, ["It is 5 — fünf.<|im_end|>\n", "10<|im_end|>\n"]),
        (INST, SPECIAL, [" It is 5 — fünf.</s>", " 10</s>"]),
        (TAGGED, SPECIAL, ["It is 5 — fünf.</s>", "10</s>"]),
        (THINKING, {"eos_token": "$"}, ["It is 5 — fünf.$", "<think></think>10$"]),
    ],
    ids=["chatml", "no-eos", "inst", "tagged", "thinking"],
)
def test_the_answers_are_found(template, special, expected):
    assert parts(chat.render(CHAT, template, special_tokens=special)) == expected


def test_the_same_answer_twice_has_two_places():
    twice = [*CHAT[1:3], *CHAT[1:3]]
    (first, second) = chat.render(twice, CHATML).spans
    assert first[1] <= second[0]
    (first, second) = chat.render(twice, THINKING, special_tokens={"eos_token": "$"}).spans
    assert first[1] <= second[0]


def test_answers_that_a_template_rewrites_or_lays_out_are_still_found():
    shouting = THINKING.replace("m.content.split('</think>')[-1]", "m.content | upper")
    assert parts(chat.render(CHAT, shouting, special_tokens={"eos_token": "$"}))[0] == "IT IS 5 — FÜNF.$"
    thought = [*CHAT[:2], {"role": "assistant", "content": "<think>hm</think>yes"}, *CHAT[3:]]
    assert parts(chat.render(thought, THINKING, special_tokens={"eos_token": "$"}))[0] == "yes$"
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]}
    tools = THINKING.replace("'A:' + m.content.split('</think>')[-1]", "'A:' + (m.tool_calls or m.content) | string")
    rendered = chat.render([*CHAT[:2], call, *CHAT[3:]], tools, special_tokens={"eos_token": "$"})
    assert parts(rendered)[0] == "[{'name': 'f', 'arguments': {'x': [1]}}]$"
    followed = chat.render(thought, THINKING, add_generation_prompt=True, special_tokens={"eos_token": "$"})
    assert parts(followed) == ["yes$", "<think></think>10$"]
    prompted = chat.render(CHAT, CHATML, add_generation_prompt=True, special_tokens={"eos_token": "<|im_end|>"})
    assert parts(prompted) == ["It is 5 — fünf.<|im_end|>", "10<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | map(attribute='content') | join | length }}" + THINKING,
        THINKING.replace("m.content.split('</think>')[-1]", "m.content | length | string"),
        THINKING.replace("m.content.split('</think>')[-1]", "m.content + m.content"),
        "{{ messages | length }}{% for m in messages %}{{ loop.revindex }}{% endfor %}",
    ],
    ids=["total length", "length", "twice", "nothing"],
)
def test_an_answer_that_cannot_be_told_is_not_guessed(template):
    with pytest.raises(TokenizerError, match=r"message 2 cannot be told from the rest.*generation"):
        chat.render(CHAT, template)


def test_marks_cannot_be_forged_and_do_not_nest():
    echo = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    text = "\ue000(\ue000 {% generation %}"
    rendered = chat.render([{"role": "assistant", "content": text}], echo)
    assert (rendered.text, parts(rendered)) == (text + "!", [text])
    nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(TokenizerError, match="must not lie in one another"):
        chat.render(CHAT, nested)
    with pytest.raises(TokenizerError, match="must not lie in one another"):
        chat.render(CHAT, nested.replace("b{%", "{%"))


@pytest.fixture(scope="module")
def tokenizer():
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    made = BPETokenizer.train(
        b"It is twice the assistant user system" * 2,
        vocab_size=290,
        pattern="gpt2",
        special_tokens=special,
        roles={"bos": "<s>", "eos": "</s>"},
    )
    return made


@pytest.mark.parametrize("template", [chat.PLAIN, INST, CHATML, TAGGED], ids=["plain", "inst", "chatml", "tagged"])
def test_tokens_carry_the_answers(tokenizer, template):
    rendered = chat.render(CHAT, template, special_tokens=chat.special_tokens(tokenizer))
    ids, flags = chat.encode(tokenizer, rendered)
    assert ids == tokenizer.encode(rendered.text) and len(flags) == len(ids)
    assert tokenizer.decode([id for id, flag in zip(ids, flags, strict=True) if flag]) == "".join(parts(rendered))


def test_a_token_across_the_border_counts_and_lossy_tokenizers_are_refused():
    unsplit = BPETokenizer.train("ab" * 50, vocab_size=257)
    ids, flags = chat.encode(unsplit, chat.Rendered("xab", [(2, 3)]))
    assert (unsplit.decode(ids), flags) == ("xab", [False, True])
    assert chat.encode(unsplit, chat.Rendered("xab", [(1, 2)]))[1] == [False, True]
    assert chat.encode(unsplit, chat.Rendered("xab", []))[1] == [False, False]
    with pytest.raises(TokenizerError, match="byte"):
        chat.encode(ByteTokenizer.train(b"ab"), chat.Rendered("xab", [(2, 3)]))


def test_normalized_text_keeps_its_places(tokenizer):
    document = to_json(tokenizer) | {"normalizer": {"type": "NFC"}}
    document["decoder"].pop("riftco")
    foreign = hf_read.from_json(document)
    text = "e\u0301e\u0301 yes e\u0301 no"
    ids, flags = chat.encode(foreign, chat.Rendered(text, [(5, 8)]))
    assert foreign.decode([id for id, flag in zip(ids, flags, strict=True) if flag]).strip() == "yes"


def test_tokenizers_apply_their_template_and_double_nothing(tokenizer):
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    ids = tokenizer.with_chat_template(INST).apply_chat_template(CHAT[:2])
    assert (
        ids[0] == bos
        and ids.count(bos) == 1
        and tokenizer.decode(ids)
        == chat.render_text(CHAT[:2], INST, add_generation_prompt=True, special_tokens=SPECIAL)
    )
    assert tokenizer.chat_template is None and tokenizer.with_chat_template(INST) == tokenizer
    plain = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert plain.count(eos) == 2 and tokenizer.decode(plain).endswith("10</s>\n")
    byte = ByteTokenizer.train(bytes(range(256)))
    assert byte.decode(byte.apply_chat_template(CHAT[:1])) == "### System:\nBe brief.\n### Assistant:\n"


def test_a_foreign_tokenizer_without_a_template_is_refused(tokenizer):
    document = to_json(tokenizer) | {"normalizer": {"type": "NFC"}}
    foreign = hf_read.from_json(document)
    with pytest.raises(TokenizerError, match=r"chat_template.jinja.*chat.PLAIN"):
        foreign.apply_chat_template(CHAT)
    assert foreign.with_chat_template(chat.PLAIN).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list of"),
        ({"role": "user"}, "must be a list of"),
        (["hello"], "message 0 must be a mapping"),
        ([{"content": "x"}], 'message 0 must be a mapping with a "role"'),
        ([{"role": "user"}], 'message 0 must have a "content"'),
        ([{"role": "user", "content": object()}], "message 0 must be made of JSON values; got object"),
    ],
)
def test_messages_that_are_none(messages, message):
    with pytest.raises(TokenizerError, match=message):
        chat.render_text(messages)


HOSTILE = {
    "huge range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "multiplied": ("{{ 'x' * 10**12 }}", "more than 4194304 characters"),
    "multiplied list": ("{{ [1] * 10**12 }}", "more than 4194304 characters"),
    "nested loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran for more"),
    "search in filter": ("{{ range(99999) | select('in', range(99999) | list) | list | length }}", "ran for more"),
    "search in a loop's condition": (
        "{% set s = 'a' * 4000000 %}{% for c in s if 'ab' in s %}{% endfor %}", "ran for more",
    ),
    "searches side by side": ("{% set r = range(99999) | list %}" + "{% set x = -1 in r %}" * 2000, "ran for more"),
    "slices that are kept": (
        "{% set s = 'a' * 4000000 %}{% set n = namespace(h=0) %}"
        "{% for i in range(99999) %}{% set n.h = namespace(p=n.h, t=s[1:]) %}{% endfor %}", "characters in all",
    ),
    "power": ("{{ 3 ** 99999 }}", "more than 4096 bits"),
    "squares": ("{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}", "4096"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "4194304",
    ),
    "doubling by plus": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "4194304",
    ),
    "shared lists": (
        "{% set n = namespace(x=['a' * 9999]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
        "4194304",
    ),
    "shared mappings": (
        "{% set n = namespace(x='a' * 9999) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
        "4194304",
    ),
    "join": ("{{ range(99999) | map('string') | join('x' * 99999) }}", "4194304"),
    "str.join": ("{{ ('x' * 99999).join(range(99999) | map('string')) }}", "4194304"),
    "replace": ("{{ ('x' * 99999).replace('', 'y' * 99999) }}", "4194304"),
    "replace filter": ("{{ ('x' * 99999) | replace('x', 'y' * 99999) }}", "4194304"),
    "indent": ("{{ 'x\n' * 9999 | indent(99999) }}", "4194304|Error"),
    "json indent": ("{{ [1] | tojson(indent=10**9) }}", "indent must be"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than"),
    "captured output": ("{% set x %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}", "more than"),
    "ljust": ("{{ 'a'.ljust(10**9) }}", "'ljust' of 'str' object is unsafe"),
    "format": ("{{ '{:999999999}'.format(1) }}", "'format' of 'str' object is unsafe"),
    "percent": ("{{ '%999999999d' % 1 }}", "formatting with %"),
    "center": ("{{ 'x' | center(10**9) }}", "No filter named 'center'"),
    "to_bytes": ("{{ (5).to_bytes(10**9, 'little') }}", "'to_bytes' of 'int' object is unsafe"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "Recursion"),
    "deep source": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "Recursion"),
    "long source": ("x" * (1 << 19), "longer than"),
    "internals": ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
    "mutation": ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    "mutation by the class": ("{{ dict.update(messages[0], x=1) }}", "no attribute 'update'"),
    "private name": ("{% set n = namespace(__html__=1) %}", "may not have the name '__html__'"),
    "set private name": ("{% set n = namespace() %}{% set n._x = 1 %}", "may not have the name '_x'"),
    "lipsum": ("{{ lipsum(99999) }}", "'lipsum' is undefined"),
    "include": ("{% include 'other' %}", "no loader"),
    "syntax": ("{% if %}", "line 1: Expected an expression"),
    "unclosed generation": ("{% generation %}a", "line 1: Unexpected end"),
    "raises": ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
    "not a template": (None, "must be a str; got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_soon_with_a_reason(name, monkeypatch):
    template, message = HOSTILE[name]
    if message == "ran for more":
        monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.3)
    messages = [dict(message) for message in CHAT]
    started = time.monotonic()
    with pytest.raises(TokenizerError, match=message):
        chat.render_text(messages, template)
    assert time.monotonic() - started < 20  # the machine may be busy
    assert messages == CHAT


def test_bounds_hold_per_rendering():
    """A long chat passes, and a rendering does not pay for those before it."""
    long = [{"role": "user", "content": "x" * 100_000}] * 30
    for _ in range(30):
        assert len(chat.render_text(long)) > 3_000_000


# ------------------------------------------------------------------------------------------------ transformers

REASON = "CHAT TEMPLATES NOT COMPARED: transformers missing; pip install 'riftco[parity]'"


def beside_transformers(test):
    """Their `apply_chat_template` on the same tokenizer and template is the judge."""
    missing = importlib.util.find_spec("transformers") is None
    return pytest.mark.parity(pytest.mark.skipif(missing, reason=REASON)(test))


@pytest.fixture(scope="module")
def theirs(tokenizer, tmp_path_factory):
    from riftco.bundle.manifest import pretty_json

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    place = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(place)
    (place / "tokenizer_config.json").write_bytes(pretty_json(tokenizer.tokenizer_config()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return transformers.AutoTokenizer.from_pretrained(place)


@beside_transformers
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_gives_the_same_ids(theirs, tokenizer, name, prompt):
    mine = tokenizer.with_chat_template(TEMPLATES[name])
    expected = theirs.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], add_generation_prompt=prompt, return_dict=False
    )
    assert mine.apply_chat_template(CHAT, add_generation_prompt=prompt) == expected
    tools = [{"type": "function", "function": {"name": "f", "description": "ü <b>", "parameters": {}}}]
    text = theirs.apply_chat_template(CHAT, chat_template=TEMPLATES[name], tools=tools, tokenize=False)
    assert chat.render_text(CHAT, TEMPLATES[name], special_tokens=SPECIAL, tools=tools) == text


@beside_transformers
@pytest.mark.parametrize("name", ["plain", "tagged"])
def test_transformers_gives_the_same_mask(theirs, tokenizer, name):
    expected = theirs.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, return_dict=True
    )
    rendered = chat.render(CHAT, TEMPLATES[name], special_tokens=SPECIAL)
    ids, flags = chat.encode(tokenizer, rendered)
    assert ids == expected["input_ids"]
    assert [int(flag) for flag in flags] == expected["assistant_masks"]

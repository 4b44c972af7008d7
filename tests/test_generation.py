"""Incremental decoding against the full forward pass, and generation's promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import models
from riftco.errors import ConfigError, DTypeError, IndexRangeError, ShapeError
from riftco.generation import Session, generate, stream_text
from riftco.models import DecoderConfig, forward
from riftco.models.decoding import PagedCache

LEARNED = DecoderConfig(23, 16, 16, 4, 1, 32)
ROPE = DecoderConfig(
    23, 16, 16, 4, 2, 32, kv_heads=2, norm="rms", mlp="swiglu", position="rope", qk_norm=True, tie_embeddings=True
)
WINDOWED = DecoderConfig(23, 16, 16, 4, 1, 32, kv_heads=1, norm="rms", mlp="swiglu", position="rope", sliding_window=4)
IDS = np.random.default_rng(3).integers(0, 23, 40).tolist()


@functools.cache
def params_of(config: DecoderConfig) -> dict:
    return models.init(jax.random.key(1), config)


_forward = jax.jit(forward, static_argnums=2)


def full_logits(params: dict, config: DecoderConfig, ids: list[int]) -> np.ndarray:
    # Padded to one length, so that one program serves all; the padding lies in the future.
    padded = np.zeros((1, config.context), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_forward(params, padded, config)[0, : len(ids)])


# Compiling is nearly all that these tests cost, so they share configurations and page sizes.
@pytest.mark.parametrize(
    ("config", "cache"),
    [(LEARNED, "contiguous"), (ROPE, "contiguous"), (ROPE, "paged"), (WINDOWED, "paged")],
    ids=["learned-contiguous", "rope-contiguous", "rope-paged", "windowed-paged"],
)
def test_step_by_step_equals_the_full_forward(config: DecoderConfig, cache: str) -> None:
    params = params_of(config)
    expected = full_logits(params, config, IDS[:16])
    session = Session(params, config, cache=cache, page_size=3)
    got = [session.prefill(IDS[:5])] + [session.step(i) for i in IDS[5:16]]
    np.testing.assert_allclose(np.stack(got), expected[4:], atol=2e-5)
    assert session.size == session.capacity == 16


@pytest.mark.tiny
def test_prefill_alone_equals_the_full_forward() -> None:
    params = params_of(ROPE)
    for length in (1, 7, 16):
        got = Session(params, ROPE).prefill(IDS[:length])
        np.testing.assert_allclose(got, full_logits(params, ROPE, IDS[:length])[-1], atol=2e-5)


def test_rotary_windows_slide_past_the_context() -> None:
    # One layer: what a position sees is then exactly the last `context` tokens, and rotary scores know distances only.
    config = DecoderConfig(23, 16, 16, 4, 1, 32, norm="rms", mlp="swiglu", position="rope")
    params = params_of(config)
    session = Session(params, config)
    session.prefill(IDS[:10])
    for at in range(10, 40):
        got = session.step(IDS[at])
        window = IDS[max(0, at - 15) : at + 1]
        np.testing.assert_allclose(got, full_logits(params, config, window)[-1], atol=5e-5)
    assert session.size == 16


def test_learned_positions_are_run_again_past_the_context() -> None:
    params = params_of(LEARNED)
    session = Session(params, LEARNED)
    session.prefill(IDS[:16])
    got = session.step(IDS[16])
    np.testing.assert_allclose(got, full_logits(params, LEARNED, IDS[9:17])[-1], atol=2e-5)
    np.testing.assert_allclose(session.step(IDS[17]), full_logits(params, LEARNED, IDS[9:18])[-1], atol=2e-5)


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_that_do_not_divide_the_context_show_no_more_of_the_past(page_size: int) -> None:
    config = DecoderConfig(23, 6, 16, 4, 1, 32, norm="rms", mlp="swiglu", position="rope")
    params = params_of(config)
    sessions = [Session(params, config), Session(params, config, cache="paged", page_size=page_size)]
    for s in sessions:
        s.prefill(IDS[:4])
    for i in IDS[4:20]:
        assert np.array_equal(*[np.asarray(s.step(i)) for s in sessions])


def test_a_bfloat16_session_runs_and_stays_near_float32() -> None:
    params = params_of(ROPE)
    session = Session(params, ROPE, cache="paged", page_size=3, dtype=jnp.bfloat16)
    got = np.stack([np.asarray(session.prefill(IDS[:5])), *(np.asarray(session.step(i)) for i in IDS[5:9])])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), full_logits(params, ROPE, IDS[:9])[4:], atol=0.05)


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_slots_not_written_yet_may_hold_nan(cache: str) -> None:
    params = params_of(ROPE)
    session = Session(params, ROPE, cache=cache, page_size=3)
    clean = np.asarray(session.prefill(IDS[:5]))
    poisoned = []
    for pool in (session._cache.keys, session._cache.values):
        if isinstance(session._cache, PagedCache):
            pages = np.asarray(session._cache.table[0, 2:])  # of slots 6 and on
            poisoned.append(tuple(p.at[:, pages].set(jnp.nan) for p in pool))
        else:
            poisoned.append(tuple(p.at[:, :, 6:].set(jnp.nan) for p in pool))
    session._cache = session._cache._replace(keys=poisoned[0], values=poisoned[1])
    got = session.step(IDS[5])
    assert np.isfinite(np.asarray(got)).all() and np.isfinite(clean).all()
    np.testing.assert_allclose(got, full_logits(params, ROPE, IDS[:6])[-1], atol=2e-5)


def test_a_refused_call_leaves_the_session_as_it_was() -> None:
    params = params_of(ROPE)
    session, other = Session(params, ROPE), Session(params, ROPE)
    session.prefill(IDS[:4])
    other.prefill(IDS[:4])
    with pytest.raises(IndexRangeError, match=r"\[0, 23\); got 23"):
        session.step(23)
    with pytest.raises(ConfigError, match="must be empty"):
        session.prefill([1])
    assert np.array_equal(session.step(IDS[4]), other.step(IDS[4]))
    session.reset()
    assert session.size == 0
    np.testing.assert_array_equal(session.prefill(IDS[:4]), Session(params, ROPE).prefill(IDS[:4]))


@pytest.mark.parametrize(("ids", "error"), [([], ShapeError), (IDS[:17], ShapeError), ([-1], IndexRangeError)])
def test_bad_prompts_are_refused(ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        generate(params_of(ROPE), ROPE, ids, max_tokens=1)


def test_greedy_is_the_most_likely_token_of_the_full_forward() -> None:
    params, ids = params_of(LEARNED), IDS[:4]
    got = riftco.generate(params, LEARNED, ids, max_tokens=8, temperature=0)
    for token in got:
        assert token == int(full_logits(params, LEARNED, ids)[-1].argmax())
        ids = [*ids, token]
    assert len(got) == 8


def test_equal_seeds_give_equal_ids_and_other_seeds_others() -> None:
    params = params_of(ROPE)
    draw = lambda seed, **more: generate(params, ROPE, IDS[:4], max_tokens=12, seed=seed, **more)
    assert draw(5) == draw(5)
    assert len({tuple(draw(seed)) for seed in range(8)}) > 4
    assert draw(5, top_k=1) == draw(6, temperature=0)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    # Uniform logits: equal (seed, position) draw equal ids whatever came before.
    params = jax.tree_util.tree_map(jnp.zeros_like, params_of(ROPE))
    first = generate(params, ROPE, [1, 2, 3], max_tokens=10, seed=9)
    second = generate(params, ROPE, [4, 5, 6, 7], max_tokens=9, seed=9)
    assert first[1:] == second
    assert len(set(generate(params, ROPE, [1], max_tokens=60, seed=2))) > 12


def test_stop_ids_end_the_text_and_are_not_returned() -> None:
    params = params_of(ROPE)
    free = generate(params, ROPE, IDS[:4], max_tokens=12, seed=5)
    at = next(i for i in range(3, 12) if free[i] not in free[:i])
    assert generate(params, ROPE, IDS[:4], max_tokens=12, seed=5, stop_ids=[free[at]]) == free[:at]
    assert generate(params, ROPE, IDS[:4], max_tokens=0) == []


def test_repetition_penalty_acts_on_prompt_and_output() -> None:
    params = jax.tree_util.tree_map(jnp.zeros_like, params_of(LEARNED))
    params["final_norm"]["bias"] = jnp.ones(16)
    params["language_model_head"]["weight"] = jnp.ones((23, 16))
    got = generate(params, LEARNED, [0, 1], max_tokens=6, temperature=0, repetition_penalty=1.5)
    assert got == [2, 3, 4, 5, 6, 7]


def test_paged_and_contiguous_generation_are_bit_equal() -> None:
    params = params_of(WINDOWED)
    sessions = [Session(params, WINDOWED, cache=kind, page_size=3) for kind in ("contiguous", "paged")]
    first = [np.asarray(s.prefill(IDS[:9])) for s in sessions]
    assert np.array_equal(*first)
    for i in IDS[9:30]:
        assert np.array_equal(*[np.asarray(s.step(i)) for s in sessions])


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        Session(params_of(ROPE), ROPE, cache="ring")
    with pytest.raises(ConfigError, match="max_tokens"):
        generate(params_of(ROPE), ROPE, [1], max_tokens=-1)


@pytest.mark.tiny
def test_stop_strings_are_never_emitted_in_part() -> None:
    assert list(stream_text(iter(["ab", "c<", "en", "d>x"]), ["<end>"])) == ["ab", "c"]
    assert "".join(stream_text(iter(["ab<e", "nd", "!"]), ["<end>"])) == "ab<end!"
    assert "".join(stream_text(iter(["one two"]), ["two", "ne"])) == "o"
    assert list(stream_text(iter(["abc"]), [])) == ["abc"]
    with pytest.raises(ConfigError):
        list(stream_text(iter(["a"]), [""]))


def test_ids_that_are_not_integers_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"integers; got 1\.5"):
        generate(params_of(ROPE), ROPE, [1.5], max_tokens=1)

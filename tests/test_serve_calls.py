"""The two compiled calls: against the plain forward pass for every kind of model, and what they cost in memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import models, tune
from riftco.models import DecoderConfig
from riftco.models.decoding import decoding_params
from riftco.models.paged_decoding import Pools, empty_pools, pages_per_block, position_tables, run_rows, table_width
from riftco.serve import Request, programs
from riftco.serve.programs import INTEGERS, NUMBERS, Weights
from tests.serve_cases import CONFIG, ReferenceEngine, full_logits, params_of

LEARNED = DecoderConfig(41, 40, 24, 3, 1, 32, tie_embeddings=True)
PACKED = DecoderConfig(
    41,
    40,
    32,
    4,
    1,
    32,
    kv_heads=1,
    head_dim=8,
    norm="rms",
    mlp="swiglu",
    position="rope",
    qk_norm=True,
    qkv_bias=True,
    sliding_window=5,
    head_bias=True,
)


def noisy(config: DecoderConfig) -> Any:
    """Params of which none is 0 or 1: norms and biases must leave a trace too."""
    leaves, tree = jax.tree_util.tree_flatten(models.init(jax.random.key(1), config))
    generator = np.random.default_rng(2)
    moved = [leaf + 0.3 * jnp.asarray(generator.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree_util.tree_unflatten(tree, moved)


@pytest.mark.parametrize("name", ["learned, layer norm, biases, tied", "packed, window, grouped heads, qk-norm"])
def test_log_probabilities_of_prompt_and_answer_are_the_forward_pass(name, rng):
    config = LEARNED if name.startswith("learned") else PACKED
    params = noisy(config)
    if config is PACKED:
        params = tune.quantize(params, config, block_size=32, double_quant=False)
    engine = ReferenceEngine(params, config)
    prompt = rng.integers(0, 41, 21).tolist()
    request = Request(prompt, max_tokens=40, temperature=0.0, echo=True, logprobs=5)
    (completion,) = engine.generate([request])
    # The context is full: learned positions and rotary ones end alike.
    assert len(completion.ids) == config.context and completion.finish_reason == "length"
    logits = full_logits(completion.ids, params=params, config=config)
    want = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
    assert completion.logprobs is not None and completion.logprobs[0] is None
    for position, told in enumerate(completion.logprobs[1:]):
        assert told is not None and told.id == completion.ids[position + 1]
        np.testing.assert_allclose(told.logprob, want[position, told.id], atol=3e-5)
        np.testing.assert_allclose([p for _, p in told.top], np.sort(want[position])[:-6:-1], atol=3e-5)
        assert told.top[0][0] == want[position].argmax() or position < 20


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_in_which_a_row_sees_nothing_change_none_of_its_bits(window, rng):
    config = DecoderConfig(11, 600, 16, 2, 2, 16, norm="rms", mlp="swiglu", position="rope", sliding_window=window)
    params = decoding_params(models.init(jax.random.key(0), config), config)
    size, pages = 16, 90
    rope = position_tables(config, jnp.float32)
    run = jax.jit(lambda pools, *arrays: run_rows(params, pools, rope, *arrays, config))
    pools = Pools(
        *(
            jnp.asarray(rng.standard_normal(pool.shape), jnp.float32)
            for pool in empty_pools(config, pages, size, jnp.float32)
        )
    )
    width = table_width(config, size)
    assert width % pages_per_block(size) == 0
    table = np.zeros((2, width), np.int32)
    table[0, :38], table[1, :38] = rng.permutation(pages)[:76].reshape(2, 38)
    answers = []
    for other in (1, 130, 300, 599):  # how far the other row reaches: more blocks after, fewer before
        positions = np.array([[290], [other]], np.int32)
        out, _ = run(
            pools, np.array([[3], [other % 11]], np.int32), positions, np.ones((2, 1), bool), positions[:, 0] + 1, table
        )
        answers.append(np.asarray(out[0]))
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])


def test_a_step_copies_no_pool_and_no_weight():
    rows, pages, size, chunk = 4, 512, 16, 8
    weights = Weights(decoding_params(params_of(), CONFIG), position_tables(CONFIG, jnp.float32))
    width = table_width(CONFIG, size)
    shape = jax.ShapeDtypeStruct
    pools = jax.eval_shape(lambda: empty_pools(CONFIG, pages, size, jnp.float32))
    one_layer = pools.keys.size * 4 // CONFIG.layers
    i32, f32, vocabulary = jnp.int32, jnp.float32, CONFIG.vocab_size
    decode = programs.decode.lower(
        weights,
        pools,
        shape((rows, len(INTEGERS) + width), i32),
        shape((rows, len(NUMBERS)), f32),
        shape((rows, vocabulary), f32),
        shape((rows, CONFIG.context), i32),
        CONFIG,
    ).compile()
    prefill = programs.prefill.lower(
        weights, pools, shape((5,), i32), shape((2, chunk), i32), shape((width,), i32), CONFIG
    ).compile()
    for call in (decode, prefill):
        memory = call.memory_analysis()
        assert memory.temp_size_in_bytes < one_layer
        assert memory.alias_size_in_bytes >= 2 * CONFIG.layers * one_layer  # both pools are updated where they are
        weight_shapes = {tuple(sorted(leaf.shape)) for leaf in jax.tree_util.tree_leaves(weights.params.blocks)}
        for line in call.as_text().splitlines():
            if " transpose(" in line or " copy(" in line:
                dimensions = line.split("[", 1)[1].split("]", 1)[0]
                shape_of = tuple(sorted(int(n) for n in dimensions.split(",") if n))
                assert len(shape_of) < 2 or shape_of not in weight_shapes, line  # a weight is read as it lies

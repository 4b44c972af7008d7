"""A model as an nnx module: the same logits, the same gradients, and parameters that go there and back as they are."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import models
from riftco.errors import ShapeError, UnsupportedError
from riftco.interchange import flax as bridge

CONFIGS = {
    "gpt2": models.DecoderConfig(31, 8, 12, 2, 2, 20, tie_embeddings=True),
    "qwen3": models.preset("llama-tiny", vocab_size=31, context=8, layers=2, qk_norm=True, head_dim=6),
}
TOKENS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)


@pytest.fixture(scope="module")
def nnx():
    return pytest.importorskip("flax.nnx", reason="FLAX NOT CHECKED: pip install 'riftco[flax]'")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    config = CONFIGS[request.param]
    return models.init(jax.random.key(0), config), config


def tree_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.map(lambda x: x.dtype, left) == jax.tree.map(lambda x: x.dtype, right)


def test_logits_are_equal_and_jit_works(nnx, model):
    params, config = model
    module = bridge.to_nnx(params, config)
    assert isinstance(module, nnx.Module) and module.config == config
    assert isinstance(module.blocks.attention.query.weight, nnx.Param)
    expected = jax.jit(lambda p, t: models.forward(p, t, config))(params, TOKENS)
    call = nnx.jit(lambda m, t: m(t))
    np.testing.assert_array_equal(call(module, TOKENS), expected)
    plain = nnx.jit(lambda m, t: m(t, attention="plain"))
    np.testing.assert_allclose(plain(module, TOKENS), expected, atol=1e-5)


def test_parameters_go_there_and_back(nnx, model):
    params, config = model
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    for given in (params, half):
        back, same = bridge.from_nnx(bridge.to_nnx(given, config))
        tree_equal(back, given)
        assert same == config
    module = bridge.to_nnx(params, config)
    graph, state = nnx.split(module)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == models.parameter_count(config)
    tree_equal(bridge.from_nnx(nnx.merge(graph, state))[0], params)
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    bridge.update(module, other)
    tree_equal(bridge.from_nnx(module)[0], other)
    module.final_norm.scale[...] = jnp.zeros(config.width)
    assert not bridge.from_nnx(module)[0]["final_norm"]["scale"].any()
    module.note = "what a program hangs on is passed over"
    bridge.from_nnx(module)


def test_its_gradients_are_ours(nnx):
    config = CONFIGS["qwen3"]
    params = models.init(jax.random.key(0), config)

    def loss(p):
        return models.loss(p, TOKENS, TOKENS, config)

    theirs = nnx.jit(nnx.grad(lambda m: loss(bridge.from_nnx(m)[0])))(bridge.to_nnx(params, config))
    ours = jax.jit(riftco.grad(loss))(params)
    found = nnx.to_pure_dict(theirs)
    for path, leaf in jax.tree.leaves_with_path(ours):
        value = found
        for key in path:
            value = value[key.key]
        np.testing.assert_allclose(value, leaf, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_what_does_not_fit_is_refused(nnx, model):
    params, config = model
    with pytest.raises(ShapeError, match=r"final_norm\.scale"):
        bridge.to_nnx({**params, "final_norm": {}}, config)
    module = bridge.to_nnx(params, config)
    with pytest.raises(ShapeError, match=r"token_embedding\.weight must be"):
        bridge.update(module, {**params, "token_embedding": {"weight": jnp.zeros((3, 3))}})
    tree_equal(bridge.from_nnx(module)[0], params)
    for call in (bridge.from_nnx, lambda m: bridge.update(m, params)):
        with pytest.raises(UnsupportedError, match="a module that to_nnx made is required; got Linear"):
            call(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_without_flax_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "flax.nnx", None)
    bridge._decoder_class.cache_clear()
    with pytest.raises(UnsupportedError, match=r"pip install 'riftco\[flax\]'"):
        bridge.to_nnx(*model)
    bridge._decoder_class.cache_clear()

"""Low-rank adapters: neutral at the start, equal to merged weights, cheap to differentiate, and named strictly."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import riftco
from riftco import bundle, checkpoints, generation, models, optim, oracle, tune
from riftco.errors import BundleError, ConfigError, DomainError, DTypeError, ShapeError
from riftco.models import decoder, families
from riftco.models.adapters import Branch, attach, projections

GPT = models.DecoderConfig(29, 16, 16, 4, 2, 32, mlp="gelu_tanh")
LLAMA = models.DecoderConfig(29, 16, 16, 4, 3, 24, kv_heads=2, norm="rms", mlp="swiglu", position="rope", qk_norm=True)
TIED = models.DecoderConfig(29, 16, 16, 4, 2, 32, tie_embeddings=True)
CONFIGS = {"gpt": GPT, "llama": LLAMA}
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 12), np.int32)
TARGETS = np.random.default_rng(1).integers(0, 29, (2, 12), np.int32)
EVERYTHING = ("attention", "feed_forward", "language_model_head")


@functools.cache
def model(name: str):
    return models.init(jax.random.key(0), CONFIGS[name])


def fresh(name: str, targets=EVERYTHING, rank: int = 3, alpha: float = 6.0, **options):
    return tune.lora_init(
        jax.random.key(1), model(name), CONFIGS[name], targets=targets, rank=rank, alpha=alpha, **options
    )


@functools.cache
def trained(name: str, targets=EVERYTHING, **options):
    """Adapters whose B is not zero."""
    rng = np.random.default_rng(2)
    noise = lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32)
    return jax.tree.map(noise, fresh(name, targets, **options))


@functools.partial(jax.jit, static_argnames="config")
def forward(params, adapters, config):
    return models.forward(params, TOKENS, config, adapters=adapters)


@functools.partial(jax.jit, static_argnames=("config", "grad_checkpoint"))
def value_and_grad(adapters, params, config, dropout_key=None, grad_checkpoint="none"):
    def loss(adapters):
        return models.loss(
            params, TOKENS, TARGETS, config, adapters=adapters, dropout_key=dropout_key, grad_checkpoint=grad_checkpoint
        )

    return riftco.value_and_grad(loss)(adapters)


def equal(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


# ------------------------------------------------------------------------------------------------ the function


@pytest.mark.tiny
@pytest.mark.parametrize("name", CONFIGS)
def test_fresh_adapters_change_no_bit(name):
    np.testing.assert_array_equal(
        forward(model(name), fresh(name), CONFIGS[name]), forward(model(name), None, CONFIGS[name])
    )


@pytest.mark.parametrize(("name", "rslora"), [("gpt", True), ("llama", False)])
def test_adapters_are_the_formula(name, rslora):
    """Against the float64 twin of the decoder, with W + scale · B A written out."""
    config, adapters = CONFIGS[name], trained(name, rank=4, alpha=2.0, rslora=rslora)
    scale = 2.0 / (2.0 if rslora else 4.0)
    assert adapters.scale == scale
    weights = {path: np.asarray(leaf, np.float64) for path, leaf in models.named(model(name), config).items()}
    for target, a, b in adapters.pairs():
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if target == "language_model_head":
            weights[f"{target}.weight"] += scale * b @ a
        else:
            for layer in range(config.layers):
                weights[f"blocks.{layer}.{target}.weight"] += scale * b[layer] @ a[layer]
    fields = ("heads", "kv_heads", "norm", "mlp", "position", "norm_eps", "rope_theta")
    expected = oracle.decoder_logits(weights, TOKENS, **{name: getattr(config, name) for name in fields})
    np.testing.assert_allclose(forward(model(name), adapters, config), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_weights_answer_as_adapters_do(name):
    config, adapters = CONFIGS[name], trained(name)
    before = jax.tree.map(np.array, model(name))
    merged = tune.merge(model(name), adapters, config)
    models.check_params(merged, config)
    equal(model(name), before)
    difference = tune.logit_difference(model(name), merged, config, left_adapters=adapters)
    assert 0 < difference.max_abs <= 2e-5 and abs(difference.kl) < 1e-9 and difference.argmax_agreement == 1.0
    far = tune.logit_difference(model(name), merged, config)
    assert far.max_abs > 0.05 and far.kl > 1e-4


def test_merging_touches_the_targets_alone():
    merged = tune.merge(model("gpt"), trained("gpt", ("value",)), GPT)
    changed = [
        path
        for path, leaf in models.flatten(merged, GPT).items()
        if not np.array_equal(leaf, models.flatten(model("gpt"), GPT)[path])
    ]
    assert changed == ["blocks.attention.value.weight"]


def test_merging_keeps_the_dtype_and_refuses_what_is_not_finite():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model("gpt"))
    merged = tune.merge(half, trained("gpt"), GPT)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(jnp.bfloat16)}
    broken = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.inf), trained("gpt"))
    with pytest.raises(DomainError, match=r"attention\.query"):
        tune.merge(model("gpt"), broken, GPT)


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_decoding_knows_adapters(cache):
    adapters = trained("llama")
    expected = np.asarray(forward(model("llama"), adapters, LLAMA))[0]
    session = generation.Session(model("llama"), LLAMA, cache=cache, page_size=4, adapters=adapters)
    rows = [session.prefill(TOKENS[0, :5])] + [session.step(int(token)) for token in TOKENS[0, 5:]]
    np.testing.assert_allclose(rows, expected[4:], rtol=0, atol=2e-5)
    plain = generation.Session(model("llama"), LLAMA).prefill(TOKENS[0, :5])
    assert np.abs(np.asarray(plain) - expected[4]).max() > 0.01


def test_generate_takes_adapters():
    options = {"max_tokens": 6, "temperature": 0.0}
    merged = tune.merge(model("llama"), trained("llama"), LLAMA)
    ids = riftco.generate(model("llama"), LLAMA, [1, 2, 3], adapters=trained("llama"), **options)
    assert ids == riftco.generate(merged, LLAMA, [1, 2, 3], **options)
    assert ids != riftco.generate(model("llama"), LLAMA, [1, 2, 3], **options)


def test_a_compute_dtype_reaches_adapters():
    half = jax.jit(lambda a: models.forward(model("gpt"), TOKENS, GPT, adapters=a, dtype=jnp.bfloat16))(trained("gpt"))
    assert half.dtype == jnp.bfloat16
    wide = np.asarray(forward(model("gpt"), trained("gpt"), GPT))
    assert np.abs(np.asarray(half, np.float32) - wide).max() < 0.05 * np.abs(wide).max()
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model("gpt"))
    _, grads = value_and_grad(trained("gpt"), base, GPT)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


# ------------------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_gradients_are_those_of_differences(name):
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)
        params, adapters = wide(model(name)), wide(trained(name))
        loss = jax.jit(lambda a: models.loss(params, TOKENS, TARGETS, CONFIGS[name], adapters=a))
        grads = riftco.grad(lambda a: models.loss(params, TOKENS, TARGETS, CONFIGS[name], adapters=a))(adapters)
        assert jax.tree.structure(grads) == jax.tree.structure(adapters)
        keys = iter(jax.random.split(jax.random.key(3), 64))
        direction = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, jnp.float64), adapters)
        at = lambda t: float(loss(jax.tree.map(lambda a, d: a + t * d, adapters, direction)))
        slope = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))
        np.testing.assert_allclose((at(1e-6) - at(-1e-6)) / 2e-6, slope, rtol=1e-6)


def test_the_gradient_of_a_fresh_a_is_zero_and_of_its_b_is_not():
    _, grads = value_and_grad(fresh("gpt"), model("gpt"), GPT)
    for name, a, b in grads.pairs():
        assert not np.any(a), name
        assert np.all(np.abs(b).max((-1, -2)) > 0), name


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_block_checkpointing_changes_no_bit(name):
    equal(
        value_and_grad(trained(name), model(name), CONFIGS[name]),
        value_and_grad(trained(name), model(name), CONFIGS[name], grad_checkpoint="block"),
    )


@functools.cache
def programs():
    """The compiled gradients of all params, and of adapters on everything in the blocks, at 6 layers of width 384."""
    config = models.preset("base")
    params = jax.eval_shape(lambda key: models.init(key, config), jax.random.key(0))
    make = lambda params: tune.lora_init(jax.random.key(1), params, config, targets=["blocks"], rank=8, alpha=8)
    tokens = np.zeros((4, config.context), np.int32)
    loss = lambda params, adapters: models.loss(params, tokens, tokens, config, adapters=adapters)
    full = jax.jit(riftco.grad(lambda params: loss(params, None)))
    lora = jax.jit(lambda adapters, params: riftco.grad(lambda a: loss(params, a))(adapters))
    return full.lower(params).compile(), lora.lower(jax.eval_shape(make, params), params).compile()


def flops(compiled) -> float:
    analysis = compiled.cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


def test_no_gradient_of_the_base_is_computed():
    """By the compiler's count of operations, and by there being no product of a base weight's shape."""
    full, lora = programs()
    assert flops(lora) < 0.72 * flops(full)
    product = lambda compiled: set(re.findall(r"f32\[([\d,]+)\]\S* dot\(", compiled.as_text()))
    weights = {"384,384", "1536,384", "384,1536"}
    assert len(product(full) & weights) >= 2
    assert not product(lora) & weights
    assert {"8,384", "8,1536"} <= product(lora)


def test_no_input_is_saved_for_the_gradient_of_a_frozen_weight():
    """The tape keeps what adapters need: without any on the feed-forward layers, neither of their inputs."""
    text = lambda targets: riftco.explain(
        lambda a: models.loss(model("gpt"), TOKENS, TARGETS, GPT, adapters=a), fresh("gpt", targets, rank=1)
    )
    count = lambda text: int(re.search(r"(\d+) residual bytes", text)[1])
    rows = TOKENS.size * 4 * GPT.layers
    saved = count(text(("attention.value", "feed_forward"))) - count(text(("attention.value",)))
    # Beside their inputs (width and hidden), one narrow row each for the gradient of B, and the pairs themselves.
    assert 0 < saved - rows * (GPT.width + GPT.hidden) < rows * 4 + 4 * GPT.layers * 4 * (GPT.width + GPT.hidden)


def test_a_fused_loss_computes_no_gradient_of_a_frozen_head(monkeypatch):
    monkeypatch.setattr(decoder, "_FUSED_LOSS_LOGITS", 0)
    text = riftco.explain(
        lambda a: models.loss(model("gpt"), TOKENS, TARGETS, GPT, adapters=a), fresh("gpt", ("attention.query",))
    )
    (line,) = (line for line in text.splitlines() if "linear_cross_entropy" in line)
    assert f"saves {TOKENS.size * GPT.width * 4} B" in line


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_a_fused_loss_knows_the_head_s_adapter(monkeypatch, reduction):
    weights = np.random.default_rng(2).uniform(0, 2, TOKENS.shape).astype(np.float32)
    weights[0, :5] = 0

    def run():
        loss = lambda a: models.loss(
            model("gpt"), TOKENS, TARGETS, GPT, adapters=a, weights=weights, reduction=reduction, label_smoothing=0.1,
            z_loss=0.01,
        )  # fmt: skip
        return jax.jit(riftco.value_and_grad(loss))(trained("gpt"))

    expected = run()
    monkeypatch.setattr(decoder, "_FUSED_LOSS_LOGITS", 0)
    monkeypatch.setattr(decoder, "_LOSS_CHUNK", 7)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), run(), expected)


def test_every_chunk_of_a_fused_loss_draws_its_own_mask_for_the_head(monkeypatch):
    monkeypatch.setattr(decoder, "_FUSED_LOSS_LOGITS", 0)
    monkeypatch.setattr(decoder, "_LOSS_CHUNK", 8)
    adapters = dataclasses.replace(trained("gpt"), dropout=0.5)
    assert "language_model_head" in adapters.targets
    last = decoder.head(attach(model("gpt"), adapters, GPT, jax.random.key(3)), GPT, None)
    x = jnp.tile(jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, GPT.width)), jnp.float32), (1, 2, 1))
    targets = jnp.zeros((1, 16), jnp.int32)
    one = decoder._chunked_loss(last, x[:, :8], targets[:, :8], weights=None, reduction="sum")
    two = decoder._chunked_loss(last, x, targets, weights=None, reduction="sum")
    assert abs(float(two) - 2 * float(one)) > 1e-3


# ------------------------------------------------------------------------------------------------ training


def test_training_moves_adapters_and_nothing_else():
    init, update = optim.adam(3e-2, max_grad_norm=1.0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapters, state, params):
        loss, grads = riftco.value_and_grad(
            lambda a: models.loss(params, TOKENS, TARGETS, GPT, adapters=a), 0
        )(adapters)  # fmt: skip
        adapters, state, stats = update(grads, state, adapters)
        return adapters, state, loss, stats.ok

    before = jax.tree.map(np.array, model("gpt"))
    adapters = jax.tree.map(jnp.copy, fresh("gpt"))
    state, losses = init(adapters), []
    for _ in range(12):
        adapters, state, loss, ok = step(adapters, state, model("gpt"))
        losses.append(float(loss))
        assert ok
    assert losses[-1] < 0.8 * losses[0]
    equal(model("gpt"), before)
    assert isinstance(adapters, tune.Adapters) and adapters.targets == fresh("gpt").targets


def test_dropout_is_on_the_adapters_input_and_off_without_a_key():
    rate = {"dropout": 0.5}
    a = value_and_grad(trained("gpt", **rate), model("gpt"), GPT)[0]
    assert a == value_and_grad(trained("gpt"), model("gpt"), GPT)[0]
    draws = {
        float(value_and_grad(trained("gpt", **rate), model("gpt"), GPT, jax.random.key(seed))[0]) for seed in (0, 1, 0)
    }
    assert len(draws) == 2 and float(a) not in draws
    # Of a model with dropout of its own, the draws stay: B is zero, so only they show.
    dropping = dataclasses.replace(GPT, dropout=0.3)
    alone = jax.jit(lambda k: models.loss(model("gpt"), TOKENS, TARGETS, dropping, dropout_key=k))(jax.random.key(5))
    assert value_and_grad(fresh("gpt", **rate), model("gpt"), dropping, jax.random.key(5))[0] == alone


def test_dropout_has_the_mean_of_no_dropout():
    """One layer, a linear function of its input: the mean over draws is the value without."""
    branch = Branch(jnp.ones((1, 4)), jnp.ones((1, 2)), None, 0.5, 0.25)
    x = jnp.arange(4.0)[None]
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.vmap(lambda key: dataclasses.replace(branch, key=key)(x))(keys)
    np.testing.assert_allclose(draws.mean(0), branch(x), rtol=0.05)
    assert len(np.unique(np.asarray(draws)[:, 0, 0])) > 4


def test_checkpoints_hold_adapters_exactly(tmp_path):
    init, _ = optim.adam(1e-3)
    state = {"adapters": trained("llama", rslora=True, dropout=0.1), "optimizer": init(trained("llama"))}
    with checkpoints.Checkpoints(tmp_path / "run") as run:
        run.save(3, state, {"a": 1})
        run.wait()
        found = run.restore(None, jax.tree.map(jnp.zeros_like, state)).state
    equal(found, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert found["adapters"].rslora and found["adapters"].dropout == 0.1


# ------------------------------------------------------------------------------------------------ names and refusals


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (["query"], ["attention.query"]),
        (["attention.value", "attention.query"], ["attention.query", "attention.value"]),
        (["attention"], ["attention.query", "attention.key", "attention.value", "attention.output"]),
        (["blocks.feed_forward.expand"], ["feed_forward.expand"]),
        (["feed_forward", "feed_forward.expand"], ["feed_forward.expand", "feed_forward.project"]),
        (["language_model_head"], ["language_model_head"]),
    ],
)
def test_targets_match_whole_segments(targets, found):
    adapters = fresh("gpt", tuple(targets))
    assert list(adapters.targets) == found
    shapes = {name: (a.shape, b.shape) for name, a, b in adapters.pairs()}
    out, width = projections(GPT)[found[0]]
    stack = () if found[0] == "language_model_head" else (GPT.layers,)
    assert shapes[found[0]] == ((*stack, 3, width), (*stack, out, 3))


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": []}, "attention.query, attention.key"),
        ({"targets": "attention.query"}, "list"),
        ({"targets": ["quer"]}, "'quer' is not; this model has attention.query"),
        ({"targets": ["attention.que"]}, "attention.que"),
        ({"targets": ["attention_norm"]}, "attention_norm"),
        ({"targets": ["token_embedding"]}, "token_embedding"),
        ({"targets": ["query", "gate"]}, "gate"),
        ({"targets": [3]}, "at least one"),
        ({"rank": 0}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": 2.0}, "rank"),
        ({"rank": 17}, "at most 16"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1e-60}, "alpha"),
        ({"alpha": 1e39}, "alpha"),
        ({"alpha": "x"}, "numbers"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"rslora": 1}, "rslora"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        fresh("gpt", **options)


def test_a_tied_head_has_nothing_to_adapt():
    params = models.init(jax.random.key(0), TIED)
    with pytest.raises(ConfigError, match="token embedding"):
        tune.lora_init(jax.random.key(0), params, TIED, targets=["language_model_head"], rank=1, alpha=1)


def test_a_draw_depends_on_its_own_name():
    alone, together = fresh("gpt", ("value",)), fresh("gpt", ("attention",))
    equal(alone.weights["blocks"]["attention"]["value"], together.weights["blocks"]["attention"]["value"])
    layers = np.asarray(alone.weights["blocks"]["attention"]["value"]["lora_a"])
    assert not np.array_equal(layers[0], layers[1])
    assert 0.8 * np.sqrt(6 / 19) < np.abs(layers).max() <= np.sqrt(6 / 19)


def test_adapters_of_another_model_are_refused():
    with pytest.raises(ShapeError, match="feed_forward"):
        forward(model("llama"), fresh("gpt"), LLAMA)
    with pytest.raises(ShapeError, match=r"attention\.key\.lora_a must be \[2, 3, 16\]; got float32\[3,3,16\]"):
        forward(model("gpt"), fresh("llama", ("key",)), GPT)
    with pytest.raises(DTypeError, match="got dict"):
        forward(model("gpt"), {}, GPT)
    with pytest.raises(DTypeError, match="must be floating"):
        forward(model("gpt"), jax.tree.map(lambda leaf: leaf.astype(int), fresh("gpt")), GPT)
    with pytest.raises(DTypeError, match="lora_init"):
        tune.lora_init(jax.random.key(0), {}, GPT, targets=["query"], rank=1, alpha=1)


# ------------------------------------------------------------------------------------------------ adapter bundles


def saved(tmp_path, name="llama", **options):
    base = bundle.save(tmp_path / "base", model(name), CONFIGS[name], None)
    adapter = bundle.save_adapters(tmp_path / "adapter", trained(name), CONFIGS[name], base=base, **options)
    return base, adapter


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_bundle_comes_back_exactly(tmp_path, name):
    base, identity = saved(tmp_path, name, fingerprints={"data": "ab"})
    loaded = bundle.load_adapters(tmp_path / "adapter", CONFIGS[name], base=base)
    equal(loaded.adapters, trained(name))
    assert jax.tree.structure(loaded.adapters) == jax.tree.structure(trained(name))
    assert (loaded.artifact_id, loaded.base_id) == (identity, base)
    assert loaded.manifest["fingerprints"]["data"] == "ab" and loaded.manifest["stage"] == "finetune"
    again = bundle.save_adapters(
        tmp_path / "again", loaded.adapters, CONFIGS[name], base=base, fingerprints={"data": "ab"}
    )
    assert again == identity


@pytest.mark.parametrize("targets", [("query",), ("query", "value", "project"), ("attention",)])
def test_a_fused_layer_is_taken_apart_as_it_was_put_together(tmp_path, targets):
    gpt2 = dataclasses.replace(GPT, tie_embeddings=True)
    assert families.family_of(gpt2) == "gpt2"
    params = models.init(jax.random.key(0), gpt2)
    for rslora in (False, True):
        made = tune.lora_init(jax.random.key(1), params, gpt2, targets=targets, rank=2, alpha=3, rslora=rslora)
        made = jax.tree.map(lambda leaf: leaf + 0.1, made)
        place = tmp_path / f"adapter{rslora}"
        bundle.save_adapters(place, made, gpt2, base="0" * 64)
        loaded = bundle.load_adapters(place, gpt2)
        equal(loaded.adapters, made)
        assert loaded.adapters.scale == made.scale


def test_another_base_is_refused(tmp_path):
    _, identity = saved(tmp_path)
    other = bundle.weights_id(model("gpt"), GPT)
    with pytest.raises(BundleError, match=f"belongs to the base .*; this one is {other}"):
        bundle.load_adapters(tmp_path / "adapter", LLAMA, base=other)
    with pytest.raises(BundleError, match=r"attention\.query must be|feed_forward|is not"):
        bundle.load_adapters(tmp_path / "adapter", GPT)
    with pytest.raises(BundleError, match="64 hex"):
        bundle.save_adapters(tmp_path / "x", trained("llama"), LLAMA, base="mine")
    assert not (tmp_path / "x").exists()
    assert identity != other


def test_merging_twice_is_refused(tmp_path):
    base, identity = saved(tmp_path)
    loaded = bundle.load_adapters(tmp_path / "adapter", LLAMA, base=base)
    merged = tune.merge(model("llama"), loaded.adapters, LLAMA)
    child = bundle.save(
        tmp_path / "child", merged, LLAMA, None, stage="merge", parent=base, fingerprints={bundle.MERGED: identity}
    )
    with pytest.raises(BundleError, match="belongs to the base"):
        bundle.load_adapters(tmp_path / "adapter", LLAMA, base=child)
    with pytest.raises(BundleError, match="merged once"):
        bundle.check_base(loaded.manifest, child, bundle.load(tmp_path / "child").manifest["fingerprints"])


def test_force_replaces_adapters_and_no_strangers_files(tmp_path):
    base, identity = saved(tmp_path)
    assert bundle.save_adapters(tmp_path / "adapter", trained("llama"), LLAMA, base=base, force=True) == identity
    (tmp_path / "adapter" / "optimizer.pt").write_text("days of work")
    for damage in (None, "{"):
        if damage:
            (tmp_path / "adapter" / "riftco.json").write_text(damage)
        with pytest.raises(BundleError, match=r"holds optimizer\.pt besides"):
            bundle.save_adapters(tmp_path / "adapter", trained("llama"), LLAMA, base=base, force=True)
    assert (tmp_path / "adapter" / "optimizer.pt").read_text() == "days of work"


def test_damage_is_named_and_nothing_is_replaced(tmp_path):
    base, _ = saved(tmp_path)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    with pytest.raises(BundleError, match="must not exist"):
        bundle.save_adapters(tmp_path / "adapter", trained("llama"), LLAMA, base=base)
    with pytest.raises(BundleError, match=r"adapter_config\.json"):
        bundle.save_adapters(tmp_path / "base", trained("llama"), LLAMA, base=base, force=True)
    bundle.save_adapters(tmp_path / "adapter", trained("llama"), LLAMA, base=base, force=True)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match=r"adapter_model\.safetensors: its SHA-256"):
        bundle.load_adapters(tmp_path / "adapter", LLAMA)
    with pytest.raises(BundleError, match="not merged"):
        bundle.load(tmp_path / "adapter")
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, trained("llama"))
    with pytest.raises(BundleError, match="finite"):
        bundle.save_adapters(tmp_path / "nan", broken, LLAMA, base=base)


def test_the_id_of_weights_is_that_of_their_values():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model("gpt"))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    assert bundle.weights_id(half, GPT) == bundle.weights_id(wide, GPT) != bundle.weights_id(model("gpt"), GPT)
    assert bundle.weights_id(wide, GPT) != bundle.weights_id(wide, dataclasses.replace(GPT, norm_eps=1e-6))

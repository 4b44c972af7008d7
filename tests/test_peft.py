"""Adapters beside PEFT: theirs loaded here, ours loaded there, on models that transformers made, without downloads."""

import functools
import importlib.util
import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import bundle, models, tune
from riftco.bundle.peft import check_settings, from_peft, to_peft
from riftco.bundle.safetensors_reader import SafetensorsFile
from riftco.errors import BundleError, ConfigError, DTypeError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MISSING = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
needs_peft = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"NOT COMPARED WITH PEFT: {', '.join(MISSING)} missing; pip install 'riftco[parity]'",
    ),
]
TOLERANCE = 1e-5  # of float32 logits
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 10))

LLAMA = models.DecoderConfig(31, 16, 16, 2, 2, 24, kv_heads=1, norm="rms", mlp="swiglu", position="rope", norm_eps=1e-6)
GPT2 = models.DecoderConfig(31, 16, 16, 2, 2, 32, mlp="gelu_tanh", tie_embeddings=True)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


@functools.cache
def model(name: str):
    return models.init(jax.random.key(0), CONFIGS[name])


def made(name: str, targets, **options):
    """Adapters with nothing left at zero."""
    fresh = tune.lora_init(jax.random.key(1), model(name), CONFIGS[name], targets=targets, rank=2, alpha=3.0, **options)
    noise = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + 0.1 * noise.standard_normal(leaf.shape, np.float32), fresh)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, adapters, config):
    return models.forward(params, TOKENS, config, adapters=adapters)


# ------------------------------------------------------------------------------------------------ the real PEFT


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    place = tmp_path_factory.mktemp("bases")
    for name, config in CONFIGS.items():
        bundle.save(place / name, model(name), config, None)
    return place


def theirs(place):
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        return transformers.AutoModelForCausalLM.from_pretrained(place, dtype="float32").eval()


def their_logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


class TestBesidePeft:
    pytestmark = needs_peft

    @pytest.mark.parametrize("rslora", [False, True])
    @pytest.mark.parametrize(
        ("name", "targets"),
        [
            ("llama", ("attention", "feed_forward", "language_model_head")),
            ("gpt2", ("attention", "feed_forward")),
            ("gpt2", ("query", "value")),
            ("gpt2", ("attention.output",)),
        ],
    )
    def test_peft_loads_ours(self, tmp_path, bases, name, targets, rslora):
        import peft

        base = bases / name
        ours = made(name, targets, rslora=rslora)
        bundle.save_adapters(tmp_path / "adapter", ours, CONFIGS[name], base="0" * 64, base_path=str(base))
        plain = theirs(base)
        before = their_logits(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
        logits = their_logits(loaded)
        assert np.abs(logits - before).max() > 0.01
        np.testing.assert_allclose(forward(model(name), ours, CONFIGS[name]), logits, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("rslora", [False, True])
    @pytest.mark.parametrize(
        ("name", "modules", "targets"),
        [
            (
                "llama",
                ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
                "attention.query attention.value attention.output feed_forward.gate feed_forward.down "
                "language_model_head",
            ),
            (
                "gpt2",
                ["c_attn", "mlp.c_proj"],
                "attention.query attention.key attention.value feed_forward.project",
            ),
        ],
    )
    def test_we_load_peft_s_and_give_it_back(self, tmp_path, bases, name, modules, targets, rslora):
        import peft
        import torch

        options = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "use_rslora": rslora, "task_type": "CAUSAL_LM"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.get_peft_model(theirs(bases / name), peft.LoraConfig(target_modules=modules, **options))
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in adapted.parameters():
                    if parameter.requires_grad:
                        parameter.copy_(0.2 * torch.randn_like(parameter))
            adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
        found = bundle.load_adapters(tmp_path / "theirs", CONFIGS[name], base="f" * 64)
        assert (found.artifact_id, found.base_id) == (None, None)
        assert found.adapters.targets == tuple(targets.split())
        assert (found.adapters.rank, found.adapters.dropout, found.adapters.rslora) == (3, 0.1, rslora)
        ours = np.asarray(forward(model(name), found.adapters, CONFIGS[name]))
        np.testing.assert_allclose(ours, their_logits(adapted), rtol=0, atol=TOLERANCE)
        _, tensors = to_peft(found.adapters, CONFIGS[name])
        original = SafetensorsFile(tmp_path / "theirs" / "adapter_model.safetensors")
        with original as file:
            assert sorted(tensors) == sorted(file)
            for tensor in file:
                np.testing.assert_array_equal(tensors[tensor], file[tensor], err_msg=tensor)


# ------------------------------------------------------------------------------------------------ settings, refusals


def plain_settings(**changes):
    return {**to_peft(made("llama", ("query",)), LLAMA)[0], **changes}


@pytest.mark.tiny
def test_settings_say_what_peft_needs():
    settings, tensors = to_peft(made("gpt2", ("query", "value"), dropout=0.25), GPT2, base_path="base")
    assert settings["fan_in_fan_out"] is True and settings["base_model_name_or_path"] == "base"
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (2, 3, 0.25)
    # Two pairs lie in one layer: twice the rank, and alpha with it, so that the scale stays.
    assert settings["rank_pattern"] == {"attn.c_attn": 4} and settings["alpha_pattern"] == {"attn.c_attn": 6}
    a = tensors["base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"]
    b = tensors["base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"]
    assert (a.shape, b.shape) == ((4, 16), (48, 4))
    assert not b[:16, 2:].any() and not b[16:32].any() and not b[32:, :2].any()
    json.dumps(settings)
    settings, _ = to_peft(made("gpt2", ("attention",), rslora=True), GPT2)
    assert settings["alpha_pattern"]["attn.c_attn"] == pytest.approx(3.0 * 3**0.5)
    settings, _ = to_peft(made("llama", ("attention",)), LLAMA)
    assert settings["target_modules"] == [f"self_attn.{side}_proj" for side in "koqv"]
    assert not settings["rank_pattern"] and settings["fan_in_fan_out"] is False


@pytest.mark.tiny
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias"),
        ({"some_new_method": {"x": 1}}, "some_new_method"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"rank_pattern": {"q_proj": 4}}, "leave the scale as it is"),
        ({"alpha_pattern": {"q_proj": 4}}, "leave the scale as it is"),
    ],
)
def test_what_changes_the_function_is_refused_by_name(change, message):
    check_settings(plain_settings())
    with pytest.raises(BundleError, match=message):
        check_settings(plain_settings(**change))


@pytest.mark.tiny
def test_tensors_that_do_not_fit_are_refused_by_name():
    settings, tensors = to_peft(made("llama", ("query",)), LLAMA)
    first, second = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "layers.1"

    def refuse(message, config=LLAMA, settings=settings, error=BundleError, **changes):
        with pytest.raises(error, match=message):
            from_peft(settings, {**tensors, **changes}, config)

    refuse("stray is not", stray=np.zeros((2, 2)))
    twice = first.replace("base_model.model.model.", "base_model.model.")
    refuse("with and without its model's prefix", **{twice: tensors[first]})
    refuse("self_attn.q_proj.lora_A.weight is not; use the base", GPT2)
    refuse(r"A of attention.query must be \[2, 16\]", **{first: np.zeros((3, 16), np.float32)})
    refuse("rank", settings={**settings, "r": 0}, error=ConfigError)
    some = {name: array for name, array in tensors.items() if second not in name}
    with pytest.raises(BundleError, match="of layer 1 has none"):
        from_peft(settings, some, LLAMA)
    with pytest.raises(BundleError, match=r"lora_B\.weight must be there"):
        from_peft(settings, {first: tensors[first]}, LLAMA)
    with pytest.raises(BundleError, match="adapt something"):
        from_peft(settings, {}, LLAMA)
    with pytest.raises(DTypeError, match="lora_init"):
        to_peft({}, LLAMA)  # type: ignore[arg-type]


@pytest.mark.tiny
def test_pickles_and_missing_files_are_refused(tmp_path):
    with pytest.raises(BundleError, match=r"adapter_config\.json; it does not"):
        bundle.load_adapters(tmp_path, LLAMA)
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain_settings()))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(BundleError, match="run code when read"):
        bundle.load_adapters(tmp_path, LLAMA)


@pytest.mark.tiny
def test_half_precision_adapters_become_float32():
    settings, tensors = to_peft(made("llama", ("query",)), LLAMA)
    half = {name: array.astype(jnp.bfloat16) for name, array in tensors.items()}
    assert {leaf.dtype for leaf in jax.tree.leaves(from_peft(settings, half, LLAMA))} == {np.dtype(np.float32)}

"""What three small models write, for tests/golden/samples.jsonl: a base, a LoRA child and a QLoRA child of it.

    python -m tests.golden_samples

writes the file anew. Weights are made by counting, of few bits each, and every block of 64 has the largest magnitude
2^-3, so that packing, decoding and merging round nowhere: the bundles' bytes, and with them the artifact_ids, are the
same on every machine, whatever trained models would be.
"""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from riftco import bundle, generate, models, tokenizers, tune
from riftco.interchange import load
from riftco.tokenizers import ByteTokenizer
from riftco.tune.bases import PACKED, packed_digest
from riftco.tune.merged import merge_to_bundle

FILE = Path(__file__).parent / "golden" / "samples.jsonl"
TEXT = "".join(chr(code) for code in range(32, 127)) + "\n"
PROMPTS = ("One morning", "2 + 2 =", "zzz")
SAMPLERS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
)


def counted(shape, number):
    """Multiples of 2^-10 within 2^-3, from a linear congruence; every 64th is 2^-3 itself."""
    place = np.arange(np.prod(shape), dtype=np.uint64)
    mixed = (place * np.uint64(2654435761) + np.uint64(number * 40503)) % np.uint64(2**32)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519) % np.uint64(2**32)
    values = (mixed >> np.uint64(24)).astype(np.float32) / np.float32(1024) - np.float32(0.125)
    values[::64] = 0.125
    return jnp.asarray(values.reshape(shape))


def make(place):
    """The three models as bundles under a directory; name -> path."""
    tokenizer = ByteTokenizer.train(TEXT)
    config = models.DecoderConfig(
        vocab_size=tokenizer.vocab_size, context=64, width=64, heads=4, kv_heads=2, layers=2, hidden=128,
        mlp="swiglu", norm="rms", position="rope", tie_embeddings=False,
    )  # fmt: skip
    leaves, structure = jax.tree.flatten(models.abstract(config))
    made = [jnp.ones(leaf.shape) if leaf.ndim < 2 else counted(leaf.shape, n) for n, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(structure, made)
    params["language_model_head"]["weight"] *= 4.0
    base = bundle.save(place / "base", params, config, tokenizer, stage="pretrain")
    paths = {"base": place / "base"}
    for method, number in (("lora", 100), ("qlora", 200)):
        adapters = tune.lora_init(
            jax.random.key(0), params, config, targets=["attention", "feed_forward"], rank=4, alpha=8.0
        )
        leaves, structure = jax.tree.flatten(adapters)
        adapters = jax.tree.unflatten(structure, [counted(leaf.shape, number + n) for n, leaf in enumerate(leaves)])
        facts = {}
        if method == "qlora":
            packed = tune.quantize(params, config)
            how = {"block_size": 64, "double_quant": True, "packed": packed_digest(packed, config)}
            facts = {PACKED: how}
        bundle.save_adapters(
            place / f"{method}-adapters", adapters, config, base=base, base_path="base", stage="sft",
            fingerprints=facts,
        )  # fmt: skip
        merge_to_bundle(place / "base", place / f"{method}-adapters", place / method)
        paths[f"{method} merged"] = place / method
    return paths


def rows():
    """The content of the file."""
    with tempfile.TemporaryDirectory() as directory:
        for name, path in make(Path(directory)).items():
            params, config = load(path)
            tokenizer = tokenizers.load(path)
            identity = bundle.load(path).artifact_id
            for prompt in PROMPTS:
                for seed, sampler in enumerate(SAMPLERS):
                    ids = generate(params, config, tokenizer.encode(prompt), max_tokens=24, seed=seed, **sampler)
                    yield {
                        "model": name, "artifact_id": identity, "prompt": prompt, "seed": seed, "sampler": sampler,
                        "ids": [int(token) for token in ids],
                    }  # fmt: skip


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(row) + "\n" for row in rows()))

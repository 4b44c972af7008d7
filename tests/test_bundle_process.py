"""A bundle in a fresh process: the same tokenizer, tensors, logits and seeded ids, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from riftco import bundle, models, tokenizers
from riftco.models import DecoderConfig

# Run by this process and by the fresh one; prints digests of everything that has to agree.
DIGESTS = """
import hashlib, json, sys
import jax, numpy as np
from riftco import bundle, generate, models
def digests(params, config, tokenizer):
    digest = lambda x: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
    prompt = tokenizer.encode("One day the fox")
    logits = jax.jit(models.forward, static_argnums=2)(params, np.asarray([prompt], np.int32), config)
    return {
        "tokenizer": tokenizer.fingerprint(),
        "tensors": {name: digest(leaf) for name, leaf in models.named(params, config).items()},
        "logits": digest(logits),
        "ids": generate(params, config, prompt, max_tokens=32, temperature=0.9, top_k=20, top_p=0.95, seed=7),
    }
"""
PROGRAM = f"""{DIGESTS}
loaded = bundle.load(sys.argv[1])
print(json.dumps(digests(loaded.params, loaded.config, loaded.tokenizer)))
"""


def report(directory: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_fresh_process_sees_the_same_model(tmp_path: Path, family: str) -> None:
    text = Path(__file__).parents[1].joinpath("corpus/tiny.txt").read_bytes()
    tokenizer = tokenizers.BPETokenizer.train(text, vocab_size=300, pattern="gpt2")
    forms = {
        "gpt2": {"mlp": "gelu_tanh", "tie_embeddings": True},
        "llama": {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "position": "rope"},
    }
    config = DecoderConfig(tokenizer.vocab_size, 32, 32, 4, 2, 64, **forms[family])
    params = models.init(jax.random.key(3), config)
    bundle.save(tmp_path / "final", params, config, tokenizer)
    bundle.load(tmp_path / "final").save(tmp_path / "again")
    here: dict = {}
    exec(DIGESTS, here)
    expected = here["digests"](params, config, tokenizer)
    assert len(expected["ids"]) == 32
    assert report(tmp_path / "final") == report(tmp_path / "again") == expected
    files = sorted(path.name for path in (tmp_path / "final").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((tmp_path / "final" / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in files)

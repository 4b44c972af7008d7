"""What a Metal device would be asked to run: no dtype that jax-metal lacks, and which primitives, of both programs.

Nothing here runs on Metal. The jaxprs of a train and of a decode step are walked; jax-metal (0.1.1, for jax 0.4.34)
has no float64, no complex numbers and no bfloat16. tests/golden/metal_primitives.txt records the primitives under jax
0.4.34, so that a change which asks a Metal device for something new is seen; rewrite it with
`RIFTCO_WRITE_GOLDEN=1 python -m pytest -n0 tests/test_metal.py` under that jax.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from riftco import models
from riftco.models.decoding import contiguous_cache, decode_step, decoding_params
from riftco.models.rotary_tables import rope_tables
from riftco.train import TrainConfig
from riftco.train.step import init_state, make_train_step

RECORD = Path(__file__).parent / "golden" / "metal_primitives.txt"
LACKING = {"float64", "complex64", "complex128", "bfloat16"}


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def used(closed):
    """The names of the primitives of a program, and of the dtypes of everything in it."""
    eqns = list(equations(closed.jaxpr))
    values = [v for e in eqns for v in (*e.invars, *e.outvars)] + [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    return {e.primitive.name for e in eqns}, {str(v.aval.dtype) for v in values if hasattr(v.aval, "dtype")}


CONFIG = dict(vocab_size=64, context=16)


def train_program(**options):
    config, train_config = models.preset("llama-tiny", **CONFIG), TrainConfig(max_steps=4, batch_size=2, **options)
    state = init_state(config, train_config)
    tokens = jnp.zeros((2, 16), jnp.int32)
    return jax.make_jaxpr(make_train_step(config, train_config))(state, {"tokens": tokens, "targets": tokens}, 0)


def decode_program():
    config = models.preset("llama-tiny", **CONFIG)
    params = decoding_params(models.init(jax.random.PRNGKey(0), config), config)
    cache = contiguous_cache(config, 1, 16, jnp.float32)
    rope = rope_tables(config, np.asarray([3]), jnp.float32)
    step = lambda params, cache, token, position: decode_step(params, cache, token, position, rope, config)
    return jax.make_jaxpr(step)(params, cache, jnp.zeros((1,), jnp.int32), jnp.int32(3))


PROGRAMS = {
    "train": train_program,
    "train, checkpointed": lambda: train_program(grad_checkpoint="block"),
    "decode": decode_program,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_asks_for_a_dtype_that_metal_lacks(name):
    primitives, dtypes = used(PROGRAMS[name]())
    assert {"dot_general", "float32"} <= primitives | dtypes, "the walk sees nothing"
    assert not dtypes & LACKING


def test_the_walk_sees_what_it_looks_for():
    def loop(x):
        inner = jax.jit(lambda c: c.astype(jnp.bfloat16).astype(jnp.float32))
        return jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]

    primitives, dtypes = used(jax.make_jaxpr(loop)(jnp.ones(2)))
    assert "bfloat16" in dtypes and {"scan", "convert_element_type"} <= primitives


@pytest.mark.skipif(not jax.__version__.startswith("0.4.34"), reason="the record is of jax 0.4.34, for jax-metal")
def test_the_primitives_are_the_recorded_ones():
    lines = [f"{name}: {' '.join(sorted(used(make())[0]))}" for name, make in PROGRAMS.items()]
    if os.environ.get("RIFTCO_WRITE_GOLDEN") == "1":
        RECORD.write_text("\n".join(lines) + "\n")
    assert RECORD.read_text().splitlines() == lines

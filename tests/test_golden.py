"""The reference implementation's recorded numbers, reproduced: `golden_core.json` of the shared folder.

The file is found through RIFTCO_GOLDEN or at ../shared/golden/ beside the checkout.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from riftco.models import DecoderConfig, named, parameter_count, reference_init, spec

_DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "shared" / "golden" / "golden_core.json"
_PATH = pathlib.Path(os.environ.get("RIFTCO_GOLDEN", _DEFAULT))

pytestmark = pytest.mark.skipif(
    not _PATH.is_file(), reason=f"GOLDEN NUMBERS NOT CHECKED: no {_PATH.name}; set RIFTCO_GOLDEN to its path"
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(_PATH.read_text())


def gpt_config(record: dict[str, Any]) -> DecoderConfig:
    """The configuration of the golden decoder: LayerNorm, exact GELU, learned positions, biases, head bias."""
    c = record["config"]
    return DecoderConfig(
        c["vocabulary_size"], c["maximum_context"], c["model_width"], c["head_count"], c["block_count"],
        c["feed_forward_width"], head_bias=True,
    )  # fmt: skip


def llama_config(record: dict[str, Any]) -> DecoderConfig:
    """The configuration of the golden Llama decoder: RMSNorm, SwiGLU, RoPE, grouped heads, untied and bias-free."""
    c = record["config"]
    return DecoderConfig(
        c["vocabulary_size"], c["maximum_context"], c["model_width"], c["query_head_count"], c["block_count"],
        c["feed_forward_width"], kv_heads=c["key_value_head_count"], norm="rms", mlp="swiglu", position="rope",
    )  # fmt: skip


TOPOLOGIES = [("decoder", gpt_config, 19419), ("llama", llama_config, 20320)]


@pytest.mark.parametrize(("section", "configuration", "count"), TOPOLOGIES)
def test_names_shapes_and_counts(golden, section, configuration, count):
    record = golden[section]
    config = configuration(record)
    params = named(reference_init(config, record["config"]["random_seed"]), config)
    assert list(params) == record["parameter_names"]
    if "parameter_shapes" in record:
        assert [list(array.shape) for array in params.values()] == record["parameter_shapes"]
    assert parameter_count(config) == record["scalar_count"] == count
    assert sum(leaf.size for leaf in spec(config).values()) == count


@pytest.mark.tiny
@pytest.mark.parametrize(("section", "configuration", "count"), TOPOLOGIES)
def test_initial_weights_bit_for_bit(golden, section, configuration, count):
    record = golden[section]
    config = configuration(record)
    params = named(reference_init(config, record["config"]["random_seed"]), config)
    flat = np.concatenate([np.asarray(array, "<f4").ravel() for array in params.values()])
    np.testing.assert_array_equal(flat[:16], np.float32(record["initial_values_first16"]))
    assert flat.size == count
    assert hashlib.sha256(flat.tobytes()).hexdigest() == record["initial_values_sha256"]

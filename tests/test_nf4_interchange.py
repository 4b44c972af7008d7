"""Packed 4-bit weights beside bitsandbytes, bit by bit where it is installed, and in another project's layout."""

import importlib.util
import json
import os
import struct
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from riftco import ops, oracle
from riftco.errors import BundleError, ConfigError, DomainError, DTypeError, ShapeError, UnsupportedError
from riftco.interchange.nf4 import from_bitsandbytes, from_reference, to_bitsandbytes
from riftco.ops.nf4 import pack_for_kernels
from riftco.ops.nf4_blocks import dynamic_map
from riftco.oracle.nf4 import CODES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # bitsandbytes would compile, for half a minute, what runs once
MISSING = [name for name in ("torch", "bitsandbytes") if importlib.util.find_spec(name) is None]


def parity(test):
    """Marks a test that needs bitsandbytes."""
    reason = f"PARITY WITH BITSANDBYTES NOT CHECKED: {', '.join(MISSING)} missing; pip install 'riftco[parity]'"
    return pytest.mark.parity(pytest.mark.skipif(bool(MISSING), reason=reason)(test))


@pytest.fixture(scope="module")
def bnb():
    """The functions of bitsandbytes, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes.functional
    return bitsandbytes.functional


def portable():
    """Asks torch for the kernel that bitsandbytes has for any device, in place of its C++ one for CPUs."""
    import torch

    return torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)


def weight(rng, shape):
    return (rng.standard_normal(shape) * rng.uniform(0.02, 1.0, (shape[0], 1))).astype(np.float32)


def tensors(packed, state, name="w.weight"):
    """What bitsandbytes writes into a state dict."""
    return {name: packed, **{f"{name}.{key}": x for key, x in state.as_dict(packed=True).items()}}


# ------------------------------------------------------------------------------------------------ beside bitsandbytes


@parity
@pytest.mark.parametrize("power", range(5, 13))
def test_codes_and_maxima_are_those_of_bitsandbytes(rng, bnb, power):
    import torch

    block_size, kind = 2**power, (jnp.float32, jnp.bfloat16, jnp.float16)[power % 3]
    for shape in ((70, 61), (3, 33)):
        for dtype in (torch.float32, torch.bfloat16):
            w = torch.tensor(weight(rng, shape)).to(dtype)
            packed, state = bnb.quantize_4bit(w, blocksize=block_size, quant_type="nf4")
            ours = ops.quantize_nf4(jnp.asarray(w.float().numpy()), block_size=block_size, double_quant=False)
            np.testing.assert_array_equal(ours.codes, packed.numpy().ravel())
            np.testing.assert_array_equal(ours.absmax, state.absmax.numpy())
        # Its CPU kernel decodes with a neighbour's maximum where a block is longer than a row (0.50.2).
        decoded = torch.ops.bitsandbytes.dequantize_4bit.default.redispatch(
            portable(), packed, state.absmax, block_size, "nf4", shape, getattr(torch, jnp.dtype(kind).name)
        )
        np.testing.assert_array_equal(ops.dequantize_nf4(ours, kind).astype(jnp.float32), decoded.float().numpy())


@parity
def test_blocks_of_zeros_and_ties_beside_bitsandbytes(bnb):
    import torch

    middles = np.append((CODES[:-1] + CODES[1:]) / np.float32(2), np.float32(1))
    for w in (np.zeros((3, 33), np.float32), np.tile(middles, (2, 4)), np.zeros((2, 32), np.float32)):
        packed, state = bnb.quantize_4bit(torch.tensor(w), blocksize=64, quant_type="nf4")
        ours = ops.quantize_nf4(w, double_quant=False)
        np.testing.assert_array_equal(ours.codes, packed.numpy().ravel())
        # It notes 1e-38 for a partial block of zeros, which decodes to the same.
        theirs = state.absmax.numpy()
        np.testing.assert_array_equal(ours.absmax, np.where(theirs == np.float32(1e-38), 0, theirs))


@parity
def test_the_table_of_the_maxima_is_that_of_bitsandbytes(bnb):
    np.testing.assert_array_equal(dynamic_map(), bnb.create_dynamic_map().numpy())


@parity
def test_quantised_maxima_beside_bitsandbytes(rng, bnb):
    """To the bit where the mean is exact; else torch's mean, summed in an order of its own, is an ulp or two away.

    The CPU kernel of bitsandbytes looks codes up at 2^16 steps and so misses the nearest near a threshold; its portable
    one, which is what its GPU kernels compute, does not.
    """
    import torch

    quantize_blockwise = torch.ops.bitsandbytes.quantize_blockwise.default
    w = weight(rng, (150, 257))
    w = np.round(w * 64) / np.float32(64)  # sums of such maxima are exact in any order
    for array, exact in ((w, True), (weight(rng, (150, 257)), False)):
        packed, state = bnb.quantize_4bit(torch.tensor(array), blocksize=32, quant_type="nf4", compress_statistics=True)
        ours = ops.quantize_nf4(array, block_size=32)
        np.testing.assert_array_equal(ours.codes, packed.numpy().ravel())
        plain = bnb.quantize_4bit(torch.tensor(array), blocksize=32, quant_type="nf4")[1].absmax
        rest = plain - torch.tensor(np.asarray(ours.offset))
        codes, nested = quantize_blockwise.redispatch(portable(), rest, state.state2.code, 256)
        np.testing.assert_array_equal(ours.absmax_codes, codes.numpy())
        np.testing.assert_array_equal(ours.nested_absmax, nested.numpy())
        offset = state.offset.numpy()
        assert abs(np.asarray(ours.offset) - offset) <= (0 if exact else 2 * np.spacing(offset))
        if exact:
            np.testing.assert_array_equal(ours.nested_absmax, state.state2.absmax.numpy())
        steps = np.abs(np.asarray(ours.absmax_codes, np.int32) - state.absmax.numpy())
        assert steps.max() <= 1 and (steps > 0).mean() < 0.01


@parity
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", [(40, 128), (7, 66), (5, 33)])
def test_state_dicts_of_bitsandbytes_round_trip(rng, bnb, shape, double_quant):
    import torch

    w = torch.tensor(weight(rng, shape))
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double_quant)
    written = tensors(packed, state)
    q = from_bitsandbytes(written, "w.weight")
    assert q.shape == shape and q.double_quant == double_quant
    decoded = bnb.dequantize_4bit(packed, state).numpy()
    np.testing.assert_array_equal(ops.dequantize_nf4(q), decoded)
    np.testing.assert_array_equal(oracle.dequantize_nf4(q), decoded)
    # And back: the same names, the same bytes, read by their own reader.
    ours = to_bitsandbytes(pack_for_kernels(q), "w.weight")
    assert set(ours) == set(written)
    for key, theirs in written.items():
        if not key.endswith("nf4"):
            assert ours[key].shape == tuple(theirs.shape), key
            np.testing.assert_array_equal(ours[key], theirs.numpy(), err_msg=key)
    again = bnb.QuantState.from_dict(
        {key.removeprefix("w.weight."): torch.tensor(x) for key, x in ours.items() if key != "w.weight"}, "cpu"
    )
    assert again == state
    np.testing.assert_array_equal(bnb.dequantize_4bit(torch.tensor(ours["w.weight"]), again).numpy(), decoded)


@parity
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_row_31_a_nested_offset_in_half_precision_is_that_of_bitsandbytes(rng, bnb, kind):
    import torch

    w = torch.tensor(weight(rng, (12, 128)))
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
    state.offset = state.offset.to(getattr(torch, kind))
    q = from_bitsandbytes(tensors(packed, state), "w.weight")
    assert q.offset.dtype == jnp.float32 and float(q.offset) == float(state.offset)
    np.testing.assert_array_equal(ops.dequantize_nf4(q), bnb.dequantize_4bit(packed, state).numpy())


# ------------------------------------------------------------------------------------------------ without it


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16, jnp.float32, float])
def test_row_31_a_nested_offset_of_any_floating_type_is_accepted(rng, kind):
    q = ops.quantize_nf4(weight(rng, (5, 33)))
    written = to_bitsandbytes(q, "w")
    state = json.loads(written.pop("w.quant_state.bitsandbytes__nf4").tobytes())
    facts = {f"w.{key}": value for key, value in state.items()}
    offset = float(q.offset) if kind is float else jnp.asarray(q.offset, kind)
    back = from_bitsandbytes({**written, **facts, "w.nested_offset": offset}, "w")
    assert back.offset.dtype == jnp.float32 and float(back.offset) == float(offset)
    np.testing.assert_array_equal(back.absmax_codes, q.absmax_codes)


def test_foreign_tables_and_blocks_of_the_maxima_keep_their_values(rng):
    q = ops.quantize_nf4(weight(rng, (70, 61)), block_size=32)
    written = to_bitsandbytes(q, "w")
    table = np.linspace(-1, 1, 256).astype(np.float32)
    back = from_bitsandbytes({**written, "w.nested_quant_map": table}, "w")
    second = np.asarray(q.nested_absmax)[0]
    assert not back.double_quant
    np.testing.assert_array_equal(back.absmax, table[q.absmax_codes] * second + np.asarray(q.offset))


@pytest.mark.tiny
def test_tensors_that_bitsandbytes_would_not_write(rng):
    q = ops.quantize_nf4(weight(rng, (5, 33)))
    written = to_bitsandbytes(q, "w")
    key = "w.quant_state.bitsandbytes__nf4"

    def with_state(**changes):
        state = {**json.loads(written[key].tobytes()), **changes}
        return {**written, key: np.frombuffer(json.dumps(state).encode(), np.uint8)}

    fp4 = {("w.quant_state.bitsandbytes__fp4" if k == key else k): x for k, x in written.items()}
    for mapping, error, fragment in (
        ({k: x for k, x in written.items() if k != "w.absmax"}, BundleError, r"w\.absmax must be there"),
        ({k: x for k, x in written.items() if k != key}, BundleError, "quant_state.bitsandbytes__nf4 must be there"),
        ({**written, key: np.frombuffer(b"{", np.uint8)}, BundleError, "must hold JSON"),
        ({**written, key: np.frombuffer(b"[]", np.uint8)}, BundleError, "a JSON object"),
        (fp4, UnsupportedError, "the type must be nf4; got fp4"),
        (with_state(quant_type="fp4"), UnsupportedError, "the type must be nf4"),
        (with_state(nested_dtype="bfloat16"), UnsupportedError, "nested maxima must be float32"),
        (with_state(shape=[5, 35]), ShapeError, "bytes of codes"),
        (with_state(shape=[165]), ShapeError, "must be \\[out, in\\]"),
        (with_state(blocksize=48), ConfigError, "power of two"),
        ({**written, "w.quant_map": np.zeros(16, np.float32)}, UnsupportedError, "16 numbers"),
        ({**written, "w.nested_absmax": np.zeros(3, np.float32)}, ShapeError, "nested_absmax 1"),
        ({**written, "w": np.zeros(3, np.uint8)}, ShapeError, "got 3"),
    ):
        with pytest.raises(error, match=fragment):
            from_bitsandbytes(mapping, "w")
    with pytest.raises(ConfigError, match="dtype must be one of"):
        to_bitsandbytes(q, "w", "float64")


# ------------------------------------------------------------------------------------------------ low nibble first


def test_the_fixtures_of_the_reference_layout():
    q = from_reference(bytes.fromhex("1032547698badcfe"), (1, 16), block_size=32, scales=np.float32([1]))
    np.testing.assert_array_equal(ops.dequantize_nf4(q), CODES[None])
    np.testing.assert_array_equal(q.codes, ops.quantize_nf4(CODES[None], double_quant=False).codes)
    zeros = from_reference(b"\x77" * 16 + b"\x07", (3, 11), block_size=32, scales=np.zeros(2, np.float32))
    assert not np.asarray(ops.dequantize_nf4(zeros)).any()
    assert bytes(np.asarray(zeros.codes)) == b"\x77" * 17
    # 33 blocks with scales 0, 1, …, 32, each entry of code 15.
    scales = np.arange(33)
    scale_codes = np.clip(128 + np.floor(127 * (scales - 16) / 16 + 0.5), 1, 255).astype(np.uint8)
    assert scale_codes[[0, 16, 32]].tolist() == [1, 128, 255]
    q = from_reference(
        np.full(528, 0xFF, np.uint8),
        (33, 32),
        block_size=32,
        scale_codes=scale_codes,
        group_scales=np.float32([16, 16]),
        offset=16.0,
        group_size=32,
    )
    assert q.absmax[jnp.asarray([0, 16, 32])].tolist() == [0.0, 16.0, 32.0]
    np.testing.assert_allclose(np.asarray(q.absmax), scales, atol=0.07)
    np.testing.assert_array_equal(ops.dequantize_nf4(q)[:, 0], q.absmax)


@pytest.mark.parametrize("double_quant", [True, False])
def test_weights_that_the_reference_packed_decode_to_what_it_decodes(double_quant):
    """Its own packed state, and the float32 weights that it makes of it."""
    bindings = pytest.importorskip("riftco_transformer.native.bindings")
    model = bindings.DecoderOnlyTransformer(bindings.TransformerConfig(33, 4, 33, 3, 1, 17))
    model.quantize_nf4(32, double_quantization=double_quant, scale_block_size=32)
    state = model.packed_quantized_state
    model.attach_lora(bindings.LoraConfig(rank=1, alpha=1.0))  # it starts at 0, so merging it only unpacks
    model.merge_lora()
    parameters = model.parameters()
    flat, dense = np.float32(parameters.flat_values()), {}
    for name, shape in zip(parameters.names, parameters.shapes, strict=True):
        dense[name], flat = flat[: int(np.prod(shape))].reshape(shape), flat[int(np.prod(shape)) :]
    model.close()
    linear = [w for name, w in dense.items() if w.ndim == 2 and "embedding" not in name]
    packed = list(_packed_weights(state))
    assert len(packed) == len(linear) == 7
    for arguments, expected in zip(packed, linear, strict=True):
        np.testing.assert_array_equal(ops.dequantize_nf4(from_reference(**arguments)), expected)


def _packed_weights(state):
    """The arguments of `from_reference` for each weight of a packed state: magic, a count, then records."""
    (count,), at = struct.unpack_from("<Q", state, 8), 16
    for _ in range(count):
        rank, block_size, size, scales, codes, groups, group_size = struct.unpack_from("<7Q", state, at)
        offset, _ = struct.unpack_from("<fI", state, at + 56)
        shape = struct.unpack_from(f"<{rank}Q", state, at + 64)
        at += 64 + 8 * rank
        arrays = []
        for dtype, n in ((np.uint8, size), (np.float32, scales), (np.uint8, codes), (np.float32, groups)):
            arrays.append(np.frombuffer(state, dtype, n, at))
            at += arrays[-1].nbytes
        first = {"codes": arrays[0], "shape": shape, "block_size": block_size}
        second = {"scale_codes": arrays[2], "group_scales": arrays[3], "offset": offset, "group_size": group_size}
        yield {**first, **(second if codes else {"scales": arrays[1]})}
    assert at == len(state)


@pytest.mark.tiny
def test_what_the_reference_layout_does_not_allow():
    codes, scales = np.full(17, 0x77, np.uint8), np.ones(2, np.float32)
    codes[-1] = 7
    call = {"codes": codes, "shape": (3, 11), "block_size": 32, "scales": scales}
    second = {
        "scales": None,
        "scale_codes": np.full(2, 128, np.uint8),
        "group_scales": np.ones(1, np.float32),
        "offset": 1.0,
    }
    from_reference(**call)
    from_reference(**{**call, **second})
    spare, other = codes.copy(), codes.copy()
    spare[-1], other[0] = 0x17, 0x78
    for changes, error, fragment in (
        ({"codes": spare}, DomainError, "spare nibble"),
        ({"codes": other, "scales": np.float32([0, 1])}, DomainError, "block of scale 0"),
        ({"codes": codes[:-1]}, ShapeError, "17 entries"),
        ({"codes": codes.astype(np.int32)}, DTypeError, "must be uint8"),
        ({"scales": np.float32([1, -1])}, DomainError, "not negative"),
        ({"scales": np.float32([1, np.inf])}, DomainError, "finite"),
        ({"scales": np.ones(3, np.float32)}, ShapeError, "2 entries"),
        ({"shape": ()}, ShapeError, "must be \\[out, in\\]"),
        ({"shape": (33, 0)}, ShapeError, "not empty"),
        ({"block_size": 33}, ConfigError, "power of two"),
        ({"scales": None}, ConfigError, "either scales"),
        ({**second, "scales": scales}, ConfigError, "either scales"),
        ({**second, "scale_codes": np.zeros(2, np.uint8)}, DomainError, "1 to 255"),
        ({**second, "offset": float("nan")}, DomainError, "finite"),
        ({**second, "group_size": 100}, ConfigError, "group_size"),
    ):
        with pytest.raises(error, match=fragment):
            from_reference(**{**call, **changes})

"""safetensors: exact reading beside the library, and every way in which a file or an index can lie, each refused."""

import json
import resource
import struct
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from riftco.bundle import safetensors_reader
from riftco.bundle.safetensors_reader import DTYPES, SafetensorsFile
from riftco.bundle.safetensors_writer import Ready, write_file
from riftco.bundle.weights import INDEX, SINGLE, open_weights, write_weights
from riftco.errors import BundleError

F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def lay(header, data=b"", *, length=None, pad=b"") -> bytes:
    """A file of a header (JSON text or values), written without any check."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + pad
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "file.safetensors"):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


@pytest.mark.tiny
def test_every_dtype_is_read_as_the_library_reads_it(tmp_path, rng):
    tensors = {}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        values = rng.integers(0, 2 if name == "BOOL" else 100, size=(2, number))
        tensors[f"{name}/ü 🙂"] = values.astype(dtype)
    tensors |= {"scalar": np.float32(3.5)[None].reshape(()), "empty": np.zeros((0, 4), np.float16)}
    save_file(tensors, tmp_path / "file.safetensors", metadata={"format": "pt", "ß": "x"})
    with (
        SafetensorsFile(tmp_path / "file.safetensors") as ours,
        safe_open(tmp_path / "file.safetensors", "np") as theirs,
    ):
        assert set(ours) == set(tensors) == set(theirs.keys()) and len(ours) == len(tensors)
        assert ours.metadata == theirs.metadata() == {"format": "pt", "ß": "x"}
        for name in tensors:
            assert ours[name].dtype == tensors[name].dtype == ours.dtype_of(name)
            assert ours.shape_of(name) == ours[name].shape
            np.testing.assert_array_equal(ours[name], tensors[name], strict=True)
            np.testing.assert_array_equal(ours[name], theirs.get_tensor(name), strict=True)


def test_no_padding_and_much_padding_are_both_read(write):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for pad in (b"", b" " * 1000):
        with SafetensorsFile(write(lay({"a": F32}, values.tobytes(), pad=pad))) as file:
            np.testing.assert_array_equal(file["a"], values)
            assert file.metadata == {} and "a" in file and "b" not in file


MALFORMED = {
    "empty file": (b"", "at least 8 bytes; got 0"),
    "seven bytes": (b"\0" * 7, "at least 8 bytes; got 7"),
    "header length zero": (struct.pack("<Q", 0), "header length must be 2"),
    "header longer than the bound": (struct.pack("<Q", 1 << 40) + b"{}", "header length must be 2 .. 16777216"),
    "header length of all ones": (b"\xff" * 8 + b"{}", "header length must be 2"),
    "header longer than the file": (lay({}, length=999), "header length must fit the file; got 999"),
    "no object": (lay(b"[]"), "must begin with '{'; got b'\\['"),
    "space before the header": (lay(b" {}"), "must begin with '{'"),
    "a pickle": (struct.pack("<Q", 4) + b"\x80\x04N.", "it is no safetensors file"),
    "padding that is no space": (lay({}, pad=b"\0\0"), "must end with '}'"),
    "newline at the end": (lay({}, pad=b"\n"), "must end with '}'"),
    "not UTF-8": (lay(b'{"\xff\xfe": 1}'), "must be UTF-8; byte 2 is not"),
    "not JSON": (lay(b"{'a': 1}"), "header must be JSON"),
    "cut JSON": (lay(b'{"a": {"dtype": "F32"}'), "header must be JSON"),
    "NaN": (lay(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 0]}}'), "NaN is not JSON"),
    "duplicate tensor": (lay(b'{"a": %b, "a": %b}' % ((json.dumps(ONE).encode(),) * 2), b"\0" * 4), "'a' stands twice"),
    "duplicate field": (
        lay(b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [1], "data_offsets": [0, 4]}}'), "'dtype' stands twice",
    ),
    "deep nesting": (lay(b'{"a":' * 60_000 + b"1" + b"}" * 60_000), "must be JSON|must be dtype"),
    "too many objects": (lay(b'{"a":[' + b"{}," * 300_000 + b"{}]}"), "at most 65536 tensors; it holds more objects"),
    "metadata of numbers": (lay({"__metadata__": {"format": 1}}), "__metadata__ must map strings to strings"),
    "metadata no object": (lay({"__metadata__": []}), "__metadata__ must map strings"),
    "metadata null": (lay({"__metadata__": None}), "__metadata__ must map strings"),
    "empty name": (lay({"": ONE}, b"\0" * 4), "tensor '': a name must be text"),
    "lone surrogate in a name": (lay({"\ud800": ONE}, b"\0" * 4), "a name must be text"),
    "entry no object": (lay({"a": [1]}), "tensor 'a': the fields must be dtype, shape and data_offsets; got list"),
    "missing field": (lay({"a": {"dtype": "F32", "shape": []}}), "fields must be .*got \\['dtype', 'shape'\\]"),
    "additional field": (lay({"a": {**ONE, "x": 1}}, b"\0" * 4), "the fields must be"),
    "unknown dtype": (lay({"a": {**ONE, "dtype": "F31"}}, b"\0" * 4), "tensor 'a': dtype must be .*got 'F31'"),
    "dtype in lower case": (lay({"a": {**ONE, "dtype": "f32"}}, b"\0" * 4), "dtype must be one of"),
    "8-bit float": (lay({"a": {**ONE, "dtype": "F8_E4M3", "shape": [4]}}, b"\0" * 4), "got 'F8_E4M3'"),
    "dtype no text": (lay({"a": {**ONE, "dtype": ["F32"]}}, b"\0" * 4), "dtype must be one of"),
    "negative side": (lay({"a": {**ONE, "shape": [-1]}}, b"\0" * 4), "tensor 'a': shape must be"),
    "two negative sides": (lay({"a": {**ONE, "shape": [-1, -1]}}, b"\0" * 4), "shape must be"),
    "fractional side": (lay({"a": {**ONE, "shape": [1.0]}}, b"\0" * 4), "shape must be"),
    "boolean side": (lay({"a": {**ONE, "shape": [True]}}, b"\0" * 4), "shape must be"),
    "shape no list": (lay({"a": {**ONE, "shape": 1}}, b"\0" * 4), "shape must be"),
    "rank of a thousand": (lay({"a": {**ONE, "shape": [1] * 1000}}, b"\0" * 4), "shape must be at most 8"),
    "huge side": (lay({"a": {**ONE, "shape": [1 << 62]}}, b"\0" * 4), "needs 18446744073709551616 bytes"),
    "side beyond 64 bits": (lay({"a": {**ONE, "shape": [1 << 70]}}, b"\0" * 4), "shape must be"),
    "product that wraps to four bytes": (
        lay({"a": {**ONE, "shape": [1 << 32, 1 << 32, 1]}}, b"\0" * 4), "needs 73786976294838206464 bytes",
    ),
    "offsets backwards": (lay({"a": {**ONE, "data_offsets": [4, 0]}}, b"\0" * 4), "data_offsets must ascend"),
    "negative offset": (lay({"a": {**ONE, "data_offsets": [-4, 0]}}, b"\0" * 4), "must be two integers of at least 0"),
    "fractional offset": (lay({"a": {**ONE, "data_offsets": [0, 4.0]}}, b"\0" * 4), "must be two integers"),
    "three offsets": (lay({"a": {**ONE, "data_offsets": [0, 4, 8]}}, b"\0" * 8), "must be two integers"),
    "offsets past the end": (lay({"a": {**ONE, "data_offsets": [0, 4]}}, b"\0" * 3), "within the 3 bytes.*truncated"),
    "huge offsets": (lay({"a": {**ONE, "data_offsets": [1 << 62, (1 << 62) + 4]}}, b"\0" * 4), "must lie within the 4"),
    "fewer bytes than the shape": (lay({"a": {**F32, "data_offsets": [0, 20]}}, b"\0" * 20), "needs 24 bytes.*got 20"),
    "more bytes than the shape": (lay({"a": {**ONE, "data_offsets": [0, 8]}}, b"\0" * 8), "needs 4 bytes.*got 8"),
    "hole at the start": (lay({"a": {**ONE, "data_offsets": [4, 8]}}, b"\0" * 8), "'a': .* must leave no hole"),
    "hole between": (
        lay({"a": ONE, "b": {**ONE, "data_offsets": [8, 12]}}, b"\0" * 12), "'b': .*no hole.*begins at 8, not at 4",
    ),
    "bytes at the end": (lay({"a": ONE}, b"\0" * 9), "5 bytes after the last one belong to none"),
    "bytes without tensors": (lay({}, b"\0"), "1 bytes after the last one"),
    "overlap": (
        lay({"a": F32, "b": {**F32, "data_offsets": [12, 36]}}, b"\0" * 36), "'b': .*must not overlap.*begins at 12",
    ),
    "same place twice": (lay({"a": ONE, "b": ONE}, b"\0" * 4), "'b': data_offsets must not overlap"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_by_file_and_field(name, write):
    content, message = MALFORMED[name]
    path = write(content)
    with pytest.raises(BundleError, match=message) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(str(path))


def test_a_path_that_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(BundleError, match="a safetensors file is required"):
            SafetensorsFile(path)


def test_a_file_that_shrinks_while_it_is_read(write):
    size = 1 << 20  # more than what is read ahead
    path = write(lay({"a": {**ONE, "shape": [size // 4], "data_offsets": [0, size]}}, b"\0" * size))
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(BundleError, match="tensor 'a': the file ended while it was read"):
            file["a"]


def test_what_the_library_refuses_is_refused(write, monkeypatch):
    """Its own bound on the header is larger, so a case is made by widening what is checked here."""
    monkeypatch.setattr(safetensors_reader, "_in_order", lambda entries, size, path: entries)
    with pytest.raises(BundleError, match="the safetensors library refuses it"):
        SafetensorsFile(write(lay({"a": ONE}, b"\0" * 9)))


def test_hostile_headers_cost_little_memory(write):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in (
        lay({"a": {**ONE, "shape": [1 << 62]}}, b"\0" * 4),
        struct.pack("<Q", 1 << 62) + b"{}",
        lay(b'{"a":[' + b"{}," * 3_000_000 + b"{}]}"),
    ):
        with pytest.raises(BundleError):
            SafetensorsFile(write(content))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_one_changed_byte_is_refused_or_leaves_a_whole_file(tmp_path_factory, data):
    """Whatever a flipped header becomes, what is read fills the file and fits its own claims."""
    original = save({"first": np.arange(6, dtype=np.float32).reshape(2, 3), "second": np.ones((3,), jnp.bfloat16)})
    size = 8 + int.from_bytes(original[:8], "little")
    place, value = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(original[:place] + bytes([value]) + original[place + 1 :])
    try:
        file = SafetensorsFile(path)
    except BundleError as error:
        assert str(path) in str(error)
        return
    with file:
        assert sum(file[name].nbytes for name in file) == len(original) - size


# ------------------------------------------------------------------------------------------------ directories


@pytest.fixture
def shards(tmp_path):
    """A directory of two shards and its index; `index(...)` rewrites the latter."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        save_file({f"t{number}": np.full((2,), number, np.float32)}, tmp_path / name)

    def index(content):
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / INDEX).write_bytes(text)
        return tmp_path

    index({"metadata": {"total_size": 16}, "weight_map": {"t0": names[0], "t1": names[1]}})
    index.names = names
    return index


def read_all(directory):
    with open_weights(directory) as tensors:
        return {name: tensors[name].tolist() for name in tensors}


def test_shards_are_one_mapping(shards):
    place = shards({"weight_map": {"t0": shards.names[0], "t1": shards.names[1]}})
    assert read_all(place) == {"t0": [0, 0], "t1": [1, 1]}
    with open_weights(place) as tensors:
        assert tensors.shape_of("t1") == (2,) and tensors.dtype_of("t1") == np.float32 and len(tensors) == 2
        assert "t1" in tensors and "t2" not in tensors


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LIES = {
    "not JSON": (b"{", "must be JSON"),
    "duplicate tensor": (b'{"weight_map": {"t0": "x", "t0": "y"}}', "'t0' stands twice"),
    "no object": ([], "weight_map must map"),
    "no map": ({"metadata": {}}, "weight_map must map"),
    "empty map": ({"weight_map": {}}, "weight_map must map"),
    "map to numbers": ({"weight_map": {"t0": 1}}, "weight_map must map"),
    "missing shard": ({"weight_map": {"t0": A, "t1": "model-3.safetensors"}}, "names 'model-3.safetensors'"),
    "tensor in the wrong shard": ({"weight_map": {"t0": B, "t1": A}}, "must list t0 in model-00001"),
    "both in one shard": ({"weight_map": {"t0": A, "t1": A}}, "it lists t1, which no shard holds"),
    "tensor that is not listed": ({"weight_map": {"t0": A}}, None),
    "tensor that no shard holds": ({"weight_map": {"t0": A, "t1": B, "t2": B}}, "it lists t2, which no shard holds"),
    "shard holds more": ({"weight_map": {"x": A, "t1": B}}, "must list t0 in model-00001"),
    "parent directory": ({"weight_map": {"t0": "../x.safetensors"}}, "got '../x.safetensors'"),
    "absolute path": ({"weight_map": {"t0": "/etc/x.safetensors"}}, "got '/etc/x.safetensors'"),
    "drive": ({"weight_map": {"t0": "C:x.safetensors"}}, "got 'C:x.safetensors'"),
    "backslash": ({"weight_map": {"t0": "..\\x.safetensors"}}, "which is not such a name"),
    "dots": ({"weight_map": {"t0": ".."}}, "got '..'"),
    "empty name": ({"weight_map": {"t0": ""}}, "got ''"),
    "NUL": ({"weight_map": {"t0": "a\0.safetensors"}}, "which is not such a name"),
    "a pickle": ({"weight_map": {"t0": "pytorch_model.bin"}}, "must name safetensors files"),
    "too long": (b" " * (safetensors_reader.MAX_HEADER + 1), "at most 16777216 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies_is_refused_by_name(name, shards):
    content, message = LIES[name]
    place = shards(content)
    if message is None:  # a shard that the index does not name is not opened
        assert read_all(place) == {"t0": [0, 0]}
        return
    with pytest.raises(BundleError, match=message) as caught:
        read_all(place)
    assert INDEX in str(caught.value)


def test_a_tensor_in_two_shards_and_two_sets_of_weights(shards):
    names = {"t0": A, "t1": B}
    place = shards({"weight_map": names})
    save_file({"t0": np.zeros((2,), np.float32), "t1": np.zeros((2,), np.float32)}, place / B)
    with pytest.raises(BundleError, match=f"{B}: the tensor t0 stands in two shards, here and in {A}"):
        read_all(place)
    save_file({"t0": np.zeros((2,), np.float32)}, place / SINGLE)
    with pytest.raises(BundleError, match="both are there"):
        read_all(place)
    (place / INDEX).unlink()
    assert set(read_all(place)) == {"t0"}


def test_pickles_are_not_opened(tmp_path):
    with pytest.raises(BundleError, match="neither is there; nothing to load"):
        read_all(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(BundleError, match="pickles, which run code"):
        read_all(tmp_path)


# ------------------------------------------------------------------------------------------------ writing


def test_what_is_written_is_what_the_library_writes(tmp_path, rng):
    tensors = {f"{kind}.ü\n": rng.integers(0, 2, size=(2, 3)).astype(dtype) for kind, dtype in DTYPES.items()}
    tensors |= {"z": np.ones((5,), np.float32), "a": np.zeros((0, 2), np.float32), "Z": np.float32(2)[None].reshape(())}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_file(tmp_path / "ours", Ready(tensors), tensors, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    save_file({}, tmp_path / "theirs")
    write_file(tmp_path / "ours", Ready({}), (), {})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(BundleError, match=r"tensor 'c': dtype must be one of .*got complex64"):
        write_file(tmp_path / "ours", Ready({"c": np.ones(1, np.complex64)}), ["c"], {})


def test_one_tensor_at_a_time_is_asked_for(tmp_path):
    class Made(Ready):
        alive = 0
        most = 0

        def __getitem__(self, name):
            array = self.arrays[name].copy()
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(array, self.let_go)
            return array

        def let_go(self):
            self.alive -= 1

    made = Made({f"t{number}": np.full((100,), number, np.float32) for number in range(6)})
    write_weights(tmp_path, made, 1000)
    assert made.most <= 2 and made.alive == 0
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    assert read_all(tmp_path) == {name: array.tolist() for name, array in made.arrays.items()}

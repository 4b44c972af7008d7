"""GGUF files that mean harm: each is refused with one sentence that names the field, quickly and in little memory."""

import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from riftco.errors import BundleError, RiftcoError
from riftco.interchange import gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
BIG = 2**63


def text(data):
    data = data.encode() if isinstance(data, str) else data
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def description(name="a", shape=(4,), kind=0, offset=0, rank=None):
    rank = len(shape) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", rank, *shape, kind, offset)


def container(entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, tensor_count=None, entry_count=None):
    """A file, right unless it is asked to be wrong."""
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + data


def array(kind, count, values=b""):
    return struct.pack("<IQ", kind, count) + values


ONE, ONE_STRING = description(), array(STRING, 1, bytes(8))
HOSTILE = {
    "empty": (b"", "magic must be whole"),
    "magic": (container(magic=b"GGML"), "begin with GGUF"),
    "version 1": (container(version=1), "version must be 2 or 3"),
    "version of the future": (container(version=4), "version must be 2 or 3"),
    "big endian": (container(version=3 << 24), "big endian"),
    "tensor count": (container(tensor_count=BIG), "tensor_count must be at most"),
    "tensor count beyond the file": (container(tensor_count=60000), "tensor_count must be whole"),
    "entry count": (container(entry_count=2**64 - 1), "metadata_kv_count must be at most"),
    "entry count beyond the file": (container(entry_count=60000), "metadata_kv_count must be whole"),
    "key length": (container([struct.pack("<QQ", BIG, 0)], entry_count=1), "length of metadata key 0 must be at most"),
    "empty key": (container([entry("", U32, b"\0" * 4)]), "metadata key 0 must be a printable name"),
    "key with a control": (container([entry("a\n\x1b[31m", U32, b"\0" * 4)]), "metadata key 0 must be a printable"),
    "key that is not UTF-8": (container([entry(b"\xff\xfe", U32, b"\0" * 4)]), "metadata key 0 must be UTF-8"),
    "key twice": (container([entry("a.b", BOOL, b"\1")] * 2), "a.b stands twice"),
    "value type": (container([entry("a.b", 13, b"")]), "a.b: its type must be one of 0 to 12; got 13"),
    "boolean": (container([entry("a.b", BOOL, b"\2")]), "a.b: a boolean must be 0 or 1; got 2"),
    "string length": (container([entry("a.b", STRING, struct.pack("<Q", BIG))]), "length of a.b must be at most"),
    "string beyond the file": (container([entry("a.b", STRING, struct.pack("<Q", 2**25))]), "a.b must be whole"),
    "string that is not UTF-8": (container([entry("a.b", STRING, text(b"ab\xc3"))]), "a.b must be UTF-8"),
    "array type": (container([entry("a.b", ARRAY, array(77, 1, b"\0" * 8))]), "a.b: its elements must be"),
    "nested arrays": (container([entry("a.b", ARRAY, array(ARRAY, 2) * 500)]), "an array of arrays"),
    "array length": (container([entry("a.b", ARRAY, array(U64, BIG))]), "length of a.b must be at most"),
    "array beyond the file": (container([entry("a.b", ARRAY, array(U64, 2**20))]), "length of a.b must be whole"),
    "strings beyond the file": (container([entry("a.b", ARRAY, array(STRING, 2**20))]), "length of a.b must be whole"),
    "too many strings": (
        container([entry("a", ARRAY, ONE_STRING), entry("b", ARRAY, array(STRING, 2**21, bytes(2**24)))]),
        "b: all arrays together may hold",
    ),
    "element beyond the file": (
        container([entry("a.b", ARRAY, array(STRING, 2, text("x") + struct.pack("<Q", BIG)))]),
        r"a.b\[1\] must be whole",
    ),
    "element that is not UTF-8": (container([entry("a.b", ARRAY, array(STRING, 1, text(b"\xff")))]), "must be UTF-8"),
    "alignment 0": (container([entry("general.alignment", U32, struct.pack("<I", 0))]), "general.alignment must be"),
    "alignment 24": (container([entry("general.alignment", U32, struct.pack("<I", 24))]), "general.alignment must be"),
    "alignment 2**31": (container([entry("general.alignment", U32, struct.pack("<I", 2**31))]), "general.alignment"),
    "alignment of text": (container([entry("general.alignment", STRING, text("32"))]), "general.alignment must be"),
    "empty tensor name": (container((), [description("")]), "name of tensor 0 must be printable"),
    "long tensor name": (container((), [description("a" * 65)], b"\0" * 32), "name of tensor 0 must be at most 64"),
    "tensor name that is not UTF-8": (container((), [description(b"\x80")]), "name of tensor 0 must be UTF-8"),
    "tensor twice": (container((), [ONE, ONE], b"\0" * 32), "a stands twice"),
    "rank 0": (container((), [description(shape=())]), "tensor a: its rank must be 1 to 4"),
    "rank 2**32": (container((), [description(rank=2**32 - 1)]), "tensor a: its rank must be 1 to 4"),
    "dimension 0": (container((), [description(shape=(4, 0))]), "tensor a: every dimension must be at least 1"),
    "huge dimensions": (container((), [description(shape=(2**62,) * 4)]), "tensor a: it must lie in the file"),
    "dimensions that wrap to 0": (container((), [description(shape=(2**32, 2**32))]), "tensor a: it must lie in"),
    "tensor type": (container((), [description(kind=99)]), "tensor a: its type must be one of .* got 99"),
    "tensor type of integers": (container((), [description(kind=24)]), "tensor a: its type .* got I8"),
    "rows of part blocks": (container((), [description(shape=(33,), kind=2)]), "tensor a: rows of Q4_0 must be whole"),
    "offset between alignments": (container((), [description(offset=4)], b"\0" * 64), "offset must be a multiple"),
    "offset beyond the file": (container((), [description(offset=BIG)], b"\0" * 64), "tensor a: it must lie in"),
    "overlap": (
        container((), [description("a", (16,)), description("b", (4,), offset=32)], b"\0" * 96),
        "a and b do",
    ),
    "same place": (container((), [description("a"), description("b")], b"\0" * 96), "must not overlap"),
    "truncated data": (container((), [ONE], b"\0" * 8), "tensor a: it must lie in the file; .* truncated"),
    "truncated description": (container((), [ONE])[:40], "must be whole"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_and_the_field_is_named(tmp_path, kind):
    data, named = HOSTILE[kind]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(BundleError, match=named) as error:
        gguf.read_header(tmp_path / "m.gguf")
    assert str(error.value).startswith(str(tmp_path / "m.gguf")) and "\n" not in str(error.value)
    with pytest.raises(RiftcoError):
        gguf.load(tmp_path / "m.gguf")
    with pytest.raises(RiftcoError):
        gguf.load_tokenizer(tmp_path / "m.gguf")


def test_the_builder_can_build_what_is_accepted(tmp_path):
    entries = [entry("a.b", ARRAY, array(STRING, 2, text("x") + text("é"))), entry("c", F32, struct.pack("<f", 0.5))]
    tensors = [description("a", (4, 2)), description("b", (32,), kind=8, offset=32)]
    (tmp_path / "m.gguf").write_bytes(container(entries, tensors, b"\0" * 66))
    header = gguf.read_header(tmp_path / "m.gguf")
    assert header.metadata == {"a.b": ["x", "é"], "c": 0.5}
    assert [(info.name, info.kind.name, info.shape) for info in header.tensors.values()] == [
        ("a", "F32", (2, 4)), ("b", "Q8_0", (32,))
    ]  # fmt: skip
    with pytest.raises(BundleError, match="readable"):
        gguf.read_header(tmp_path)
    with pytest.raises(BundleError, match="No such file"):
        gguf.read_header(tmp_path / "none.gguf")


def test_every_prefix_of_a_good_file_is_refused(tmp_path):
    entries = [
        entry("general.architecture", STRING, text("llama")),
        entry("a.b", ARRAY, array(STRING, 2, text("x") * 2)),
    ]
    whole = container(entries, [description("a", (8,))], b"\0" * 32)
    for length in range(len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(BundleError):
            gguf.read_header(tmp_path / "m.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_memory_stays_bounded(tmp_path):
    """Every hostile file again, in a process that may take 192 MiB more than it has, and in a few seconds."""
    for index, (data, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{index}.gguf").write_bytes(data)
    program = """
        import resource, sys, time
        from pathlib import Path
        from riftco.errors import BundleError
        from riftco.interchange import gguf
        import gguf as _
        size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
        limit = (size << 10) + (192 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            bytearray(256 << 20)
            sys.exit("the limit does not hold")
        except MemoryError:
            pass
        started, refused = time.monotonic(), 0
        for path in Path(sys.argv[1]).glob("*.gguf"):
            try:
                gguf.load(path)
            except BundleError:
                refused += 1
        print(refused, time.monotonic() - started)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    refused, seconds = done.stdout.split()
    assert int(refused) == len(HOSTILE) and float(seconds) < 30


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"riftco.config": '{"layers": 1'}, "riftco.config: it must be JSON"),
        ({"riftco.config": "[" * 100_000}, "riftco.config: it must be JSON"),
        ({"riftco.config": '{"a":1,"a":2}'}, "riftco.config: it must be JSON; the key 'a' stands twice"),
        ({"riftco.config": "[]"}, "riftco.config must be a configuration"),
        ({"riftco.config": '{"vocab_size":"x"}'}, "riftco.config must be a configuration"),
        ({}, "riftco.config must be given as text"),
        (
            {"riftco.config": '{"vocab_size":9,"context":9,"width":8,"heads":1,"layers":4000000000,"hidden":9}'},
            "riftco.config must have at most 1 layers",
        ),
        (
            {"riftco.config": '{"vocab_size":9,"context":9,"width":8,"heads":1,"layers":1,"hidden":9}'},
            "riftco.vocab_size must be 9",
        ),
    ],
)
def test_what_riftco_itself_adds_is_not_trusted_either(tmp_path, keys, named):
    entries = [entry(key, STRING, text(value)) for key, value in {"general.architecture": "riftco", **keys}.items()]
    (tmp_path / "m.gguf").write_bytes(container(entries, [ONE], b"\0" * 32))
    with pytest.raises(BundleError, match=named):
        gguf.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "state", ["{", "[]", '{"kind":"bpe"}', '{"kind":"byte","format":1,"byte_values":[1,1]}', "[" * 9999]
)
def test_a_damaged_tokenizer_state_is_a_typed_error(tmp_path, state):
    (tmp_path / "m.gguf").write_bytes(container([entry("riftco.tokenizer", STRING, text(state))]))
    with pytest.raises(BundleError, match=r"riftco\.tokenizer"):
        gguf.load_tokenizer(tmp_path / "m.gguf")

"""The bytes of a graph file as a list of parts, written and compared in order, a tensor at a time.

A model need not be held as one message: protobuf lets a long field be written as its length and then its bytes. The
parts stand in the order of the field numbers, so a file is what the library itself would write for the same model.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, StringStringEntryProto, TensorProto, helper

from riftco.interchange.onnx_graph.decoder import Decoder, decoder
from riftco.interchange.onnx_graph.sidecar import DATA_FILE, GRAPH_VERSION, OPSETS
from riftco.models.config import DecoderConfig

# Readers map the file into memory; a page is the unit.
_ALIGNMENT = 4096


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of bytes: known ones, or those of a float32 tensor.

    Attributes:
        what: for messages.
        size: in bytes.
        data: the bytes; None for a tensor's.
        tensor: the tensor's name, or "".
        shape: the tensor's.
        is_length: whether it is the length of all that follows.
    """

    what: str
    size: int
    data: bytes | None = None
    tensor: str = ""
    shape: tuple[int, ...] = ()
    is_length: bool = False


def _known(what: str, data: bytes) -> Part:
    return Part(what, len(data), data)


def _tensor(name: str, shape: tuple[int, ...]) -> Part:
    return Part(f"the tensor {name}", 4 * math.prod(shape), None, name, shape)


def _varint(value: int) -> bytes:
    groups = []
    while True:
        value, low = value >> 7, value & 0x7F
        groups.append(low | (0x80 if value else 0))
        if not value:
            return bytes(groups)


def _field(number: int, size: int) -> bytes:
    """The start of a field whose content follows: its key and length."""
    return _varint(number << 3 | 2) + _varint(size)


def weights_of(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every streamed tensor, in the order of the files: parameters, then rotary tables."""
    return decoder(config, "prefill", max(OPSETS)).graph.weights


def data_parts(config: DecoderConfig) -> list[Part]:
    """The file of external data: every tensor at a multiple of a page."""
    parts: list[Part] = []
    for name, shape in weights_of(config).items():
        parts.append(_tensor(name, shape))
        if padding := -parts[-1].size % _ALIGNMENT:
            parts.append(_known(f"the zeros after {name}", bytes(padding)))
    return parts


def graph_parts(
    config: DecoderConfig, kind: str, opset: int, *, external: bool, metadata: Mapping[str, str]
) -> list[Part]:
    """The file of one graph.

    Args:
        config: the decoder.
        kind: "prefill" or "decode".
        opset: 18 or 23.
        external: whether the tensors are in `DATA_FILE`.
        metadata: the model's properties besides those that follow from the other arguments.
    """
    made = decoder(config, kind, opset)
    body = [*_nodes(made), _known("the graph's name", GraphProto(name=f"riftco_decoder_{kind}").SerializeToString())]
    for name, array in made.graph.constants.items():
        constant = TensorProto(
            dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), name=name, raw_data=_raw(array)
        )
        body.append(_message(f"the constant {name}", 5, constant.SerializeToString()))
    body += _external(made, config) if external else _embedded(made)
    signature = GraphProto(input=made.inputs, output=made.outputs).SerializeToString()
    body.append(_known("the graph's inputs and outputs", signature))
    head = ModelProto(ir_version=OPSETS[opset], producer_name="riftco", producer_version=str(GRAPH_VERSION))
    size = sum(part.size for part in body)
    tail = ModelProto(opset_import=[helper.make_opsetid("", opset)])
    properties = {
        "riftco.graph": kind,
        "riftco.config": json.dumps(config.to_dict(), sort_keys=True),
        **{f"riftco.{key}": value for key, value in metadata.items()},
    }
    tail.metadata_props.extend(StringStringEntryProto(key=key, value=properties[key]) for key in sorted(properties))
    return [
        _known("the header", head.SerializeToString(deterministic=True)),
        dataclasses.replace(_known("the length of the graph", _field(7, size)), is_length=True),
        *body,
        _known("the opset or the metadata", tail.SerializeToString(deterministic=True)),
    ]


def _raw(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _message(what: str, number: int, data: bytes) -> Part:
    return _known(what, _field(number, len(data)) + data)


def _nodes(made: Decoder) -> Iterator[Part]:
    for node in made.graph.nodes:
        yield _message(f"the node {node.name} ({node.op_type})", 1, node.SerializeToString(deterministic=True))


def _embedded(made: Decoder) -> Iterator[Part]:
    for name, shape in made.graph.weights.items():
        tensor = _tensor(name, shape)
        head = TensorProto(dims=shape, data_type=TensorProto.FLOAT, name=name).SerializeToString()
        head += _field(9, tensor.size)
        yield _known(f"the head of the tensor {name}", _field(5, len(head) + tensor.size) + head)
        yield tensor


def _external(made: Decoder, config: DecoderConfig) -> Iterator[Part]:
    parts = data_parts(config)
    starts = itertools.accumulate((part.size for part in parts), initial=0)
    places = {part.tensor: (start, part.size) for part, start in zip(parts, starts, strict=False) if part.tensor}
    for name, shape in made.graph.weights.items():
        start, size = places[name]
        where = {"location": DATA_FILE, "offset": str(start), "length": str(size)}
        tensor = TensorProto(
            dims=shape,
            data_type=TensorProto.FLOAT,
            name=name,
            data_location=TensorProto.EXTERNAL,
            external_data=[StringStringEntryProto(key=key, value=value) for key, value in where.items()],
        )
        yield _message(f"the tensor {name}", 5, tensor.SerializeToString())

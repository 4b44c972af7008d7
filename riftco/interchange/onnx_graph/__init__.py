"""ONNX: a model as two inference graphs, and our own graphs read back exactly.

`export` writes `prefill.onnx` and `decode.onnx` with the tokenizer's files and `riftco_onnx.json` beside them; `load`
and `to_bundle` read such a directory, and nothing else: graphs that another program wrote or changed are refused.
"""

from riftco.interchange.onnx_graph.exporting import export
from riftco.interchange.onnx_graph.loading import Model, load, to_bundle
from riftco.interchange.onnx_graph.sidecar import SIDECAR

__all__ = ["SIDECAR", "Model", "export", "load", "to_bundle"]

"""A graph under construction: nodes, small constants, and the weights that it names without holding them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper


@dataclasses.dataclass
class Graph:
    """Nodes in order, and what they refer to; a value bears the name of the node that makes it.

    Attributes:
        opset: of the default domain.
        nodes: in topological order.
        constants: small arrays that the graph itself carries, by name.
        weights: {name: shape} of the float32 tensors that are streamed into the file.
    """

    opset: int
    nodes: list[NodeProto] = dataclasses.field(default_factory=list)
    constants: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def add(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """A node with one output; returns the output's name, which is the node's."""
        self.split(op, inputs, name, [name], **attributes)
        return name

    def split(self, op: str, inputs: Sequence[str], name: str, outputs: list[str], **attributes: Any) -> list[str]:
        """A node with several outputs; returns their names."""
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name, **attributes))
        return outputs

    def weight(self, name: str, shape: tuple[int, ...]) -> str:
        """A float32 tensor that is streamed into the file; naming it twice is naming one tensor."""
        self.weights[name] = shape
        return name

    def integers(self, *values: int) -> str:
        """An int64 vector."""
        return self._constant("integers." + "_".join(map(str, values)), np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """An int64 scalar."""
        return self._constant(f"integer.{value}", np.array(value, np.int64))

    def number(self, name: str, value: float) -> str:
        """A float32 scalar."""
        return self._constant(f"number.{name}", np.array(value, np.float32))

    def _constant(self, name: str, array: np.ndarray) -> str:
        self.constants[name] = array
        return name

    def linear(self, x: str, path: str, rows: int, columns: int, name: str, *, weight: str = "", bias: bool) -> str:
        """`x Wᵀ + b` of rows [N, columns]: one Gemm, which reads the weight [rows, columns] as it is stored."""
        inputs = [x, self.weight(weight or f"{path}.weight", (rows, columns))]
        if bias:
            inputs.append(self.weight(f"{path}.bias", (rows,)))
        return self.add("Gemm", inputs, name, transB=1)

    def layer_norm(self, x: str, path: str, width: int, epsilon: float, name: str) -> str:
        """LayerNorm over the last axis."""
        inputs = [x, self.weight(f"{path}.scale", (width,)), self.weight(f"{path}.bias", (width,))]
        return self.add("LayerNormalization", inputs, name, axis=-1, epsilon=epsilon)

    def rms_norm(self, x: str, path: str, width: int, epsilon: float, name: str) -> str:
        """RMSNorm over the last axis: an operator from opset 23 on."""
        scale = self.weight(f"{path}.scale", (width,))
        if self.opset >= 23:
            return self.add("RMSNormalization", [x, scale], name, axis=-1, epsilon=epsilon)
        square = self.add("Mul", [x, x], f"{name}.square")
        mean = self.add("ReduceMean", [square, self.integers(-1)], f"{name}.mean", keepdims=1)
        shifted = self.add("Add", [mean, self.number("norm_eps", epsilon)], f"{name}.shifted")
        root = self.add("Sqrt", [shifted], f"{name}.root")
        return self.add("Mul", [self.add("Div", [x, root], f"{name}.unit"), scale], name)

    def gelu(self, x: str, name: str, *, approximate: bool) -> str:
        """GELU, exact or by tanh: an operator from opset 20 on."""
        if self.opset >= 20:
            return self.add("Gelu", [x], name, approximate="tanh" if approximate else "none")
        if approximate:
            square = self.add("Mul", [x, x], f"{name}.square")
            slope = self.add("Mul", [square, self.number("gelu_cubic", 0.044715)], f"{name}.slope")
            slope = self.add("Add", [slope, self.number("one", 1.0)], f"{name}.slope_1")
            scaled = self.add("Mul", [x, self.number("root_2_over_pi", np.sqrt(2.0 / np.pi))], f"{name}.scaled")
            inner = self.add("Tanh", [self.add("Mul", [scaled, slope], f"{name}.inner")], f"{name}.tanh")
        else:
            scaled = self.add("Mul", [x, self.number("root_half", np.sqrt(0.5))], f"{name}.scaled")
            inner = self.add("Erf", [scaled], f"{name}.erf")
        lifted = self.add("Add", [inner, self.number("one", 1.0)], f"{name}.lifted")
        half = self.add("Mul", [x, self.number("half", 0.5)], f"{name}.half")
        return self.add("Mul", [half, lifted], name)

"""Differentiable operations: each a value, a forward and a backward rule, and a NumPy float64 twin in riftco.oracle.

They run on arrays and on boxes alike. Elementwise operations take equal shapes, or an array and a Python number;
broadcasting is asked for. On concrete arrays outside jit each checks its own domain (`riftco.errors.domain_checks`).
"""

from riftco.autodiff.api import stop_gradient
from riftco.ops.activation import dropout, gelu, relu, relu2, silu, swiglu
from riftco.ops.attend import attention, attention_weights
from riftco.ops.elementwise import (
    add,
    astype,
    div,
    erf,
    exp,
    log,
    maximum,
    minimum,
    mul,
    neg,
    pow,
    rsqrt,
    sigmoid,
    sqrt,
    sub,
    tanh,
    where,
)
from riftco.ops.index import take, take_along_axis
from riftco.ops.linalg import add_bias, einsum, linear, matmul
from riftco.ops.loss import cross_entropy, linear_cross_entropy
from riftco.ops.nf4 import NF4Array as NF4Array
from riftco.ops.nf4 import dequantize_nf4, nf4_linear, quantize_nf4
from riftco.ops.norm import layer_norm, rms_norm
from riftco.ops.paged import paged_attention
from riftco.ops.reduce import cumsum, log_softmax, logsumexp, max, mean, softmax, sum
from riftco.ops.rotary import rope
from riftco.ops.shape import broadcast_to, concatenate, dynamic_update_slice, reshape, slice, split, transpose

__all__ = [
    "add",
    "add_bias",
    "astype",
    "attention",
    "attention_weights",
    "broadcast_to",
    "concatenate",
    "cross_entropy",
    "cumsum",
    "dequantize_nf4",
    "div",
    "dropout",
    "dynamic_update_slice",
    "einsum",
    "erf",
    "exp",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log",
    "log_softmax",
    "logsumexp",
    "matmul",
    "max",
    "maximum",
    "mean",
    "minimum",
    "mul",
    "neg",
    "nf4_linear",
    "paged_attention",
    "pow",
    "quantize_nf4",
    "relu",
    "relu2",
    "reshape",
    "rms_norm",
    "rope",
    "rsqrt",
    "sigmoid",
    "silu",
    "slice",
    "softmax",
    "split",
    "sqrt",
    "stop_gradient",
    "sub",
    "sum",
    "swiglu",
    "take",
    "take_along_axis",
    "tanh",
    "transpose",
    "where",
]

"""The NumPy float64 twin of every op: textbook formulas and loops, and no jax.

`name(...)` is a forward, `name_vjp(...)` the cotangents of its inputs. A twin shares no code with the op it judges;
`numerical_vjp` judges the twins. This file is the catalogue.
"""
# ruff: noqa: F401

from riftco.oracle.activation import (
    gelu,
    gelu_vjp,
    relu,
    relu2,
    relu2_vjp,
    relu_vjp,
    silu,
    silu_vjp,
    swiglu,
    swiglu_vjp,
)
from riftco.oracle.attend import (
    attention,
    attention_statistics,
    attention_statistics_vjp,
    attention_vjp,
    attention_weights,
    attention_weights_vjp,
)
from riftco.oracle.decoder import decoder_logits, decoder_loss
from riftco.oracle.elementwise import (
    add,
    add_vjp,
    as_float64,
    astype,
    astype_vjp,
    div,
    div_vjp,
    erf,
    erf_vjp,
    exp,
    exp_vjp,
    log,
    log_vjp,
    maximum,
    maximum_vjp,
    minimum,
    minimum_vjp,
    mul,
    mul_vjp,
    neg,
    neg_vjp,
    pow,
    pow_vjp,
    rsqrt,
    rsqrt_vjp,
    sigmoid,
    sigmoid_vjp,
    sqrt,
    sqrt_vjp,
    sub,
    sub_vjp,
    tanh,
    tanh_vjp,
    where,
    where_vjp,
)
from riftco.oracle.gradcheck import numerical_vjp
from riftco.oracle.index import take, take_along_axis, take_along_axis_vjp, take_vjp
from riftco.oracle.linalg import (
    add_bias,
    add_bias_vjp,
    einsum,
    einsum_vjp,
    linear,
    linear_vjp,
    matmul,
    matmul_vjp,
)
from riftco.oracle.loss import cross_entropy, cross_entropy_vjp, linear_cross_entropy, linear_cross_entropy_vjp
from riftco.oracle.nf4 import dequantize_nf4, nf4_linear, nf4_linear_vjp, quantize_nf4
from riftco.oracle.norm import dropout, dropout_vjp, layer_norm, layer_norm_vjp, rms_norm, rms_norm_vjp
from riftco.oracle.paged import paged_attention, paged_attention_vjp
from riftco.oracle.reduce import (
    cumsum,
    cumsum_vjp,
    log_softmax,
    log_softmax_vjp,
    logsumexp,
    logsumexp_vjp,
    max,
    max_vjp,
    mean,
    mean_vjp,
    softmax,
    softmax_vjp,
    sum,
    sum_vjp,
)
from riftco.oracle.rotary import rope, rope_tables, rope_vjp
from riftco.oracle.shape import (
    broadcast_to,
    broadcast_to_vjp,
    concatenate,
    concatenate_vjp,
    dynamic_update_slice,
    dynamic_update_slice_vjp,
    reshape,
    reshape_vjp,
    slice,
    slice_vjp,
    split,
    split_vjp,
    transpose,
    transpose_vjp,
)

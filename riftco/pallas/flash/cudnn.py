"""Flash attention by NVIDIA's cuDNN, forward and backward, as XLA's custom calls.

It runs where it is named, never by itself. It has not run on hardware for us: what is checked is that both calls are
lowered with these options. cuDNN wants sm_80, and sm_90 for heads wider than 128. Its backward pass need not give the
same bits in two runs.

Source: NVIDIA cuDNN, "Scaled dot-product attention".
"""

from typing import Any

from riftco import _compat
from riftco.errors import UnsupportedError
from riftco.pallas.core.visibility import Visibility

DTYPES = ("bfloat16", "float16")
WIDEST = 256


def unsupported(q: Any, k: Any, v: Any, sees: Visibility, cap: float | None) -> str | None:
    """Why cuDNN cannot run a call; None if it can. Arrays may be ShapeDtypeStruct."""
    del v  # nothing that k does not say
    (queries, width), keys = (q.shape[1], q.shape[3]), k.shape[1]
    if str(q.dtype) not in DTYPES:
        return f"it computes in {' and '.join(DTYPES)}; got {q.dtype}."
    if width > WIDEST or width % 8 != 0:
        return f"heads are a multiple of 8 wide, at most {WIDEST}; got {width}."
    if 0 in (*q.shape, *k.shape):
        return f"every axis needs an element; got q {list(q.shape)} and k {list(k.shape)}."
    if cap is not None:
        return "it has no soft cap for logits."
    if sees.q_segment_ids is not None:
        return "it has no segment ids."
    if sees.kv_lengths is not None:
        return "nothing promises that it ignores a NaN past a row's length, or gives 0 to rows of length 0."
    if sees.offsets is not None or sees.offset != 0:
        return "its first query stands at position 0; q_offset must be 0."
    if sees.window is not None and not sees.causal:
        return "its window looks back only; it must be causal."
    if sees.window is not None and queries > keys:
        return f"its window needs no more queries than keys; got {queries} and {keys}."
    if queries == 1:
        return "releases of it give NaN gradients for a single query (NVIDIA/cudnn-frontend 1072)."
    return None


def forward(
    q: Any, k: Any, v: Any, sees: Visibility, *, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """The output [B, T, H, K] in q's dtype and the natural logsumexp [B, H, T] float32."""
    del cap
    _refuse(interpret)
    return _compat.cudnn_attention(q, k, v, scale=scale, causal=sees.causal, window=sees.window)


def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    sees: Visibility,
    *,
    scale: float,
    cap: float | None,
    interpret: Any,
) -> tuple[Any, Any, Any]:
    """The cotangents of q, k and v in their dtypes."""
    del cap
    _refuse(interpret)
    return _compat.cudnn_attention_backward(
        q, k, v, out, lse, dout, scale=scale, causal=sees.causal, window=sees.window
    )


def _refuse(interpret: Any) -> None:
    if interpret:
        raise UnsupportedError("attention[cudnn]: a library's kernel has no interpreter; leave interpret False.")

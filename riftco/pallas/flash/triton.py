"""Flash attention for NVIDIA GPUs by Pallas Triton: every option of `ops.attention`, any lengths, forward and backward.

The kernels are in triton_forward.py and triton_backward.py, what they share in triton_tiles.py. An interpreter checks
their numbers and ahead-of-time compilation for sm_90 that they fit; neither shows that Triton's own code is right, and
releases of it have miscompiled two chained products on Hopper (openxla/xla 19780 and 17356).
"""

from typing import Any

from riftco.pallas.core.visibility import Visibility
from riftco.pallas.flash.triton_backward import backward
from riftco.pallas.flash.triton_forward import forward
from riftco.pallas.flash.triton_tiles import WIDEST

__all__ = ["backward", "forward", "unsupported"]

DTYPES = ("float32", "bfloat16", "float16")


def unsupported(q: Any, k: Any, v: Any, sees: Visibility, cap: float | None) -> str | None:
    """Why these kernels cannot run a call; None if they can. Arrays may be ShapeDtypeStruct."""
    del v, cap  # v has k's shape and dtype
    if sees.has_wide_segments:
        return "segment ids must be of at most 32 bits."
    if str(q.dtype) not in DTYPES:
        return f"it computes in {', '.join(DTYPES)}; got {q.dtype}."
    if q.shape[3] > WIDEST:
        return f"heads are at most {WIDEST} wide; got {q.shape[3]}."
    if 0 in (*q.shape, *k.shape):
        return f"every axis needs an element; got q {list(q.shape)} and k {list(k.shape)}."
    return None

"""Flash attention for NVIDIA Hopper by Pallas Mosaic GPU: forward, dq, and dk with dv, each deterministic.

Inside the kernels: causal or not, window, static and traced offsets, key lengths, segments, soft cap, grouped heads,
any numbers of queries and keys. Keys and values past a row's length may hold NaN. Query heads that share a key head
are summed in float32 inside the kernel of dk and dv. Widths are 64 and 128: at 256 the two float32 accumulators of dk
and dv alone would take all registers of a warpgroup.

Probabilities and score cotangents go through shared memory to the matrix unit. Its other way in, by registers, saves
that trip, but the interpreter cannot run it, and here what is checked is what is compiled. Numbers of queries or keys
that are no multiple of 8 cost a padded copy of the arrays: TMA refuses them in the order that wgmma reads.

Nothing here has run on hardware. ptxas of CUDA 12.8.0 to 12.9.0 is known to miscompile the causal mask of a kernel like
these, for which jax refuses to run its own with them; here a warning is given.

The interpreter runs each warpgroup of a block in a thread of jax's CPU client and waits in it. It needs more of them
than there are warpgroups (3): on a machine with fewer cores set NPROC=8 before jax starts, or it may wait for ever.

Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2; Shah et al. 2024, arXiv:2407.08608, section 3.1.
"""

import re
import warnings
from typing import Any

import jax.numpy as jnp

from riftco import _compat
from riftco.pallas.core.visibility import Visibility

WIDTHS = (64, 128)
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")  # in the names that the runtime gives its chips
LARGEST_AXIS = 65535  # blocks along the second and the third axis of a grid
BLOCK = 128  # queries, or keys, of a block


UNAVAILABLE = None if _compat.HAS_MOSAIC_GPU else "it needs jax 0.11 or newer"


def unsupported(q: Any, k: Any, v: Any, sees: Visibility, cap: float | None) -> str | None:
    """Why the kernels cannot run a call, as half a sentence; None if they can. Only shapes and dtypes matter."""
    if UNAVAILABLE is not None:
        return UNAVAILABLE
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"it takes bfloat16 or float16, of which Hopper's matrix unit is made; got {q.dtype}"
    if q.shape[3] not in WIDTHS or v.shape[3] != q.shape[3]:
        return f"it takes heads {' or '.join(map(str, WIDTHS))} wide; got {q.shape[3]}"
    if sees.has_wide_segments:
        return "segment ids must be of at most 32 bits"
    if 0 in (*q.shape, *k.shape):
        return "it takes no empty arrays"
    if q.shape[0] > LARGEST_AXIS:
        return f"it takes at most {LARGEST_AXIS} rows in the batch; got {q.shape[0]}"
    if max(q.shape[1], k.shape[1]) > LARGEST_AXIS * BLOCK:
        return f"it takes at most {LARGEST_AXIS * BLOCK} queries and keys; got {q.shape[1]} and {k.shape[1]}"
    return None


def unfit(kind: str) -> str | None:
    """Why a CUDA device of a kind, as the runtime names it, cannot run the kernels; None if it can or is not known."""
    if not kind or HOPPER.search(kind):
        return None
    return f"it needs a Hopper chip, such as an H100 or H200; this call is for {kind}"


def forward(
    q: Any, k: Any, v: Any, sees: Visibility, *, scale: float, cap: float | None, interpret: Any
) -> tuple[Any, Any]:
    """Attention and its logsumexp.

    Args:
        q: queries [B, T, H, K], bfloat16 or float16.
        k: keys [B, S, G, K], in q's dtype.
        v: values [B, S, G, K], in q's dtype.
        sees: which query sees which key.
        scale: factor of the products q·k.
        cap: scores are capped to cap · tanh(score / cap); None does not.
        interpret: run by Mosaic GPU's interpreter, on a CPU: True, or its InterpretGPUParams.

    Returns:
        The output [B, T, H, K] in q's dtype and the natural logsumexp [B, H, T] float32; a query that sees nothing has
        0 and -inf.
    """
    from riftco.pallas.flash import mosaic_gpu_forward  # jax before 0.11 could not load it

    if not interpret:
        _warn_of_toolkit()
    return mosaic_gpu_forward.forward(q, k, v, sees, scale=scale, cap=cap, interpret=interpret)


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
    """The cotangents of q, k and v.

    Args:
        q: as `forward` took it, and likewise k, v, sees, scale, cap and interpret.
        k: [B, S, G, K].
        v: [B, S, G, K].
        out: what `forward` gave.
        lse: what `forward` gave.
        dout: the output's cotangent [B, T, H, K] in q's dtype.
        sees: which query sees which key.
        scale: factor of the products.
        cap: the soft cap.
        interpret: True, an InterpretGPUParams, or False.

    Returns:
        dq, dk and dv, in q's dtype; summed in float32, the heads that share a key head included.
    """
    from riftco.pallas.flash import mosaic_gpu_backward  # jax before 0.11 could not load it

    if not interpret:
        _warn_of_toolkit()
    return mosaic_gpu_backward.backward(q, k, v, out, lse, dout, sees, scale=scale, cap=cap, interpret=interpret)


def _warn_of_toolkit() -> None:
    version = _compat.cuda_runtime()
    if version is not None and 12080 <= version <= 12090:
        warnings.warn(
            "attention[pallas_mosaic_gpu]: ptxas of CUDA 12.8.0 to 12.9.0 can miscompile masks, and this is CUDA "
            f"{version // 1000}.{version % 1000 // 10}; take 12.9.1 or newer, or check the results.",
            stacklevel=3,
        )

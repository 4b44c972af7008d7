"""From logits to the next token: penalties, temperature, top-k, top-p, min-p, and one random stream per row.

The order is part of the contract, since another order gives other probabilities:

    penalties → logit bias → temperature → top-k → top-p → min-p → draw

Everything is a pure function of arrays and works under `jax.jit`, with each parameter a Python number (one for all
rows) or an array (one per row, traced or not). Python numbers are looked at while tracing: a filter that is off costs
nothing. No vocabulary is ever sorted. When to stop, `riftco.generation` knows.

The float64 twin, with loops, is `riftco.oracle.samplers`.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from riftco.errors import DomainError, DTypeError, IndexRangeError, ShapeError, domain_checks_enabled
from riftco.tree import describe
from riftco.types import Array

_TINY = float(np.finfo(np.float32).tiny)  # XLA flushes smaller temperatures to 0, so they count as 0


def sample(
    logits: Array,
    seeds: Array,
    positions: Array,
    *,
    temperature: float | Array = 1.0,
    top_k: int | Array = 0,
    top_p: float | Array = 1.0,
    min_p: float | Array = 0.0,
    choices: Array | None = None,
) -> Array:
    """Draw one token id per row from the filtered distribution of its logits.

    A row's draw is a function of its own logits, seed, position and parameters alone (the Gumbel-max method with the
    key `fold_in(key(seed), position)`, or `fold_in(fold_in(key(seed), choice), position)`): what else is in the batch,
    and in which row, changes nothing. A parameter given as a Python number or as an array of equal values yields the
    same ids.

    Args:
        logits: floating [B, V]; −inf bans a token.
        seeds: integers [B]; the low 32 bits count.
        positions: integers [B], the position of the token that is drawn; a new position is a new draw.
        temperature: number or [B]; at least 0; 0 takes the most likely token, the lowest id among equals.
        top_k: integer or integers [B]; exactly so many are kept, lower ids first among equals; off if ≤ 0 or ≥ V.
        top_p: number or [B], in [0, 1]; the fewest most likely tokens whose probabilities reach it are kept; 1 is off.
        min_p: number or [B], in [0, 1]; tokens below min_p times the largest probability are dropped; 0 is off.
        choices: None, or integers [B] that tell apart several answers drawn with one seed.

    Returns:
        int32 [B]. A row whose logits hold NaN or +inf, or are all −inf, or whose parameters are out of range, cannot
        be drawn from: its id is −1 under jit, and with concrete arrays it raises.

    Raises:
        ShapeError: logits are not [B, V], or another argument is neither a number nor [B].
        DTypeError: logits are not floating, or seeds, positions or top_k are not integers.
        DomainError: a number is out of its range, or, with concrete arrays, some row cannot be drawn from.
    """
    _check_logits("sample", logits, rank=2)
    rows = logits.shape[:1]
    seeds, positions = _integers("seeds", seeds, rows), _integers("positions", positions, rows)
    options, columns = _split_parameters("sample", logits, temperature, top_k, top_p, min_p)
    choices = None if choices is None else _integers("choices", choices, rows)
    ids = _sample(logits, seeds, choices, positions, columns, options)
    if domain_checks_enabled() and not isinstance(ids, Tracer):
        bad = np.flatnonzero(np.asarray(ids) < 0)
        if bad.size:
            raise DomainError(
                "sample: every row needs logits with a finite maximum, temperature ≥ 0, and top_p and min_p in [0, 1]; "
                f"rows {bad.tolist()} do not have them. Look for NaN in the model's output, or check the parameters."
            )
    return ids


def filter_logits(
    logits: Array,
    *,
    temperature: float | Array = 1.0,
    top_k: int | Array = 0,
    top_p: float | Array = 1.0,
    min_p: float | Array = 0.0,
) -> Array:
    """The logits of the distribution that `sample` draws from: scaled by the temperature, −inf where dropped.

    The row's largest value is 0. Parameters as in `sample`, each a number or an array shaped like the leading axes.

    Args:
        logits: floating [..., V].
        temperature: see `sample`; 0 leaves one token.
        top_k: see `sample`.
        top_p: see `sample`.
        min_p: see `sample`.

    Returns:
        An array like logits, in float32 or wider. Rows that cannot be drawn from are NaN throughout.

    Raises:
        ShapeError: a parameter is neither a number nor shaped like the leading axes.
        DTypeError: logits are not floating, or top_k is not an integer.
    """
    _check_logits("filter_logits", logits)
    options, columns = _split_parameters("filter_logits", logits, temperature, top_k, top_p, min_p)
    scaled, usable = _filter(logits, columns, options)
    return jnp.where(usable[..., None], scaled, jnp.nan)


def greedy(logits: Array) -> Array:
    """The most likely token of each row: floating [..., V] to int32 [...].

    The lowest id among equals; −1, never an error, for a row that `sample` could not draw from.
    """
    _check_logits("greedy", logits)
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), jnp.argmax(logits, axis=-1).astype(jnp.int32), -1)


def apply_penalties(
    logits: Array,
    prompt_counts: Array,
    output_counts: Array,
    *,
    repetition: float | Array = 1.0,
    presence: float | Array = 0.0,
    frequency: float | Array = 0.0,
) -> Array:
    """Make tokens that have occurred less likely (or, with the opposite sign, more).

    Repetition looks at prompt and output: a positive logit is divided by it, any other multiplied. Then presence is
    subtracted once from every token that the output holds, and frequency once per occurrence in the output.

    Args:
        logits: floating [..., V].
        prompt_counts: integers [..., V], how often each id occurs in the prompt (`count_tokens`).
        output_counts: integers [..., V], how often each id has been generated.
        repetition: number or an array shaped like the leading axes; above 0; 1 is off.
        presence: the same; 0 is off.
        frequency: the same; 0 is off.

    Returns:
        An array like logits, in float32 or wider.

    Raises:
        ShapeError: counts are not shaped like logits, or a parameter neither a number nor like the leading axes.
        DomainError: a concrete repetition is not above 0.

    Source:
        Repetition: Keskar et al. 2019, arXiv:1909.05858, section 4.1, in the signed form now usual. Presence and
        frequency: the OpenAI API reference.
    """
    _check_logits("apply_penalties", logits)
    for name, counts in (("prompt_counts", prompt_counts), ("output_counts", output_counts)):
        if counts.shape != logits.shape:
            raise ShapeError(
                f"apply_penalties: {name} must have the logits' shape {logits.shape}; got {counts.shape}. "
                "Count with count_tokens(ids, vocab_size)."
            )
    if not isinstance(repetition, Tracer) and domain_checks_enabled() and not np.all(np.asarray(repetition) > 0):
        raise DomainError(f"apply_penalties: repetition must be above 0; got {repetition}. 1 turns it off.")
    leading = logits.shape[:-1]
    logits = logits.astype(_compute_dtype(logits))
    generated = output_counts > 0
    if not (isinstance(repetition, int | float) and repetition == 1):
        factor = _column("apply_penalties", "repetition", repetition, leading, logits.dtype)
        penalised = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(generated | (prompt_counts > 0), penalised, logits)
    if not (isinstance(presence, int | float) and presence == 0):
        logits = logits - _column("apply_penalties", "presence", presence, leading, logits.dtype) * generated.astype(
            logits.dtype
        )
    if not (isinstance(frequency, int | float) and frequency == 0):
        weight = _column("apply_penalties", "frequency", frequency, leading, logits.dtype)
        logits = logits - weight * output_counts.astype(logits.dtype)
    return logits


def count_tokens(ids: Array, vocab_size: int, *, lengths: Array | None = None) -> Array:
    """How often each id occurs in each row: integers [..., N] to int32 [..., V].

    Args:
        ids: token ids; one outside 0 … vocab_size − 1 is counted nowhere, so −1 may pad.
        vocab_size: V.
        lengths: integers [...]; only the first so many ids of a row count. None counts all.

    Returns:
        int32 [..., V].
    """
    if lengths is not None:
        within = lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1) < jnp.asarray(lengths)[..., None]
        ids = jnp.where(within, ids, -1)
    flat = ids.reshape(-1, ids.shape[-1])
    flat = jnp.where(flat < 0, vocab_size, flat)  # a negative index would count from the end
    row = lax.broadcasted_iota(jnp.int32, flat.shape, 0)
    counts = jnp.zeros((flat.shape[0], vocab_size), jnp.int32).at[row, flat].add(1, mode="drop")
    return counts.reshape(*ids.shape[:-1], vocab_size)


def logit_bias_vector(bias: Mapping[int, float], vocab_size: int) -> np.ndarray:
    """A request's {id: bias} as float32 [V], to be added to logits after the penalties; −inf bans an id.

    Raises:
        IndexRangeError: an id is outside 0 … vocab_size − 1.
        DomainError: a bias is NaN or +inf.
    """
    vector = np.zeros(vocab_size, np.float32)
    for token, value in bias.items():
        if not 0 <= int(token) < vocab_size:
            raise IndexRangeError(
                f"logit_bias: ids must be 0 … {vocab_size - 1}; got {token}. Drop it or check the tokenizer."
            )
        if not value < np.inf:
            raise DomainError(
                f"logit_bias: a bias must be a number below +inf; id {token} has {value}. Use about 100 to force it."
            )
        vector[int(token)] = value
    return vector


# ---- parameters ------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What shapes the program, known while tracing. Other values are arguments, so that a new one compiles nothing."""

    greedy: bool  # temperature is the number 0
    sampled: bool  # temperature is a number that is not 0
    top_k: bool  # whether the filter may be on; the same for the next two
    top_p: bool
    min_p: bool


_RANGES = {"temperature": (0.0, np.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


def _split_parameters(
    who: str, logits: Array, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> tuple[_Options, dict[str, Array]]:
    """Check the parameters; tell what is static; return the others as [..., 1] beside logits [..., V]."""
    leading, vocab = logits.shape[:-1], logits.shape[-1]
    dtype = _compute_dtype(logits)
    numbers: dict[str, Any] = {}
    columns: dict[str, Array] = {}
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        value = value.item() if isinstance(value, np.generic) else value
        kind = np.asarray(value).dtype if isinstance(value, int | float) else jnp.asarray(value).dtype
        if name == "top_k" and not jnp.issubdtype(kind, jnp.integer):
            got = value if isinstance(value, float) else kind
            raise DTypeError(f"{who}: top_k must be an integer; got {got}. 0 turns it off.")
        if isinstance(value, int | float):
            low, high = _RANGES.get(name, (-np.inf, np.inf))
            if not low <= value <= high or value == np.inf:
                raise DomainError(f"{who}: {name} must be a number from {low:g} to {high:g}; got {value}.")
            numbers[name] = value = min(max(value, 0), vocab) if name == "top_k" else value
        columns[name] = _column(who, name, value, leading, jnp.int32 if name == "top_k" else dtype)
    options = _Options(
        greedy="temperature" in numbers and numbers["temperature"] < _TINY,
        sampled="temperature" in numbers and numbers["temperature"] >= _TINY,
        top_k=numbers.get("top_k") not in (0, vocab),
        top_p=numbers.get("top_p") != 1,
        min_p=numbers.get("min_p") != 0,
    )
    return options, columns


def _check_logits(who: str, logits: Array, rank: int | None = None) -> None:
    if logits.ndim < 1 or (rank is not None and logits.ndim != rank) or logits.shape[-1] < 1:
        wanted = "[B, V]" if rank == 2 else "[..., V]"
        raise ShapeError(f"{who}: logits must be {wanted} with V ≥ 1; got {describe(logits)}.")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise DTypeError(f"{who}: logits must be floating; got {describe(logits)}.")


def _compute_dtype(logits: Array) -> Any:
    """Float32 or wider; jnp.promote_types would refuse bfloat16 under strict promotion."""
    return jnp.float64 if logits.dtype == jnp.float64 else jnp.float32


def _integers(name: str, value: Array, rows: tuple[int, ...]) -> Array:
    """Seeds and positions as uint32 [B]; wide host integers keep their low 32 bits."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        if value.dtype.kind in "iu":
            value = (value & 0xFFFFFFFF).astype(np.uint32)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise DTypeError(f"sample: {name} must be integers; got {describe(value)}.")
    if value.shape != rows:
        raise ShapeError(f"sample: {name} must have shape {rows}, one per row of logits; got {describe(value)}.")
    return jnp.asarray(value).astype(jnp.uint32)


def _column(who: str, name: str, value: float | Array, leading: tuple[int, ...], dtype: Any) -> Array:
    """A parameter as [..., 1] beside logits [..., V]."""
    array = jnp.asarray(value)
    if array.shape not in ((), leading):
        raise ShapeError(f"{who}: {name} must be a number or have shape {leading}; got {describe(array)}.")
    return jnp.broadcast_to(array.astype(dtype), leading)[..., None]


# ---- the filtered distribution -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="options")
def _filter(logits: Array, columns: dict[str, Array], options: _Options) -> tuple[Array, Array]:
    """Scaled logits [..., V], −inf where dropped, and whether each row [...] can be drawn from."""
    logits = logits.astype(_compute_dtype(logits))
    temperature, top_p, min_p = columns["temperature"], columns["top_p"], columns["min_p"]
    largest = jnp.max(logits, axis=-1, keepdims=True)  # NaN and +inf come through
    usable = jnp.isfinite(largest) & (temperature >= 0) & jnp.isfinite(temperature)
    usable = (usable & (top_p >= 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1))[..., 0]
    is_greedy = temperature < _TINY
    scaled = (logits - largest) / jnp.where(is_greedy, jnp.ones_like(temperature), temperature)

    keep = jnp.ones(logits.shape, jnp.bool_)
    if not options.greedy:
        order = _order(logits)
        top_k, drawn = columns["top_k"], ~is_greedy
        # The passes over the vocabulary are skipped where no row needs them.
        if options.top_k:
            is_on = drawn & (top_k > 0) & (top_k < logits.shape[-1])
            keep = lax.cond(jnp.any(is_on), lambda: _most_likely(order, top_k), lambda: keep)
        if options.top_p:
            kept = keep
            nucleus = lambda: kept & _nucleus(order, jnp.where(kept, jnp.exp(scaled), 0), top_p)
            keep = lax.cond(jnp.any(drawn & (top_p < 1)), nucleus, lambda: kept)
        if options.min_p:
            keep &= jnp.exp(scaled) >= min_p  # the largest weight is exp(0) = 1
    if not options.sampled:
        best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        is_best = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == best
        keep = jnp.where(is_greedy, is_best, keep)
    return jnp.where(keep, scaled, -jnp.inf), usable


@functools.partial(jax.jit, static_argnames="options")
def _sample(
    logits: Array, seeds: Array, choices: Any, positions: Array, columns: dict[str, Array], options: _Options
) -> Array:
    scaled, usable = _filter(logits, columns, options)
    if options.greedy:
        return jnp.where(usable, jnp.argmax(scaled, axis=-1).astype(jnp.int32), -1)

    def noise(seed: Array, choice: Any, position: Array) -> Array:
        # The generator is named because some others draw a row by its place in the batch.
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(key if choice is None else jax.random.fold_in(key, choice), position)
        return jax.random.gumbel(key, logits.shape[-1:], scaled.dtype)

    def draw() -> Array:
        return jnp.argmax(scaled + jax.vmap(noise)(seeds, choices, positions), axis=-1)

    # A greedy row has one token left, whatever the noise.
    is_drawn = jnp.any(columns["temperature"] >= _TINY)
    chosen = draw() if options.sampled else lax.cond(is_drawn, draw, lambda: jnp.argmax(scaled, axis=-1))
    return jnp.where(usable, chosen.astype(jnp.int32), -1)


# ---- the head of the descending order, without sorting -------------------------------------------------------------
#
# Each filter keeps the head of the order "larger logit first, lower id first among equals". The last value in it is
# found bit by bit: 32 passes that compare and sum, many times cheaper than sorting a vocabulary.


def _order(logits: Array) -> Array:
    """Unsigned integers [..., V] that compare as the logits do; 0.0 and −0.0 are equal."""
    unsigned = jnp.uint64 if logits.dtype == jnp.float64 else jnp.uint32
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, jnp.zeros_like(logits), logits), unsigned)
    top = jnp.asarray(1, unsigned) << (jnp.iinfo(unsigned).bits - 1)
    return jnp.where(bits >= top, ~bits, bits | top)


def _last_value(order: Array, weights: Array, target: Array) -> Array:
    """The largest value [..., 1] such that the weights of all that is not below it reach the target [..., 1]."""
    bits = jnp.iinfo(order.dtype).bits

    def set_bit(step: Array, value: Array) -> Array:
        higher = value | (jnp.ones_like(value) << (bits - 1 - step).astype(value.dtype))
        mass = jnp.sum(jnp.where(order >= higher, weights, 0), axis=-1, keepdims=True)
        return jnp.where(mass >= target, higher, value)

    return lax.fori_loop(0, bits, set_bit, jnp.zeros(target.shape, order.dtype))


def _most_likely(order: Array, k: Array) -> Array:
    """Which are the k first, exactly; all where k ≤ 0 or ≥ V."""
    off = (k <= 0) | (k >= order.shape[-1])
    last = _last_value(order, jnp.ones(order.shape, jnp.int32), k)
    equal = order == last
    missing = k - jnp.sum(order > last, axis=-1, keepdims=True, dtype=jnp.int32)
    return off | (order > last) | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= missing))


def _nucleus(order: Array, weights: Array, top_p: Array) -> Array:
    """Which are the fewest first whose share of the weights reaches top_p, but never none; all where top_p is 1."""
    tiny = jnp.finfo(weights.dtype).tiny  # with a target of 0 the head would be empty
    target = jnp.maximum(top_p * jnp.sum(weights, axis=-1, keepdims=True), tiny)
    last = _last_value(order, weights, target)
    equal = (order == last) & (weights > 0)
    larger = jnp.sum(jnp.where(order > last, weights, 0), axis=-1, keepdims=True)
    before = larger + jnp.cumsum(jnp.where(equal, weights, 0), axis=-1) - weights  # the mass of what comes first
    return (top_p >= 1) | (order > last) | (equal & (before < target))

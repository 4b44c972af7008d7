"""Whole steps for chips that nobody here holds: compiled ahead of time, and what they would need there.

`riftco.targets` names the chips. A step is traced for them, cut over their mesh, and handed to their compiler; nothing
runs, and no weight is ever made.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from riftco import models
from riftco.errors import BackendError, ConfigError, RiftcoError
from riftco.models import DecoderConfig
from riftco.models.decoding import contiguous_cache, decode_step, decoding_params
from riftco.models.rotary_tables import rope_tables
from riftco.ops.attend import choose
from riftco.targets import Chips, chips
from riftco.train import TrainConfig, abstract_state, make_train_step, parse_mesh
from riftco.train.mesh import batch_sharding, parse_axes, process_rows, replicated
from riftco.train.throughput import flops_per_token

# What a compiled program calls a kernel of ours, and cuDNN's.
_KERNEL_CALLS = r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu\w*|__cudnn\$\w+)"'

# How libtpu says that a step is too large: newer releases, older ones.
_TOO_LARGE = r"\(([\d.]+\w?)\) exceeds available HBM \(([\d.]+\w?)\)|Used ([\d.]+\w?) of ([\d.]+\w?) hbm"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled step would need; bytes are of one chip.

    Attributes:
        target: the chips' name.
        kind: as the runtime calls one of them.
        chips: how many the step runs on.
        mesh: their axes, such as {"data": 8, "fsdp": 1}; empty for one chip.
        step: "train" or "decode".
        attention: the implementation that a training step took; None for a decoding step, which has its own.
        kernels: how often the program calls each kernel; empty where XLA's own code does it all.
        arguments: bytes that the step is handed.
        outputs: bytes that it hands back, but for those that overwrite arguments.
        temporaries: bytes that it works in.
        code: bytes of the program itself.
        memory: bytes that a chip has; None where that is not known.
        flops: of the whole step on all chips, by the model's formula.
        counted_flops: what the compiler counts on one chip, the body of a loop once; None where it does not count.
    """

    target: str
    kind: str
    chips: int
    mesh: dict[str, int]
    step: str
    attention: str | None
    kernels: dict[str, int]
    arguments: int
    outputs: int
    temporaries: int
    code: int
    memory: int | None
    flops: float
    counted_flops: float | None

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.outputs + self.temporaries + self.code

    @property
    def fits(self) -> bool:
        """Whether a chip has as much."""
        return self.memory is None or self.total <= self.memory

    def to_dict(self) -> dict[str, Any]:
        """Every figure as a JSON value."""
        return {**dataclasses.asdict(self), "total": self.total, "fits": self.fits}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step that goes with its chips and that nobody has compiled yet; see `plan_train` and `plan_decode`."""

    place: Chips
    mesh: Any
    step: str
    attention: str | None
    flops: float
    lower: Callable[[], Any]

    def compile(self) -> Report:
        """What the step would need.

        Raises:
            UnsupportedError: a kernel does not take the shapes. BackendError: the compiler refuses the step; its reason
                is in the message.
        """
        try:
            with self.place.tracing(self.mesh):
                compiled = self.lower().compile()
        except RiftcoError:
            raise
        except Exception as error:  # the compilers raise whatever they like
            raise BackendError(_refused(self.place, self.step, " ".join(str(error).split()))) from error
        memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
        return Report(
            target=self.place.name,
            kind=self.place.kind,
            chips=1 if self.mesh is None else self.mesh.size,
            mesh={} if self.mesh is None else dict(self.mesh.shape),
            step=self.step,
            attention=self.attention,
            kernels=kernels_of(compiled.as_text()),
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            memory=self.place.memory,
            flops=self.flops,
            counted_flops=costs.get("flops") if costs else None,
        )


def train_step(target: str | Chips, config: DecoderConfig, train_config: TrainConfig) -> Report:
    """Compile the training step of a run; arguments and errors are those of `plan_train` and `Plan.compile`."""
    return plan_train(target, config, train_config).compile()


def decode_one(
    target: str | Chips, config: DecoderConfig, *, batch_size: int = 1, dtype: Any = None, mesh: str | None = None
) -> Report:
    """Compile the decoding of one token of every row; arguments and errors are those of `plan_decode` and `Plan`."""
    return plan_decode(target, config, batch_size=batch_size, dtype=dtype, mesh=mesh).compile()


def plan_train(target: str | Chips, config: DecoderConfig, train_config: TrainConfig) -> Plan:
    """The training step of a run, for chips.

    Args:
        target: chips, or their name.
        config: the decoder; rows have its context's length.
        train_config: the run; without a mesh, `data` over all chips.

    Raises:
        ConfigError, UnsupportedError: the mesh, the rows or a named implementation of attention do not go with the
            chips. BackendError: no compiler.
    """
    place = chips(target) if isinstance(target, str) else target
    mesh = _mesh(place, train_config.mesh)
    process_rows(mesh, train_config.rows_per_step, train_config.batch_size)
    with place.tracing(mesh):
        attention = _attention(config, train_config)

    def lower() -> Any:
        state = abstract_state(config, train_config, mesh)
        rows = jax.ShapeDtypeStruct((train_config.rows_per_step, config.context), jnp.int32)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        if mesh is None:
            state, rows, number = place.described((state, rows, number))
        else:
            rows = place.described(rows, batch_sharding(mesh))
            number = place.described(number, replicated(mesh))
        step: Any = make_train_step(config, train_config, mesh)
        return step.lower(state, {"tokens": rows, "targets": rows}, number)

    flops = flops_per_token(config, config.context) * train_config.rows_per_step * config.context
    return Plan(place, mesh, "train", attention, flops, lower)


def plan_decode(
    target: str | Chips, config: DecoderConfig, *, batch_size: int = 1, dtype: Any = None, mesh: str | None = None
) -> Plan:
    """The step that decodes one token of every row over a full contiguous cache, for chips.

    Args:
        target: chips, or their name.
        config: the decoder; the cache has its context's slots.
        batch_size: rows, on all chips together.
        dtype: of weights, cache and products; None for float32.
        mesh: as `riftco.train.parse_mesh` reads it; `data` over all chips by default. Every chip has all weights.

    Raises:
        ConfigError: the mesh or the rows do not go with the chips. BackendError: no compiler.
    """
    place = chips(target) if isinstance(target, str) else target
    devices = _mesh(place, mesh)
    if devices is not None and devices.shape["fsdp"] > 1:
        raise ConfigError(f"mesh: a decoding step has whole weights on every chip; got {mesh}; write data=N")
    if batch_size < 1:
        raise ConfigError(f"aot: batch_size must be an integer of at least 1; got {batch_size}")
    process_rows(devices, batch_size, batch_size)
    body: Any = decode_step  # under its own jit, whose traces may be another target's

    def step(params: Any, cache: Any, token: Any, position: Any, rope: Any) -> Any:
        return body.__wrapped__(params, cache, token, position, rope, config)

    def lower() -> Any:
        arguments = _decoding_arguments(place, devices, config, batch_size, dtype)
        return jax.jit(step, donate_argnums=1).lower(*arguments)

    # A third of training's: forwards alone.
    flops = flops_per_token(config, config.context) / 3.0 * batch_size
    return Plan(place, devices, "decode", None, flops, lower)


def kernels_of(text: str) -> dict[str, int]:
    """The names of the kernels that a compiled program calls, and how often it has each.

    Args:
        text: `as_text()` of jax's Compiled.
    """
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        if call := re.search(_KERNEL_CALLS, line):
            name = re.search(r'op_name="[^"]*?([^/"]+)/pallas_call', line)
            found[name[1] if name else call[0].split('"')[1]] += 1
    return dict(sorted(found.items()))


def too_large(step: str, room: str, needed: str) -> str:
    """The sentence about a step that does not fit."""
    remedies = "a smaller batch, block checkpointing, bfloat16" if step == "train" else "a smaller batch, bfloat16"
    return f"aot: the {step} step must fit the {room}; it needs {needed}; use {remedies} or more chips"


def _mesh(place: Chips, text: str | None) -> Any:
    """The mesh over all chips that a flag describes; None for a single chip and no flag."""
    count = len(place.devices)
    if text is None and count == 1:
        return None
    text = f"data={count}" if text is None else text
    if (wanted := math.prod(parse_axes(text).values())) != count:
        raise ConfigError(
            f"mesh: its axes must multiply to the chips of {place.name}, {count}; got {text!r}, which makes {wanted}; "
            f"write data={count}, or name another target"
        )
    return parse_mesh(text, list(place.devices))


def _decoding_arguments(place: Chips, mesh: Any, config: DecoderConfig, batch_size: int, dtype: Any) -> tuple[Any, ...]:
    """What `decode_step` is handed before its configuration: params, cache, token, position, rotary tables."""
    params = jax.eval_shape(lambda p: decoding_params(p, config, dtype), models.abstract(config))
    kind = params.rest["token_embedding"]["weight"].dtype
    cache = jax.eval_shape(lambda: contiguous_cache(config, batch_size, config.context, kind))
    token = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    rope = jax.eval_shape(lambda: rope_tables(config, [0], kind)) if config.position == "rope" else None
    shared = (params, rope, jax.ShapeDtypeStruct((), jnp.int32))
    params, rope, position = place.described(shared, None if mesh is None else replicated(mesh))
    cache, token = place.described((cache, token), None if mesh is None else batch_sharding(mesh))
    return params, cache, token, position, rope


def _attention(config: DecoderConfig, train_config: TrainConfig) -> str:
    """The implementation that the step's calls of `riftco.ops.attention` come to."""
    shape = lambda heads: jax.ShapeDtypeStruct(
        (train_config.batch_size, config.context, heads, config.head_dim), jnp.dtype(train_config.dtype)
    )
    q, k = shape(config.heads), shape(config.kv_heads)
    return choose(train_config.attention, q, k, k)


def _refused(place: Chips, step: str, reason: str) -> str:
    """What the compiler said, as a sentence of ours."""
    room = re.search(_TOO_LARGE, reason)
    if room is not None:
        needed, left = room[1] or room[3], room[2] or room[4]
        return too_large(step, f"{left} of memory that one {place.kind} leaves to a program", needed)
    return f"aot: the {step} step does not compile for {place.name}: {reason[:400]}"

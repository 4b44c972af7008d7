"""A model as a flax `nnx.Module`, for programs that are written around one.

The module holds the params as `nnx.Param`s under the names that they have here, blocks stacked on the layer axis, and
calls `riftco.models.forward`. Whatever flax offers for modules (split and merge, jit, its gradients, optax) then works
on it. flax is no dependency: install the extra `flax`.
"""

import functools
import importlib
from typing import Any

from riftco.errors import UnsupportedError
from riftco.models import DecoderConfig, check_params, forward, spec
from riftco.types import Array, PyTree


def to_nnx(params: PyTree, config: DecoderConfig) -> Any:
    """A module that computes what the params compute.

    Args:
        params: plain floating weights.
        config: the decoder that they belong to.

    Returns:
        An `nnx.Module`: `module(tokens[B, T], **options of models.forward)` gives logits [B, T, V]; `module.config`;
        `module.blocks.attention.query.weight` and the like are `nnx.Param`s that share the arrays of `params`.

    Raises:
        ShapeError, DTypeError: where the params are not the configuration's.
        UnsupportedError: flax is not installed.
    """
    check_params(params, config)
    return _decoder_class()(params, config)


def from_nnx(module: Any) -> tuple[PyTree, DecoderConfig]:
    """The params and the configuration of a module that `to_nnx` made: the arrays that it holds now.

    Raises:
        ShapeError, DTypeError: where a parameter was replaced by one that is not the configuration's.
        UnsupportedError: another kind of module, or flax is not installed.
    """
    return _params_of(module), module.config


def update(module: Any, params: PyTree) -> None:
    """Put other params into a module that `to_nnx` made.

    Args:
        module: is changed.
        params: of the same configuration.

    Raises:
        ShapeError, DTypeError, UnsupportedError: as `to_nnx` and `from_nnx`; the module is then as it was.
    """
    _check_kind(module)
    check_params(params, module.config)
    _put(module, params)


def _put(holder: Any, params: PyTree) -> None:
    for name, value in params.items():
        if isinstance(value, dict):
            _put(getattr(holder, name), value)
        else:
            getattr(holder, name)[...] = value


def _params_of(module: Any) -> PyTree:
    _check_kind(module)

    def values(part: Any) -> Any:
        if isinstance(part, _nnx().Variable):
            return part[...]
        return {name: values(inner) for name, inner in part.items()} if hasattr(part, "items") else part

    names = dict.fromkeys(path.partition(".")[0] for path in spec(module.config))
    params = {name: values(getattr(module, name)) for name in names}
    check_params(params, module.config)
    return params


def _check_kind(module: Any) -> None:
    if not isinstance(module, _decoder_class()):
        raise UnsupportedError(f"flax: a module that to_nnx made is required; got {type(module).__name__}; use to_nnx")


def _nnx() -> Any:
    try:
        # By its name: a type checker without flax then has nothing to find.
        nnx = importlib.import_module("flax.nnx")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "flax: a model as an nnx module needs the package flax, which is not installed; pip install 'riftco[flax]'"
        ) from error
    return nnx


@functools.cache
def _decoder_class() -> type:
    """The class, made when flax is there."""
    nnx = _nnx()

    def hold(value: Any) -> Any:
        if not isinstance(value, dict):
            return nnx.Param(value)
        return nnx.Dict({name: hold(inner) for name, inner in value.items()})

    class Decoder(nnx.Module):
        """One decoder; see `to_nnx`."""

        def __init__(self, params: PyTree, config: DecoderConfig) -> None:
            self.config = config
            for name, value in params.items():
                setattr(self, name, hold(value))

        def __call__(self, tokens: Array, **options: Any) -> Array:
            """Logits [B, T, V] of token ids [B, T]; options are those of `riftco.models.forward`."""
            return forward(_params_of(self), tokens, self.config, **options)

    return Decoder

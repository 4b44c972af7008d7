"""The tensors of a published family out of a model's parameters, one at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from riftco.errors import DomainError
from riftco.models.config import DecoderConfig
from riftco.models.families.tensors import rules


class Published(Mapping[str, np.ndarray]):
    """{published name: array}, each made when it is asked for; shapes and dtypes are known before.

    Args:
        arrays: {dotted name: array}, as `riftco.models.named` gives it.
        config: the decoder.
        family: a model_type; by default `family_of(config)`.
        dtype: cast to this one; by default the parameters' own.

    Raises:
        ConfigError: where the family cannot express the configuration.
    """

    def __init__(
        self, arrays: Mapping[str, Any], config: DecoderConfig, family: str | None = None, dtype: Any = None
    ) -> None:
        self._arrays = arrays
        self._rules = {rule.published: rule for rule in rules(config, family)}
        self._dtype = None if dtype is None else np.dtype(dtype)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without making it."""
        rule = self._rules[name]
        shapes = [tuple(self._arrays[part].shape) for part in rule.parameters]
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return joined[::-1] if rule.transposed else joined

    def dtype_of(self, name: str) -> np.dtype:
        """The dtype of a tensor, without making it."""
        if self._dtype is not None:
            return self._dtype
        return np.result_type(*(np.dtype(self._arrays[part].dtype) for part in self._rules[name].parameters))

    def __getitem__(self, name: str) -> np.ndarray:
        rule = self._rules[name]
        parts = [np.asarray(self._arrays[part]) for part in rule.parameters]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # safetensors writes the memory as it lies, so a transposed view must be copied into row-major order.
        array = np.ascontiguousarray(joined.T if rule.transposed else joined)
        if self._dtype is None or array.dtype == self._dtype:
            return array
        with np.errstate(over="ignore"):
            cast = array.astype(self._dtype)
        if not np.isfinite(cast).all() and np.isfinite(array).all():
            raise DomainError(
                f"{name}: every weight must stay finite as {self._dtype}; the largest is {np.abs(array).max():.3g}; "
                "choose a dtype with a wider range"
            )
        return cast

    def __contains__(self, name: object) -> bool:
        return name in self._rules

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


def to_published(
    arrays: Mapping[str, Any], config: DecoderConfig, family: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a family from the parameters of `named`, one at a time.

    Args:
        arrays: {dotted name: array}, as `named` gives it.
        config: the decoder.
        family: a model_type; by default `family_of(config)`.

    Yields:
        (published name, C-contiguous NumPy array) with the parameters' dtype.
    """
    yield from Published(arrays, config, family).items()

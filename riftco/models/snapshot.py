"""An exact copy of a model in host memory."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from riftco.errors import DomainError
from riftco.models.config import DecoderConfig
from riftco.models.specification import check_params, flatten
from riftco.types import PyTree


class Snapshot:
    """Params, configuration and tokenizer at one moment, independent of what happens to the originals.

    Args:
        params: plain floating weights; copied to host memory.
        config: the decoder they belong to.
        tokenizer: a tokenizer or None; copied.

    Raises:
        ShapeError, DTypeError: where the params are not the configuration's plain weights (adapters and packed weights
            are refused, by name).
        DomainError: for a value that is not finite; its leaf is named.
    """

    def __init__(self, params: PyTree, config: DecoderConfig, tokenizer: Any = None) -> None:
        check_params(params, config)
        for name, leaf in flatten(params, config).items():
            if not np.isfinite(np.asarray(leaf)).all():
                raise DomainError(f"Snapshot: every weight must be finite; {name} is not; capture an earlier state")
        # np.array copies: a donated or deleted device buffer must not reach the snapshot.
        self._params = jax.tree.map(np.array, params)
        self._tokenizer = copy.deepcopy(tokenizer)
        self.config = config

    def restore(self) -> tuple[PyTree, DecoderConfig, Any]:
        """(params, config, tokenizer), equal bit for bit to what was captured; fresh at every call."""
        return jax.tree.map(jnp.array, self._params), self.config, copy.deepcopy(self._tokenizer)

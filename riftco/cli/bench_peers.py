"""Peers of `riftco bench train` outside jax: the reference implementation and PyTorch eager.

Both are imported here alone, and only when their row is measured.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from riftco.models.config import DecoderConfig


def reference_step(config: DecoderConfig, tokens: Any, targets: Any) -> Callable[[], float]:
    """Seconds of one train step of riftco-transformer 0.6.1; raises ImportError where it is not installed."""
    import riftco_transformer as reference

    model = reference.DecoderOnlyTransformer(
        reference.TransformerConfig(
            config.vocab_size, config.context, config.width, config.heads, config.layers, config.hidden
        )
    )
    optimizer = reference.Adam(model.parameters(), learning_rate=1e-3)
    rows, labels = np.asarray(tokens).tolist(), np.asarray(targets).ravel().tolist()

    def run() -> float:
        started = time.perf_counter()
        loss = reference.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - started

    return run


def torch_step(config: DecoderConfig, tokens: Any, targets: Any, threads: int) -> Callable[[], float]:
    """Seconds of one step of the same GPT in PyTorch eager, attention and AdamW fused; may raise ImportError."""
    torch: Any = importlib.import_module("torch")  # not among the extras that the type checker sees
    nn, F = torch.nn, torch.nn.functional

    torch.set_num_threads(threads)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d, f = config.width, config.hidden
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

        def forward(self, x: Any) -> Any:
            b, t, d = x.shape
            q, k, v = (
                part.view(b, t, config.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, dim=2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
            x = x + self.out(y)
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab_size, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList([Block() for _ in range(config.layers)])
            self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab_size, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    ids, labels = (torch.tensor(np.asarray(x), dtype=torch.long) for x in (tokens, targets))

    def run() -> float:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - started

    return run

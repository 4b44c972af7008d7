"""Moments in pages: a leaf's n scalars, flattened, as [pages, page_size] with zeros after the last.

Whatever the leaf's shape, its moments then divide evenly between devices or into blocks of bounded size. A tail of
zeros stays zero under Adam: a zero gradient, zero moments and a zero parameter move nothing.
"""

import jax.numpy as jnp

from riftco.types import Array


def to_pages(leaf: Array, page_size: int) -> Array:
    """[...] -> [pages, page_size], pages = ceil(size / page_size)."""
    pages = -(-leaf.size // page_size)
    flat = jnp.pad(leaf.reshape(-1), (0, pages * page_size - leaf.size))
    return flat.reshape(pages, page_size)


def paged(leaf: Array, page_size: int | None) -> Array:
    """`to_pages`, or the leaf itself where there are no pages."""
    return leaf if page_size is None else to_pages(leaf, page_size)


def from_pages(pages: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_pages`; an array that is not paged passes through unchanged."""
    if pages.shape == shape:
        return pages
    size = 1
    for length in shape:
        size *= length
    return pages.reshape(-1)[:size].reshape(shape)

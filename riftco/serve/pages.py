"""Which request holds which page, and which pages hold a prefix that another request can use.

Bookkeeping only: no array, no clock, no randomness. A page is free, or held by as many requests as its count says, or
cached: held by none, kept because the index knows what is in it, and given up when pages run out, the least recently
used first. A transition that cannot be made changes nothing.

The index finds a whole page by a digest chained over every token from the first on, begun with the scope (the adapter
and a salt). Tokens, scope and the page before are compared as well, so a digest that collides is a miss.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from riftco.errors import ConfigError

Scope = Hashable
Digest = Callable[[bytes, Sequence[int]], bytes]


def chained_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page, given that of the page before it."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


class Entry(NamedTuple):
    """What the index knows about a page."""

    page: int
    tokens: tuple[int, ...]
    before: bytes
    scope: Scope


class Pages:
    """The allocator and the prefix index over pages 0 … count − 1.

    Args:
        count: P, how many pages there are.
        size: N, tokens in a page.
        digest: `(digest of the page before, tokens) -> bytes`; tests make it collide.

    Attributes:
        gains: how often pages were given back or indexed: what could not be had before may be had when it has grown.

    Raises:
        ConfigError: for a count or a size below 1.
    """

    def __init__(self, count: int, size: int, digest: Digest = chained_digest) -> None:
        for name, value in (("num_pages", count), ("page_size", size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Pages: {name} must be an integer of at least 1; got {value!r}.")
        self.count, self.size, self._digest = count, size, digest
        self.gains = 0
        self._free = list(range(count - 1, -1, -1))  # the lowest is taken first
        self._holders = [0] * count
        self._index: dict[bytes, Entry] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def free(self) -> int:
        """Pages that a request can have: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that no request holds and the index knows."""
        return len(self._cached)

    def holders(self, page: int) -> int:
        """How many requests hold a page."""
        return self._holders[page]

    def match(self, tokens: Sequence[int], scope: Scope = None) -> list[int]:
        """The longest run of indexed pages that hold the first tokens, in order; changes nothing."""
        found, key = [], _root(scope)
        for start in range(0, len(tokens) - self.size + 1, self.size):
            wanted, before = tuple(tokens[start : start + self.size]), key
            key = self._digest(before, wanted)
            entry = self._index.get(key)
            if entry is None or entry[1:] != (wanted, before, scope):
                break
            found.append(entry.page)
        return found

    def acquire(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """Hold pages once more, and take others that nobody holds.

        Args:
            shared: pages that are held or cached.
            fresh: how many others; cached pages that are not among `shared` are given up for them where needed.

        Returns:
            `shared` and the fresh pages, in this order; None, and nothing has changed, if there are not so many.
        """
        if fresh > self.free - len({page for page in shared if self._holders[page] == 0}):
            return None
        for page in shared:
            self._holders[page] += 1
            self._cached.pop(page, None)
        taken = []
        for _ in range(fresh):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            taken.append(page)
        return [*shared, *taken]

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page; a page that nobody holds any more is cached if indexed, else free."""
        self.gains += 1
        for page in reversed(pages):  # the end of a prefix is of use to fewer, so it is evicted before the beginning
            if self._holders[page] < 1:
                raise RuntimeError(f"Pages: page {page} is released more often than it was acquired.")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def index(self, tokens: Sequence[int], pages: Sequence[int], scope: Scope = None) -> None:
        """Let others find held pages; from now on their contents must not change.

        What the index has already, in another page, stays as it is.

        Args:
            tokens: what the pages hold, from the first token of the request on; a last part of a page is ignored.
            pages: the request's pages from the first on.
            scope: what else their contents depend on.
        """
        self.gains += 1
        key = _root(scope)
        for number in range(len(tokens) // self.size):
            held, before = tuple(tokens[number * self.size : (number + 1) * self.size]), key
            key = self._digest(before, held)
            page = pages[number]
            if key not in self._index and page not in self._key_of:
                self._index[key] = Entry(page, held, before, scope)
                self._key_of[page] = key

    def forget(self) -> None:
        """Empty the index; the cached pages are free then."""
        self._index.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Raise AssertionError unless every page is free, held or cached exactly as counted."""
        free, cached = set(self._free), set(self._cached)
        held = {page for page in range(self.count) if self._holders[page] > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & held or cached & held), "a page is in two states"
        assert free | cached | held == set(range(self.count)), "a page is in no state"
        assert min(self._holders) >= 0, "a page is held less than never"
        assert cached <= set(self._key_of) and not free & set(self._key_of), "the index knows a free page"
        assert {key: entry.page for key, entry in self._index.items()} == {k: p for p, k in self._key_of.items()}

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._index[self._key_of.pop(page)]
        return page


def _root(scope: Scope) -> bytes:
    return hashlib.blake2b(repr(scope).encode(), digest_size=16).digest()

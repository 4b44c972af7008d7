"""Pages: every page free, held or cached as counted, whatever happens in whatever order; the index never lies."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from riftco.errors import ConfigError
from riftco.serve.pages import Pages

COUNT, SIZE = 6, 2
pytestmark = pytest.mark.tiny


class PagesMachine(RuleBasedStateMachine):
    """A model beside the allocator: what each request holds, and what was written into each page."""

    def __init__(self) -> None:
        super().__init__()
        # A digest of 2 bits: collisions must be misses, not hits.
        self.pages = Pages(COUNT, SIZE, lambda before, tokens: bytes([(sum(before) + sum(tokens)) % 4]))
        self.requests: list[tuple[list[int], list[int], str]] = []
        self.contents: dict[int, tuple[tuple[int, ...], str]] = {}  # page: all tokens up to its end, and the scope

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), scope=st.sampled_from("ab"), extra=st.integers(0, 2)
    )
    def admit(self, tokens, scope, extra):
        hit = self.pages.match(tokens, scope)
        for number, page in enumerate(hit):
            assert self.contents[page] == (tuple(tokens[: (number + 1) * SIZE]), scope)
        fresh = -(-len(tokens) // SIZE) - len(hit) + extra
        before, state = self.pages.free, copy.deepcopy(self.pages.__dict__)
        idle = sum(self.pages.holders(page) == 0 for page in hit)
        held = self.pages.acquire(hit, fresh)
        if held is None:
            assert fresh > before - idle and self.pages.__dict__ == state
            return
        assert len(set(held)) == len(held) == len(hit) + fresh and self.pages.free == before - idle - fresh
        for number, page in enumerate(held):
            if number >= len(hit):
                assert self.pages.holders(page) == 1
                self.contents[page] = (tuple(tokens[: (number + 1) * SIZE]), scope)
        self.requests.append((held, tokens, scope))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def publish(self, data):
        held, tokens, scope = data.draw(st.sampled_from(self.requests))
        self.pages.index(tokens, held, scope)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        held, _, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pages.release(held)

    @rule()
    def forget(self):
        self.pages.forget()
        assert self.pages.cached == 0

    @invariant()
    def every_page_is_counted(self):
        self.pages.check()
        for page in range(COUNT):
            assert self.pages.holders(page) == sum(held.count(page) for held, _, _ in self.requests)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def filled(tokens, scope=None, count=COUNT):
    pages = Pages(count, SIZE)
    held = pages.acquire([], -(-len(tokens) // SIZE))
    pages.index(tokens, held, scope)
    return pages, held


def test_a_prefix_is_found_by_all_its_tokens_the_adapter_and_the_salt():
    pages, held = filled([1, 2, 3, 4, 5], ("tuned", "salt"))
    assert pages.match([1, 2, 3, 4, 5, 6], ("tuned", "salt")) == held[:2]  # the third page was not whole
    assert pages.match([1, 2, 3, 9], ("tuned", "salt")) == held[:1]
    assert pages.match([9, 2, 3, 4], ("tuned", "salt")) == []
    for scope in (None, ("tuned", ""), (None, "salt"), ("other", "salt")):
        assert pages.match([1, 2, 3, 4], scope) == []


def test_the_least_recently_used_page_goes_first_and_ends_before_beginnings():
    pages, held = filled([1, 2, 3, 4])
    other = pages.acquire([], 2)
    pages.index([5, 6, 7, 8], other)
    pages.release(held)
    pages.release(other)
    assert pages.free == COUNT and pages.cached == 4
    again = pages.acquire(pages.match([1, 2, 3, 4]), 0)  # used last now
    pages.release(again)
    assert pages.acquire([], 3) is not None  # two were free: one cached page had to go
    assert len(pages.match([5, 6, 7, 8])) == 1 and len(pages.match([1, 2, 3, 4])) == 2
    pages.check()


def test_what_cannot_be_had_changes_nothing_and_a_shared_page_is_not_its_own_room():
    pages, held = filled([1, 2, 3, 4], count=3)
    pages.release(held)
    state = copy.deepcopy(pages.__dict__)
    assert pages.acquire(pages.match([1, 2, 3, 4]), 2) is None
    assert pages.__dict__ == state
    assert pages.acquire(pages.match([1, 2, 3, 4]), 1) is not None


def test_mistakes():
    with pytest.raises(ConfigError, match="num_pages"):
        Pages(0, 4)
    with pytest.raises(ConfigError, match="page_size"):
        Pages(4, 0)
    pages, held = filled([1, 2])
    pages.release(held)
    with pytest.raises(RuntimeError, match="released more often"):
        pages.release(held)

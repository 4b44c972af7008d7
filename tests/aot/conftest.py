"""All tests here compile for chips that are not here: marked `aot`, so that only their own lane runs them.

In that lane a missing compiler is an error, never a skip.
"""

import functools
import pathlib

import pytest

from riftco import targets

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.aot)
            # jax announces on every lowering that this backend will go one day.
            item.add_marker(pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning"))


@pytest.fixture(scope="session")
def chips():
    """`riftco.targets.chips`, each target described once."""
    return functools.cache(targets.chips)

"""Random configurations, a few; `make exactness` runs hundreds."""

from collections.abc import Iterator

import pytest

from tests.exactness.random_configurations import Models, models, run_configuration


@pytest.fixture(scope="module")
def shared() -> Iterator[Models]:
    with models() as made:
        yield made


@pytest.mark.parametrize("number", range(12))
def test_a_random_configuration_changes_no_answer(shared: Models, number: int) -> None:
    assert run_configuration(number, shared) == []

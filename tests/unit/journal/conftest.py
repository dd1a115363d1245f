"""What tests of the journal share: a PostgreSQL for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.builders.postgresql import postgresql_server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    """Each call gives the address of an empty database; skipped, with the reason, where there is no server or driver."""
    with postgresql_server() as fresh:
        yield fresh

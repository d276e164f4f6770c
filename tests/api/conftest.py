"""The programs of these tests, built when they are first run."""

from __future__ import annotations

import pytest
from api_helpers import Programs


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("api"))

"""The programs of these tests."""

from __future__ import annotations

import pytest
from api_helpers import Programs


@pytest.fixture(scope="session")
def programs() -> Programs:
    return Programs()

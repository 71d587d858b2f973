"""One toy cluster for tests that leave it as they found it; those that kill make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toy_cluster import ToyCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyCluster]:
    found = ToyCluster(tmp_path_factory.mktemp("toy"))
    yield found
    found.close()

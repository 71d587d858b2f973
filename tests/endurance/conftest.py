"""One toy cluster for tests that leave it as they found it; those that kill make their own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_cluster import ToyCluster

for folder in ("e2e", "kvstore"):  # clusters as a person starts them, for the runs on Ray; a proxy that cuts
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyCluster]:
    found = ToyCluster(tmp_path_factory.mktemp("toy"))
    yield found
    found.close()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For tests that look at Unix sockets: in a folder with a longer name an instance binds none."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)

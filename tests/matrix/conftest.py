from pathlib import Path

import pytest
from matrix_cases import write_toy_model


@pytest.fixture(scope="session")
def toy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_model(folder)
    return folder

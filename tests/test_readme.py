"""What the README says about the files and the commands is so."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_file_tree_names_every_module_and_none_that_is_gone() -> None:
    specification = importlib.util.spec_from_file_location(
        "file_tree", ROOT / "docs" / "file_tree.py"
    )
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.with_tree(README) == README, "run `make readme`"


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_every_file_that_is_linked_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (path.parent / link).exists(), link


def test_every_make_target_that_is_named_is_there() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = set(re.findall(r"`make ([a-z-]+)`", README)) | set(
        re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)
    )
    assert {"demo", "install", "test"} <= named
    assert named <= targets

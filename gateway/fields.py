"""The fields of a JSON object, each read once and checked; what nobody read is refused.

null counts as absent, as OpenAI's clients send it.
"""

from collections.abc import Mapping, Sequence

from gateway.tokens import check_text
from outrider.serving.errors import InvalidArgument


class Fields:
    """A JSON object at a named place; the place is "" for the body itself."""

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise InvalidArgument(where or "the body", value, "a JSON object")
        self._values: Mapping[str, object] = value
        self._where = where
        self._known: set[str] = set()

    def name(self, field: str) -> str:
        """The field's full name."""
        return f"{self._where}.{field}" if self._where else field

    def take(self, field: str) -> object:
        """The value as it is; None if absent."""
        self._known.add(field)
        return self._values.get(field)

    def text(self, field: str) -> str | None:
        """A text, if there is one."""
        value = self.take(field)
        return None if value is None else as_text(self.name(field), value)

    def boolean(self, field: str) -> bool:
        """True or false; absent = false."""
        value = self.take(field)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise InvalidArgument(self.name(field), value, "true or false")
        return value

    def integer(self, field: str, *, at_least: int, at_most: int) -> int | None:
        """An integer within its bounds, if there is one."""
        value = self.take(field)
        if value is None:
            return None
        return as_integer(self.name(field), value, at_least=at_least, at_most=at_most)

    def number(self, field: str) -> float | None:
        """A number, if there is one. Its bounds are the caller's."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidArgument(self.name(field), value, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidArgument(self.name(field), value, "a number that fits a double") from error

    def must_be_neutral(self, field: str, neutral: Sequence[object], words: str) -> None:
        """Refuses a field that asks for something which is not implemented."""
        value = self.take(field)
        if value is None:
            return
        # 1 == True in Python, not in JSON.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                   for one in neutral):  # fmt: skip
            raise InvalidArgument(self.name(field), value, f"{words}: not implemented")

    def refuse_unknown(self) -> None:
        """Raises InvalidArgument for a field that nobody has read."""
        for field, value in self._values.items():
            if field not in self._known:
                # The name is the client's text: shown escaped.
                shown = ascii(self.name(field))[1:-1][:80]
                raise InvalidArgument(shown, value, "absent: there is no such field")


def as_text(name: str, value: object) -> str:
    """Raises InvalidArgument unless the value is Unicode text."""
    if not isinstance(value, str):
        raise InvalidArgument(name, value, "a text")
    check_text(name, value)
    return value


def as_list(name: str, value: object, *, at_most: int) -> list[object]:
    """Raises InvalidArgument unless the value is a list of so many items at most; None = none."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > at_most:
        shown = f"a list of {len(value)}" if isinstance(value, list) else value
        raise InvalidArgument(name, shown, f"a list of at most {at_most}")
    return value


def as_integer(name: str, value: object, *, at_least: int, at_most: int) -> int:
    """Raises InvalidArgument unless the value is an integer within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise InvalidArgument(name, value, f"an integer between {at_least} and {at_most}")
    return value

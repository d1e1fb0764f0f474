"""Stop strings in a growing text. Knows text only, no tokens and no requests."""

from collections.abc import Sequence


class StopStrings:
    """Cuts one growing text before the first stop string that becomes complete in it.

    Where several become complete with the same character, the longest counts. The result does not
    depend on how the text is cut into pushes. One per sequence; not for several threads.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Add text; returns what is now certain to stay, and whether a stop string was met.

        One that becomes complete where it may not stop anything is text like any other.

        Held back is exactly the longest end of the text that a stop string starts with.
        Once stopped, everything further is dropped.
        """
        if self._stopped:
            return "", True
        known = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            completed = 0
            for matcher in self._matchers:
                if matcher.advance(character) and may_stop:
                    completed = max(completed, len(matcher.stop))
            if completed:
                self._held = ""
                self._stopped = True
                return known[: end - completed], True
        undecided = max((matcher.undecided_length for matcher in self._matchers), default=0)
        certain_length = len(known) - undecided
        self._held = known[certain_length:]
        return known[:certain_length], False

    def finish(self) -> str:
        """The text ends here: returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string is empty; it needs at least one character")
        self.stop = stop
        self.matched_length = 0
        self._borders = _borders(stop)

    @property
    def undecided_length(self) -> int:
        """Characters at the text's end that may still turn out to be the stop string's first."""
        return self._borders[-1] if self.matched_length == len(self.stop) else self.matched_length

    def advance(self, character: str) -> bool:
        """Take the text's next character; has the stop string become complete?"""
        length = self.matched_length
        if length == len(self.stop):  # where it stopped nothing
            length = self._borders[-1]
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        if self.stop[length] == character:
            length += 1
        self.matched_length = length
        return length == len(self.stop)


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + 1 if stop[length] == character else 0)
    return borders

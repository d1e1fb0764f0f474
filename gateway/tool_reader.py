"""Reads the calls of functions out of an answer as its text comes: what is text for the user, what
is a call. What turns out to be no call is text.
"""

import json
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.tool_format import ToolFormat

_ID_SIGNS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, whole or, with more Arguments to come, its beginning."""

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """More of a call's arguments."""

    index: int
    text: str


Part = Content | Call | Arguments


class ToolReader(Protocol):
    """One answer's."""

    def push(self, text: str) -> list[Part]:
        """What is certain with this piece of text."""

    def finish(self) -> list[Part]:
        """The rest: the answer ends here."""


def read(reader: ToolReader, text: str, *, is_last: bool) -> list[Part]:
    """What is certain with this piece of an answer; everything with its last one."""
    parts = reader.push(text)
    return [*parts, *reader.finish()] if is_last else parts


class NamedReader:
    """The whole answer is the arguments of one function, which was asked for by name."""

    def __init__(self, name: str) -> None:
        self._call = Call(index=0, call_id=_call_id(24), name=name, arguments="")
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if not self._has_begun:
            self._has_begun = True
            parts.append(self._call)
        if text:
            parts.append(Arguments(index=0, text=text))
        return parts

    def finish(self) -> list[Part]:
        return self.push("")


class FormatReader:
    """Calls in a model's own format. A call comes as a whole, once it is complete."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self._format = tool_format
        self._names = names
        self._held = ""  # undecided: space, part of an opening, or a call that is under way
        self._num_calls = 0
        # Without an opening, the first character decides.
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        if not self._format.opening:
            return self._without_opening()
        parts: list[Part] = []
        while True:
            begin = self._held.find(self._format.opening)
            if begin < 0:
                parts += self._content(len(self._held) - self._num_undecided())
                return parts
            end = self._end_of_call(begin)
            if end < 0:
                parts += self._content(_end_of_text(self._held, begin))
                return parts
            before, one, self._held = (
                self._held[:begin].rstrip(), self._held[begin:end], self._held[end:],
            )  # fmt: skip
            if before:
                parts.append(Content(text=before))
            parts += self._calls(one)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        begin = held.find(self._format.opening) if not self._is_text else -1
        if begin < 0:
            return self._rest(held)
        # An answer may end with its call where the closing is missing.
        return [*self._rest(held[:begin].rstrip()), *self._calls(held[begin:])]

    def _without_opening(self) -> list[Part]:
        begins = self._held.lstrip()
        if begins and begins[0] not in "{[":
            self._is_text = True
        return self._content(len(self._held)) if self._is_text else []

    def _content(self, length: int) -> list[Part]:
        text, self._held = self._held[:length], self._held[length:]
        return [Content(text=text)] if text else []

    def _rest(self, text: str) -> list[Part]:
        # Between calls and behind them, space means nothing.
        if not text or (self._num_calls and not text.strip()):
            return []
        return [Content(text=text)]

    def _num_undecided(self) -> int:
        """Characters at the end that may become the opening of a call, and space before it."""
        opening = self._format.opening
        for length in range(min(len(opening) - 1, len(self._held)), 0, -1):
            if self._held.endswith(opening[:length]):
                begin = len(self._held) - length
                return len(self._held) - _end_of_text(self._held, begin)
        return len(self._held) - _end_of_text(self._held, len(self._held))

    def _end_of_call(self, begin: int) -> int:
        """Behind the closing; -1 if it is not there yet. A closing inside a JSON text is none."""
        closing = self._format.closing
        if not closing:
            return -1
        body = begin + len(self._format.opening)
        at = self._held.find(closing, body)
        while at >= 0 and _is_open(self._held[body:at]):
            at = self._held.find(closing, at + 1)
        return -1 if at < 0 else at + len(closing)

    def _calls(self, text: str) -> list[Part]:
        """The calls of a text in the format, or the text as it is."""
        body = text.removeprefix(self._format.opening).removesuffix(self._format.closing)
        found = _objects(body)
        calls: list[Part] = []
        for value in found or []:
            call = self._call(value, self._num_calls + len(calls))
            if call is None:
                return [Content(text=text)]
            calls.append(call)
        if not calls:
            return self._rest(text)
        self._num_calls += len(calls)
        return calls

    def _call(self, value: object, index: int) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self._format.arguments_key)
        if isinstance(arguments, str):
            values = _objects(arguments) or []
            arguments = values[0] if len(values) == 1 else None
        if not isinstance(arguments, dict):
            return None
        return Call(
            index=index,
            call_id=_call_id(self._format.id_characters),
            name=value["name"],
            arguments=json.dumps(arguments, ensure_ascii=False),
        )


def _end_of_text(text: str, begin: int) -> int:
    """Where the space before `begin` starts."""
    return len(text[:begin].rstrip())


def _is_open(text: str) -> bool:
    """A JSON text has been begun and is not complete: it ends inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _objects(text: str) -> list[object] | None:
    """The JSON values that a text is made of, a list counting as its items; None if it is not."""
    decoder = json.JSONDecoder()
    values: list[object] = []
    at = 0
    try:
        while True:
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n;"))
            if at == len(text):
                return values
            value, at = decoder.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return None


def _call_id(length: int) -> str:
    signs = "".join(secrets.choice(_ID_SIGNS) for _ in range(length))
    return signs if length < 24 else f"call_{signs}"

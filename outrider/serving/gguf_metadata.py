"""The key-value section at the head of a GGUF file, read without touching its tensors.

Follows the published format (versions 2 and 3, little-endian). Knows nothing of what keys mean.
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.serving.errors import ConfigurationError

GGUFScalar = int | float | bool | str
GGUFValue = GGUFScalar | Sequence[GGUFScalar]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_HEADER: Final = struct.Struct("<4sIQQ")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
# Value type -> one character of the struct module; every size is fixed by the format.
_NUMBERS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class CorruptGGUF(ConfigurationError):
    """A file is not a readable GGUF file; the text says where and why."""


@dataclass(slots=True)
class _Cursor:
    """A position in the mapped file; every read is checked against the file's end."""

    path: Path
    data: mmap.mmap
    position: int

    def take(self, size: int, what: str) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise CorruptGGUF(
                f"{self.path}: {what} needs {size} bytes at offset {self.position}, "
                f"the file ends at {len(self.data)}"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def text(self, what: str) -> str:
        (length,) = _U64.unpack(self.take(8, what))
        start = self.position
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptGGUF(
                f"{self.path}: {what} at offset {start} is not valid UTF-8: {error}"
            ) from error

    def number_type(self, what: str) -> int:
        (value_type,) = _U32.unpack(self.take(4, what))
        return int(value_type)


def read_gguf_metadata(path: Path) -> dict[str, GGUFValue]:
    """Read every key of a GGUF file's metadata; arrays come as lists.

    Raises CorruptGGUF for anything but a well-formed head, and OSError where the file
    cannot be opened.
    """
    with path.open("rb") as file:
        if path.stat().st_size < _HEADER.size:
            raise CorruptGGUF(f"{path}: {path.stat().st_size} bytes are too few for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_section(_Cursor(path=path, data=data, position=0))


def _read_section(cursor: _Cursor) -> dict[str, GGUFValue]:
    magic, version, _, key_count = _HEADER.unpack(cursor.take(_HEADER.size, "the header"))
    if magic != _MAGIC:
        raise CorruptGGUF(f"{cursor.path}: starts with {magic!r}, a GGUF file with {_MAGIC!r}")
    if version not in _VERSIONS:
        raise CorruptGGUF(
            f"{cursor.path}: GGUF version {version} is not one of {_VERSIONS} (little-endian)"
        )
    values: dict[str, GGUFValue] = {}
    for index in range(key_count):
        key = cursor.text(f"key {index} of {key_count}")
        if key in values:
            raise CorruptGGUF(f"{cursor.path}: key {key!r} appears twice")
        values[key] = _read_value(cursor, f"value of {key!r}")
    return values


def _read_value(cursor: _Cursor, what: str) -> GGUFValue:
    value_type = cursor.number_type(what)
    if value_type == _STRING:
        return cursor.text(what)
    if value_type == _ARRAY:
        return _read_array(cursor, what)
    scalar = _number_format(cursor, value_type, what)
    (value,) = struct.unpack(f"<{scalar}", cursor.take(struct.calcsize(f"<{scalar}"), what))
    return value  # type: ignore[no-any-return]


def _read_array(cursor: _Cursor, what: str) -> Sequence[GGUFScalar]:
    element_type = cursor.number_type(what)
    (length,) = _U64.unpack(cursor.take(8, what))
    if element_type == _STRING:
        return _read_strings(cursor, length, what)
    scalar = _number_format(cursor, element_type, what)
    raw = cursor.take(length * struct.calcsize(f"<{scalar}"), what)
    return list(struct.unpack(f"<{length}{scalar}", raw))


def _read_strings(cursor: _Cursor, length: int, what: str) -> list[str]:
    # A vocabulary has some 10^5 strings, so this loop does without the cursor's calls.
    data, size = cursor.data, len(cursor.data)
    if length * 8 > size - cursor.position:
        raise CorruptGGUF(
            f"{cursor.path}: {what} claims {length} strings at offset {cursor.position}, "
            f"the file ends at {size}"
        )
    position = cursor.position
    strings: list[str] = []
    unpack = _U64.unpack_from
    try:
        for _ in range(length):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > size:
                break
            strings.append(data[start:position].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorruptGGUF(
            f"{cursor.path}: {what}, string {len(strings)}, is not valid UTF-8: {error}"
        ) from error
    except struct.error:
        position = size + 1
    if position > size:
        raise CorruptGGUF(
            f"{cursor.path}: {what}, string {len(strings)} of {length}, "
            f"runs past the file's end at {size}"
        )
    cursor.position = position
    return strings


def _number_format(cursor: _Cursor, value_type: int, what: str) -> str:
    if value_type not in _NUMBERS:
        raise CorruptGGUF(f"{cursor.path}: {what} has the unknown value type {value_type}")
    return _NUMBERS[value_type]

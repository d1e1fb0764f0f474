"""Bytes from one process to another of the same host: a ring in a file of /dev/shm.

The reader creates it, the writer attaches and unlinks the file, so nothing is left behind by two
processes that die. One writer, one reader; neither waits for the other. The writer overwrites what
is `capacity` bytes old, and the reader sees that it did. Knows nothing of what the bytes mean.
"""

import hashlib
import mmap
import os
import re
import secrets
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

SHARED_MEMORY_DIRECTORY: Final = Path("/dev/shm")
RING_NAME_PREFIX: Final = "outrider-"
LARGEST_RING_BYTES: Final = 2**30

_NAME = re.compile(re.escape(RING_NAME_PREFIX) + r"[A-Za-z0-9_-]{1,100}")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_MAGIC = int.from_bytes(b"OUTRING1", "little")

# The header: four native 8-byte numbers, aligned, so that each is stored and loaded in one piece.
# The counters only grow: bytes that the writer began to write, bytes that it has written.
_MAGIC_INDEX, _CAPACITY_INDEX, _RESERVED_INDEX, _WRITTEN_INDEX = range(4)
_HEADER_BYTES = 64


class SharedRing:
    """One end of a ring. May be used and closed by different threads.

    The other process is not trusted with more than the bytes: what it does to the header can only
    make reads None or their content wrong. (A process of the same user can also shrink the file,
    which ends this one; it could end it anyway.)
    """

    def __init__(self, *, path: Path, mapping: mmap.mmap, capacity: int, is_reader: bool) -> None:
        self._path = path
        self._map = mapping
        self._capacity = capacity
        self._is_reader = is_reader
        self._view = memoryview(mapping)
        self._header = self._view[:_HEADER_BYTES].cast("Q")
        # Of this end's own writes: the header could have been changed by the other.
        self._written = 0
        self._is_closed = False
        # Taking and giving it also keeps the processor from moving a copy across the counters.
        self._lock = threading.Lock()

    @classmethod
    def create(cls, name: str, capacity: int) -> "SharedRing":
        """The reader's end: a new file, of this user alone, its memory already set aside.

        Sparse memory would be cheaper until it is used, but a writer that finds /dev/shm full is
        killed. Raises OSError if there is no room or the name is taken, ValueError for a name or a
        capacity out of bounds.
        """
        path = _path_of(name)
        if not 1 <= capacity <= LARGEST_RING_BYTES:
            raise ValueError(f"capacity is {capacity}, must be 1 to {LARGEST_RING_BYTES}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + capacity)
            mapping = mmap.mmap(descriptor, _HEADER_BYTES + capacity)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        ring = cls(path=path, mapping=mapping, capacity=capacity, is_reader=True)
        ring._header[_CAPACITY_INDEX] = capacity
        ring._header[_MAGIC_INDEX] = _MAGIC
        return ring

    @classmethod
    def attach(cls, name: str) -> "SharedRing":
        """The writer's end: maps the file and unlinks it.

        Raises OSError if it is not there or not this user's, ValueError for a name that create
        would not take or a file that is no unused ring; that file is left as it is.
        """
        path = _path_of(name)
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            capacity = status.st_size - _HEADER_BYTES
            if not stat.S_ISREG(status.st_mode) or not 1 <= capacity <= LARGEST_RING_BYTES:
                raise ValueError(f"{name} is no ring: a file of {status.st_size} bytes")
            mapping = mmap.mmap(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        ring = cls(path=path, mapping=mapping, capacity=capacity, is_reader=False)
        expected = [_MAGIC, capacity, 0, 0]
        found = list(ring._header[: len(expected)])
        if found != expected:
            ring.close()
            raise ValueError(f"{name} is no unused ring: its header is {found}, must be {expected}")
        path.unlink(missing_ok=True)
        return ring

    @property
    def name(self) -> str:
        """What the other end attaches by."""
        return self._path.name

    @property
    def capacity(self) -> int:
        """Bytes that it holds."""
        return self._capacity

    def write(self, data: bytes | memoryview) -> int:
        """Appends; returns the offset to read at: bytes written to the ring before these.

        Raises ValueError if it is more than the capacity, or after close.
        """
        source = memoryview(data).cast("B")
        size = len(source)
        if size > self._capacity:
            raise ValueError(f"{size} bytes, must be at most the ring's capacity {self._capacity}")
        with self._lock:
            if self._is_closed:
                raise ValueError("the ring is closed")
            offset = self._written
            self._written += size
            # Before the copy: the reader must not take old bytes for whole while they change.
            self._header[_RESERVED_INDEX] = self._written
        with self._lock:
            if self._is_closed:
                raise ValueError("the ring is closed")
            start = _HEADER_BYTES + offset % self._capacity
            head = min(size, _HEADER_BYTES + self._capacity - start)
            self._view[start : start + head] = source[:head]
            self._view[_HEADER_BYTES : _HEADER_BYTES + size - head] = source[head:]
        with self._lock:
            if not self._is_closed:
                self._header[_WRITTEN_INDEX] = offset + size
        return offset

    def read(self, offset: int, size: int) -> bytes | None:
        """The bytes there; None where they were not written yet or are overwritten.

        None also after close, and for numbers that no writer could mean.
        """
        if offset < 0 or not 0 <= size <= self._capacity:
            return None
        with self._lock:
            if not self._holds(offset, size):
                return None
            start = _HEADER_BYTES + offset % self._capacity
            head = min(size, _HEADER_BYTES + self._capacity - start)
            data = bytes(self._view[start : start + head])
            if head < size:
                data += bytes(self._view[_HEADER_BYTES : _HEADER_BYTES + size - head])
        with self._lock:
            # Once more: the writer may have come round during the copy.
            return data if self._holds(offset, size) else None

    def close(self) -> None:
        """Unmaps it; the reader's end also removes the file if nobody has attached."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._header.release()
            self._view.release()
            self._map.close()
        if self._is_reader:
            with suppress(FileNotFoundError):
                self._path.unlink()

    def _holds(self, offset: int, size: int) -> bool:
        return (
            not self._is_closed
            and offset + size <= self._header[_WRITTEN_INDEX]
            and self._header[_RESERVED_INDEX] <= offset + self._capacity
        )


def random_ring_name() -> str:
    """A name for `create` that nobody else has."""
    return f"{RING_NAME_PREFIX}{secrets.token_hex(16)}"


def host_id() -> str:
    """Equal only where two processes can map the same files; "" where this one can map none.

    Of the kernel's boot, the /dev/shm that this process sees, and its user: a ring is its user's.
    Two containers of one host differ unless they share /dev/shm.
    """
    try:
        boot_id = _BOOT_ID_FILE.read_text().strip()
        status = SHARED_MEMORY_DIRECTORY.stat()
    except OSError:
        return ""
    if not boot_id or not os.access(SHARED_MEMORY_DIRECTORY, os.R_OK | os.W_OK | os.X_OK):
        return ""
    identity = f"{boot_id} {status.st_dev} {status.st_ino} {os.geteuid()}"
    return hashlib.sha256(identity.encode()).hexdigest()


def _path_of(name: str) -> Path:
    """Raises ValueError for a name that could lead anywhere else."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"ring name is {name!r}, must be {RING_NAME_PREFIX}* of letters, digits, - and _"
        )
    return SHARED_MEMORY_DIRECTORY / name

"""The ring between two processes: what is read is what was written, or nothing."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serving import shared_ring
from outrider.serving.shared_ring import (
    LARGEST_RING_BYTES,
    RING_NAME_PREFIX,
    SHARED_MEMORY_DIRECTORY,
    SharedRing,
    host_id,
    random_ring_name,
)

# Header: magic, capacity, reserved, written.
RESERVED, WRITTEN = 2, 3


@pytest.fixture
def reader() -> Iterator[SharedRing]:
    ring = SharedRing.create(random_ring_name(), 100)
    yield ring
    ring.close()


@pytest.fixture
def writer(reader: SharedRing) -> Iterator[SharedRing]:
    ring = SharedRing.attach(reader.name)
    yield ring
    ring.close()


def path_of(name: str) -> Path:
    return SHARED_MEMORY_DIRECTORY / name


def header_of(name: str) -> memoryview:
    """The header as another process could write it."""
    with path_of(name).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))[:64].cast("Q")


def test_what_is_written_is_read_at_its_offset_and_around_the_end(
    reader: SharedRing, writer: SharedRing
) -> None:
    assert writer.capacity == reader.capacity == 100
    assert writer.write(b"a" * 60) == 0
    assert writer.write(memoryview(bytes(range(60)))) == 60
    assert reader.read(60, 60) == bytes(range(60))
    assert reader.read(95, 10) == bytes(range(35, 45))
    assert reader.read(120, 0) == b""
    assert writer.write(b"") == 120


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 32), max_size=20), capacity=st.integers(32, 70))
def test_exactly_the_last_capacity_bytes_can_be_read(sizes: list[int], capacity: int) -> None:
    reader = SharedRing.create(random_ring_name(), capacity)
    writer = SharedRing.attach(reader.name)
    text = bytes(number % 251 for number in range(sum(sizes)))
    end = 0
    for size in sizes:
        assert writer.write(text[end : end + size]) == end
        end += size
    for offset in range(end + 2):
        for size in (1, 5, capacity):
            is_there = offset >= end - capacity and offset + size <= end
            expected = text[offset : offset + size] if is_there else None
            assert reader.read(offset, size) == expected, (offset, size, end)
    writer.close()
    reader.close()


def test_what_was_never_written_or_is_overwritten_or_absurd_is_none(
    reader: SharedRing, writer: SharedRing
) -> None:
    assert reader.read(0, 1) is None
    writer.write(b"x" * 80)
    writer.write(b"y" * 40)
    assert reader.read(20, 60) == b"x" * 60
    assert reader.read(19, 1) is None
    assert reader.read(100, 21) is None
    for offset, size in ((-1, 1), (20, -1), (2**64 - 1, 1), (2**70, 8), (20, 101), (20, 2**63)):
        assert reader.read(offset, size) is None


def test_a_write_larger_than_the_ring_is_refused_and_changes_nothing(
    reader: SharedRing, writer: SharedRing
) -> None:
    writer.write(b"kept")
    with pytest.raises(ValueError, match="101 bytes, must be at most the ring's capacity 100"):
        writer.write(b"z" * 101)
    assert reader.read(0, 4) == b"kept"


def test_a_header_that_the_other_end_spoilt_makes_reads_none(reader: SharedRing) -> None:
    header = header_of(reader.name)
    writer = SharedRing.attach(reader.name)
    writer.write(b"x" * 50)
    assert reader.read(0, 50) == b"x" * 50
    header[RESERVED] = 2**64 - 1
    assert reader.read(0, 50) is None
    header[RESERVED] = 50
    header[WRITTEN] = 0
    assert reader.read(0, 50) is None
    header[WRITTEN] = 2**64 - 1
    assert reader.read(40, 101) is None
    writer.close()


class OvertakenView:
    """The reader's view of a ring whose writer comes round while a copy is made."""

    def __init__(self, view: memoryview, writer: SharedRing) -> None:
        self._view = view
        self._writer = writer

    def __getitem__(self, index: slice) -> memoryview:
        self._writer.write(b"2" * 60)
        return self._view[index]

    def release(self) -> None:
        self._view.release()


def test_bytes_that_are_overwritten_during_the_copy_are_none(
    reader: SharedRing, writer: SharedRing
) -> None:
    writer.write(b"1" * 60)
    reader._view = OvertakenView(reader._view, writer)
    assert reader.read(0, 60) is None
    assert reader.read(20, 100) is None


FURIOUS_WRITER = """
import sys
from outrider.serving.shared_ring import SharedRing
ring = SharedRing.attach(sys.argv[1])
size = int(sys.argv[2])
print("attached", flush=True)
number = 0
while True:
    ring.write(number.to_bytes(8, "little") * (size // 8))
    number += 1
"""


def test_a_process_that_writes_without_pause_never_yields_torn_bytes() -> None:
    # Twice the record: half of all reads meet the writer.
    size = 2**16
    ring = SharedRing.create(random_ring_name(), 2 * size)
    process = subprocess.Popen(
        [sys.executable, "-c", FURIOUS_WRITER, ring.name, str(size)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"attached\n"
    read_count = lost_count = 0
    try:
        header = ring._header
        deadline = time.monotonic() + 20
        ends = time.monotonic() + 1.5
        while (time.monotonic() < ends or not (read_count and lost_count)) and (
            time.monotonic() < deadline
        ):
            number = header[WRITTEN] // size - 1
            data = ring.read(number * size, size) if number >= 0 else None
            if data is None:
                lost_count += 1
            else:
                read_count += 1
                assert data == number.to_bytes(8, "little") * (size // 8)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        ring.close()
    assert read_count and lost_count, (read_count, lost_count)


def test_the_file_is_its_users_alone_and_gone_once_the_writer_has_attached() -> None:
    ring = SharedRing.create(random_ring_name(), 1000)
    path = path_of(ring.name)
    assert path.stat().st_mode & 0o777 == 0o600
    # Set aside, not sparse: a writer that met a full /dev/shm would be killed by a signal.
    assert path.stat().st_blocks * 512 >= 1064
    writer = SharedRing.attach(ring.name)
    assert not path.exists()
    writer.write(b"still here")
    assert ring.read(0, 10) == b"still here"
    writer.close()
    assert ring.read(0, 10) == b"still here"
    ring.close()


def test_close_removes_a_file_that_nobody_attached_to_and_may_be_called_twice() -> None:
    ring = SharedRing.create(random_ring_name(), 100)
    assert path_of(ring.name).exists()
    ring.close()
    assert not path_of(ring.name).exists()
    ring.close()
    assert ring.read(0, 0) is None


def test_a_closed_writer_refuses_to_write(reader: SharedRing, writer: SharedRing) -> None:
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"x")


def test_a_ring_can_be_closed_while_another_thread_reads() -> None:
    ring = SharedRing.create(random_ring_name(), 2**20)
    ring.write(b"x" * 2**20)
    results: list[bool] = []

    def read() -> None:
        while (data := ring.read(0, 2**20)) is not None:
            results.append(data.count(b"x") == 2**20)

    thread = threading.Thread(target=read)
    thread.start()
    while not results:
        time.sleep(0.001)
    ring.close()
    thread.join(10)
    assert not thread.is_alive() and all(results)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "outrider-",
        "psm_12345678",
        "../etc/outrider-1",
        "outrider-../x",
        "outrider-a/b",
        "/dev/shm/outrider-1",
        "outrider-\0",
        "outrider-a\n",
        "outrider-" + "a" * 101,
    ],
)
def test_a_name_that_could_be_another_file_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="ring name"):
        SharedRing.attach(name)
    with pytest.raises(ValueError, match="ring name"):
        SharedRing.create(name, 100)


@pytest.mark.parametrize("capacity", [0, -1, LARGEST_RING_BYTES + 1])
def test_a_capacity_out_of_bounds_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        SharedRing.create(random_ring_name(), capacity)


def test_create_refuses_a_name_that_is_taken_and_leaves_that_file() -> None:
    ring = SharedRing.create(random_ring_name(), 100)
    with pytest.raises(FileExistsError):
        SharedRing.create(ring.name, 100)
    assert path_of(ring.name).exists()
    ring.close()


def test_a_full_memory_is_an_error_that_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    name = random_ring_name()
    with pytest.raises(OSError, match="No space left"):
        SharedRing.create(name, 100)
    assert not path_of(name).exists()


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"x" * 200, b"OUTRING1" + bytes(100)])
def test_attach_refuses_a_file_that_is_no_ring_and_leaves_it(content: bytes) -> None:
    path = path_of(random_ring_name())
    path.write_bytes(content)
    try:
        with pytest.raises(ValueError, match="is no"):
            SharedRing.attach(path.name)
        assert path.read_bytes() == content
    finally:
        path.unlink()


def test_attach_refuses_links_pipes_and_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SharedRing.attach(random_ring_name())
    ring = SharedRing.create(random_ring_name(), 100)
    link = path_of(random_ring_name())
    link.symlink_to(path_of(ring.name))
    pipe = path_of(random_ring_name())
    os.mkfifo(pipe)
    try:
        with pytest.raises(OSError, match="symbolic"):
            SharedRing.attach(link.name)
        with pytest.raises(ValueError, match="no ring"):
            SharedRing.attach(pipe.name)
    finally:
        link.unlink()
        pipe.unlink()
        ring.close()


def test_attach_refuses_a_ring_that_has_been_written_to(reader: SharedRing) -> None:
    reader.write(b"x")
    with pytest.raises(ValueError, match="unused"):
        SharedRing.attach(reader.name)
    assert path_of(reader.name).exists()


def test_nothing_is_left_of_two_processes_that_are_killed(reader: SharedRing) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FURIOUS_WRITER, reader.name, "8"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"attached\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not path_of(reader.name).exists()


def test_names_differ_and_have_the_prefix() -> None:
    names = {random_ring_name() for _ in range(10)}
    assert len(names) == 10
    assert all(name.startswith(RING_NAME_PREFIX) for name in names)


def test_the_host_id_is_equal_in_another_process_of_this_host() -> None:
    code = "from outrider.serving.shared_ring import host_id; print(host_id())"
    theirs = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert theirs == host_id() != ""


def test_the_host_id_tells_boots_memories_and_users_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {host_id()}
    with monkeypatch.context() as patch:
        boot_id = tmp_path / "boot_id"
        boot_id.write_text("another\n")
        patch.setattr(shared_ring, "_BOOT_ID_FILE", boot_id)
        ids.add(host_id())
    with monkeypatch.context() as patch:
        patch.setattr(shared_ring, "SHARED_MEMORY_DIRECTORY", tmp_path)
        ids.add(host_id())
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        ids.add(host_id())
    assert len(ids) == 4 and "" not in ids


def test_there_is_no_host_id_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHARED_MEMORY_DIRECTORY", "_BOOT_ID_FILE"):
        with monkeypatch.context() as patch:
            patch.setattr(shared_ring, name, tmp_path / "absent")
            assert host_id() == ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert host_id() == ""

"""The streams that are open: one TargetLink each, and the table of them. Owned by the event loop.

Knows no message's meaning but Pong and GoAway.
"""

import asyncio
from collections.abc import Iterable

from draft_service.counters import Counters
from draft_service.link_sessions import LinkTerms
from outrider.v1 import draft_pb2

# Answers that may wait for a target that does not read. Those beyond are dropped: a draft is of
# no use later, and what a Resync or Refuse said is said again at the row's next Step.
MAX_WAITING_ANSWERS = 256

# Messages of one stream that may wait for the engine thread before it is read no further.
MAX_WAITING_REQUESTS = 256
# And their bytes: features may make a message large.
MAX_WAITING_BYTES = 64 * 2**20
CONGESTION_PAUSE_SECONDS = 0.005


class TargetLink:
    """One stream of one target: the engine thread's Endpoint."""

    def __init__(self, terms: LinkTerms, counters: Counters) -> None:
        self.terms = terms
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[draft_pb2.LinkResponse] = asyncio.Queue(MAX_WAITING_ANSWERS)
        self._ended: asyncio.Future[str] = self._loop.create_future()
        # Each written by one thread: the event loop's, the engine's.
        self._received_count = self._received_bytes = 0
        self._handled_count = self._handled_bytes = 0

    async def make_room(self, size: int) -> None:
        """Returns once one more message, of so many bytes, may go to the engine thread, and counts
        it.
        """
        while (
            self._received_count - self._handled_count >= MAX_WAITING_REQUESTS
            or self._received_bytes - self._handled_bytes >= MAX_WAITING_BYTES
        ):
            await asyncio.sleep(CONGESTION_PAUSE_SECONDS)
        self._received_count += 1
        self._received_bytes += size

    def mark_handled(self, size: int) -> None:
        """Called by the engine thread, once for each message."""
        self._handled_count += 1
        self._handled_bytes += size

    def deliver(self, responses: list[draft_pb2.LinkResponse]) -> None:
        """Called by the engine thread."""
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self.send, responses)

    def send(self, responses: Iterable[draft_pb2.LinkResponse]) -> None:
        """Puts answers into the stream, in order."""
        for response in responses:
            try:
                self._answers.put_nowait(response)
            except asyncio.QueueFull:
                self._counters.count(
                    "answers that a target did not read",
                    f"target {self.terms.target_boot_id:016x}, {MAX_WAITING_ANSWERS} waiting",
                )

    async def next_answer(self) -> draft_pb2.LinkResponse:
        """The next one to be written."""
        return await self._answers.get()

    def end(self, reason: str) -> None:
        """Makes the stream end with UNAVAILABLE."""
        if not self._ended.done():
            self._ended.set_result(reason)

    @property
    def ended(self) -> "asyncio.Future[str]":
        """Done, with the reason, once the stream is to end."""
        return self._ended


class LinkTable:
    """The open streams by the target's boot id: at most one each."""

    def __init__(self) -> None:
        self._links: dict[int, TargetLink] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def find(self, target_boot_id: int) -> TargetLink | None:
        """The target's stream."""
        return self._links.get(target_boot_id)

    def add(self, link: TargetLink) -> None:
        """A new stream; the target's older one ends."""
        older = self._links.get(link.terms.target_boot_id)
        if older is not None:
            older.end(
                f"target {link.terms.target_boot_id:016x} opened stream "
                f"{link.terms.stream_epoch} behind {older.terms.stream_epoch}"
            )
        self._links[link.terms.target_boot_id] = link
        self._is_empty.clear()

    def remove(self, link: TargetLink) -> None:
        """The stream has ended."""
        if self._links.get(link.terms.target_boot_id) is link:
            del self._links[link.terms.target_boot_id]
        if not self._links:
            self._is_empty.set()

    def go_away(self, reason: str) -> None:
        """Tells every target that this process stops soon."""
        message = draft_pb2.LinkResponse(go_away=draft_pb2.GoAway(reason=reason))
        for link in self._links.values():
            link.send([message])

    def end_all(self, reason: str) -> None:
        """Ends every stream with UNAVAILABLE."""
        for link in list(self._links.values()):
            link.end(reason)

    async def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Whether all streams have ended within the time."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

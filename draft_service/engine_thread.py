"""The loop of the one thread that owns the drafter, and its mailbox.

The event loop puts messages in; answers go back through each link's `deliver`, which must be
callable from this thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic

from draft_service.drafters.drafter import State
from draft_service.link_sessions import LinkTerms
from draft_service.proposer import Proposer
from outrider.v1 import draft_pb2

Deliver = Callable[[list[draft_pb2.LinkResponse]], None]


@dataclass(frozen=True, slots=True)
class _Attached:
    terms: LinkTerms
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class _Received:
    terms: LinkTerms
    request: draft_pb2.LinkRequest
    received_at: float


@dataclass(frozen=True, slots=True)
class _Detached:
    terms: LinkTerms


_Letter = _Attached | _Received | _Detached


class Mailbox:
    """What the event loop tells the engine thread, in order. Thread-safe."""

    def __init__(self) -> None:
        self._letters: SimpleQueue[_Letter | None] = SimpleQueue()

    def attach(self, terms: LinkTerms, deliver: Deliver) -> None:
        """A stream's handshake succeeded."""
        self._letters.put(_Attached(terms, deliver))

    def receive(self, terms: LinkTerms, request: draft_pb2.LinkRequest) -> None:
        """A message came on an attached stream."""
        self._letters.put(_Received(terms, request, time.monotonic()))

    def detach(self, terms: LinkTerms) -> None:
        """The stream ended."""
        self._letters.put(_Detached(terms))

    def stop(self) -> None:
        """Ends the loop once everything before is done."""
        self._letters.put(None)

    @property
    def waiting(self) -> int:
        """Letters that the engine thread has not taken, about."""
        return self._letters.qsize()

    def take(self, *, wait: bool) -> list[_Letter | None]:
        """Everything at hand; with `wait` at least one."""
        letters = []
        if wait:
            letters.append(self._letters.get())
        while True:
            try:
                letters.append(self._letters.get_nowait())
            except Empty:
                return letters


class EngineLoop(Generic[State]):
    """Turn after turn: all messages at hand, one batch of proposals, the answers; and one piece of
    preparation when nothing waits.
    """

    def __init__(self, *, proposer: Proposer[State], mailbox: Mailbox) -> None:
        self._proposer = proposer
        self._mailbox = mailbox
        self._deliver: dict[LinkTerms, Deliver] = {}

    def run(self) -> None:
        """Until Mailbox.stop. An exception that leaves it is the end of the service."""
        proposer = self._proposer
        while True:
            letters = self._mailbox.take(wait=not proposer.has_unprepared)
            if not letters:
                proposer.prepare()
            for letter in letters:
                if letter is None:
                    return
                self._read(letter)
            proposer.propose()
            self._send()

    def _read(self, letter: _Letter) -> None:
        if isinstance(letter, _Received):
            self._proposer.receive(letter.terms, letter.request, letter.received_at)
        elif isinstance(letter, _Attached):
            self._deliver[letter.terms] = letter.deliver
            self._proposer.attach(letter.terms)
        else:
            del self._deliver[letter.terms]
            self._proposer.detach(letter.terms)

    def _send(self) -> None:
        by_link: dict[LinkTerms, list[draft_pb2.LinkResponse]] = {}
        for terms, response in self._proposer.take_answers():
            by_link.setdefault(terms, []).append(response)
        for terms, responses in by_link.items():
            deliver = self._deliver.get(terms)
            # A stream may have ended in the same turn.
            if deliver is not None:
                deliver(responses)

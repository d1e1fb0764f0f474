"""The loop of the one thread that owns the drafter, and its mailbox.

The event loop puts messages in; answers go back through each stream's Endpoint.
"""

import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol

from draft_service.drafters.drafter import State
from draft_service.link_sessions import LinkTerms
from draft_service.proposer import Proposer
from outrider.v1 import draft_pb2


class Endpoint(Protocol):
    """A stream, as the engine thread sees it. Both methods are called on that thread."""

    def deliver(self, responses: list[draft_pb2.LinkResponse]) -> None:
        """Puts answers into the stream, in order."""

    def mark_handled(self, size: int) -> None:
        """One more of its messages, of so many bytes, has been dealt with."""


@dataclass(frozen=True, slots=True)
class _Attached:
    terms: LinkTerms
    endpoint: Endpoint


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

    def attach(self, terms: LinkTerms, endpoint: Endpoint) -> None:
        """A stream's handshake succeeded."""
        self._letters.put(_Attached(terms, endpoint))

    def receive(self, terms: LinkTerms, request: draft_pb2.LinkRequest) -> None:
        """A message came on an attached stream."""
        self._letters.put(_Received(terms, request, time.monotonic()))

    def detach(self, terms: LinkTerms) -> None:
        """The stream ended."""
        self._letters.put(_Detached(terms))

    def stop(self) -> None:
        """Ends the loop once everything before is done."""
        self._letters.put(None)

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
    """Turn after turn: all messages at hand, one batch of proposals, their answers, and then one
    bounded piece of preparation: neither can starve the other.
    """

    def __init__(self, *, proposer: Proposer[State], mailbox: Mailbox) -> None:
        self._proposer = proposer
        self._mailbox = mailbox
        self._endpoints: dict[LinkTerms, Endpoint] = {}

    def run(self) -> None:
        """Until Mailbox.stop. An exception that leaves it is the end of the service."""
        proposer = self._proposer
        while True:
            for letter in self._mailbox.take(wait=not proposer.has_unprepared):
                if letter is None:
                    return
                self._read(letter)
            proposer.propose()
            self._send()
            if proposer.has_unprepared:
                proposer.prepare()
                self._send()

    def _read(self, letter: _Letter) -> None:
        if isinstance(letter, _Received):
            self._proposer.receive(letter.terms, letter.request, letter.received_at)
            self._endpoints[letter.terms].mark_handled(letter.request.ByteSize())
        elif isinstance(letter, _Attached):
            self._endpoints[letter.terms] = letter.endpoint
            self._proposer.attach(letter.terms)
        else:
            del self._endpoints[letter.terms]
            self._proposer.detach(letter.terms)

    def _send(self) -> None:
        by_link: dict[LinkTerms, list[draft_pb2.LinkResponse]] = {}
        for terms, response in self._proposer.take_answers():
            by_link.setdefault(terms, []).append(response)
        for terms, responses in by_link.items():
            # A stream may have ended in the same turn.
            if terms in self._endpoints:
                self._endpoints[terms].deliver(responses)

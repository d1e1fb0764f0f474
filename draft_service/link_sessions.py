"""One link's sequences: by slot, with what was refused, and what the target said of itself."""

from dataclasses import dataclass
from typing import Generic

from draft_service.drafters.drafter import State
from draft_service.sessions import Session
from outrider.serving.shared_ring import SharedRing
from outrider.v1 import draft_pb2

# What a target says of its slots is not trusted with this process's memory.
MAX_REMEMBERED_REFUSALS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTerms:
    """What a Hello settled for its stream. Its identity is the stream's."""

    target_boot_id: int
    stream_epoch: int
    vocab_size: int
    max_draft_length: int
    max_sequences: int
    # Where the target puts features; None = it sends them inline, or none.
    feature_ring: SharedRing | None = None


def terms_of(hello: draft_pb2.Hello, feature_ring: SharedRing | None = None) -> LinkTerms:
    """The terms of a Hello that was not refused."""
    return LinkTerms(
        target_boot_id=hello.target_boot_id,
        stream_epoch=hello.stream_epoch,
        vocab_size=hello.identity.vocab_size,
        max_draft_length=hello.max_draft_length,
        max_sequences=hello.max_sequences,
        feature_ring=feature_ring,
    )


class LinkSessions(Generic[State]):
    """Sessions and refusals of one stream. Owned by the engine thread.

    A refusal is remembered so that a Step of a refused row is refused again: a Resync would make
    the target open it, and be refused, in every step.
    """

    __slots__ = ("_refusals", "_sessions", "terms")

    def __init__(self, terms: LinkTerms) -> None:
        self.terms = terms
        self._sessions: dict[int, Session[State]] = {}
        self._refusals: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, slot: int, generation: int) -> Session[State] | None:
        """The session, if the slot holds this generation."""
        session = self._sessions.get(slot)
        return session if session is not None and session.generation == generation else None

    def holds(self, session: Session[State]) -> bool:
        """It has not been closed or replaced."""
        return self._sessions.get(session.slot) is session

    def add(self, session: Session[State]) -> None:
        """A new session in a free slot."""
        assert session.slot not in self._sessions, session.slot
        self._sessions[session.slot] = session

    def take(self, slot: int) -> Session[State] | None:
        """Removes and returns whatever the slot holds, refusals included."""
        self._refusals.pop(slot, None)
        return self._sessions.pop(slot, None)

    def remember_refusal(self, slot: int, generation: int, reason: int) -> None:
        """Rows of it are refused until it is opened again. The oldest is forgotten for room."""
        self._refusals.pop(slot, None)
        if len(self._refusals) >= MAX_REMEMBERED_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[slot] = (generation, reason)

    def refusal(self, slot: int, generation: int) -> int | None:
        """The reason for which this generation was refused."""
        refused = self._refusals.get(slot)
        return refused[1] if refused is not None and refused[0] == generation else None

    def take_all(self) -> list[Session[State]]:
        """Removes and returns every session."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        self._refusals.clear()
        return sessions

"""Drives a Proposer without streams and threads, with the messages of a target."""

import time
from collections.abc import Sequence
from contextlib import nullcontext

from link_client import Client, Row, hello, open_of

from draft_service.counters import Counters
from draft_service.drafters.drafter import Drafter
from draft_service.link_sessions import terms_of
from draft_service.proposer import Proposer
from outrider.serving.shared_ring import SharedRing
from outrider.v1 import draft_pb2

MOST_PIECES = 10_000


class Driver:
    """One target's stream into a Proposer."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_sequences: int = 100,
        message: draft_pb2.Hello | None = None,
        feature_ring: SharedRing | None = None,
    ) -> None:
        self.counters = Counters()
        self.proposer = Proposer(
            drafter=drafter,
            draft_boot_id=1,
            max_sequences=max_sequences,
            activity=lambda name: nullcontext(),
            counters=self.counters,
        )
        self.client = Client(call=None, hello=message or hello())
        self.terms = terms_of(self.client.hello, feature_ring)
        self.proposer.attach(self.terms)

    def receive(self, **kind: object) -> None:
        self.proposer.receive(self.terms, draft_pb2.LinkRequest(**kind), time.monotonic())

    def answers(self) -> list[draft_pb2.LinkResponse]:
        self.proposer.propose()
        responses = [response for _, response in self.proposer.take_answers()]
        self.client.seen.extend(responses)
        return responses

    def open(self, *sequences: tuple[int, Sequence[int]], generation: int = 1, **changes) -> None:
        self.receive(
            open=draft_pb2.OpenBatch(
                **self.client.stamps(),
                sequences=[
                    open_of(slot, text, generation=generation, **changes)
                    for slot, text in sequences
                ],
            )
        )

    def prepare(self) -> None:
        for _ in range(MOST_PIECES):
            if not self.proposer.has_unprepared:
                return
            self.proposer.prepare()
        raise AssertionError("preparation does not come to an end")

    def step(self, *rows: Row, **changes: object) -> draft_pb2.Draft:
        self.receive(step=self.client.step_of(*rows, **changes))
        (draft,) = [answer.draft for answer in self.answers() if answer.HasField("draft")]
        return draft

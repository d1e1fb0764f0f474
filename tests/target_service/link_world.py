"""Two targets and their draft service in one thread, with a transport that does what it is told.

Real are the step loop, the scheduler, all of the link's two ends behind their streams, and the
EAGLE-3 drafter. The transport stands in for the streams, and time passes only where something
waits or computes; so a schedule of failures always ends in the same way.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
from fake_draft_service import column
from fake_engine import VOCAB_SIZE, FakeRunner, FakeSteps, LateSteps, WatchedPool
from fake_engine import oracle as fake_oracle
from feature_peer import ROW_BYTES, projection
from head_witness import BLOCK_SIZE, MAX_SEQUENCE_LENGTH, Texts, witness_drafter
from link_corruption import Message, corrupted
from link_schedule import (
    PROMPTS,
    SAMPLINGS,
    Admit,
    Cancel,
    Cut,
    Direction,
    Event,
    Fault,
    Replay,
    RestartDraft,
    RestartTarget,
    Run,
    Schedule,
    Speculate,
    Tamper,
)
from test_step_loop import Collector

from draft_service.counters import Counters
from draft_service.drafters.eagle3_sequence import Eagle3Sequence
from draft_service.link_sessions import LinkTerms
from draft_service.proposer import Proposer
from draft_service.sessions import Session
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.serving.shared_ring import SharedRing, random_ring_name
from outrider.v1 import draft_pb2
from target_service.codec import Stamp, decode_draft
from target_service.draft_wait import DraftWait
from target_service.link_features import RING_MESSAGES, LinkFeatures
from target_service.link_mailbox import NO_LINK, LinkMailbox, LinkView
from target_service.linked_drafts import LinkedDrafts
from target_service.policy import Policy
from target_service.scheduler import Scheduler, SchedulerBounds
from target_service.sequence import Request
from target_service.statistics import Statistics
from target_service.step_loop import StepLoop

DRAFT_LENGTH = 4
# Virtual seconds: of a forward, of a message's way, and of a piece of the draft's preparation.
STEP_SECONDS = 0.004
WAY_SECONDS = 0.001
PIECE_SECONDS = 0.0001
# Messages of eight rows of features: a prompt takes several.
RING_BYTES = RING_MESSAGES * 8 * ROW_BYTES + 3
MOST_STEPS = 2000
# The circuit breaker's longest pause.
LONGEST_PAUSE_SECONDS = 31.0
# Longer than any message is kept back.
LONGEST_WAY_SECONDS = 5.0
REMEMBERED_MESSAGES = 16
REMEMBERED_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a target, and of the head's cache."""

    num_slots: int = 3
    max_step_rows: int = 64
    head_blocks: int = 200


class Violation(AssertionError):
    """Something that must hold whatever the transport does."""


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


TIMED_MODULES = (
    "target_service.link_mailbox",
    "target_service.linked_drafts",
    "target_service.step_loop",
    "target_service.token_bucket",
    "draft_service.proposer",
)


@lru_cache(maxsize=2**12)
def oracle(prompt: tuple[int, ...], sampling: Sampling, max_tokens: int) -> tuple[int, ...]:
    return tuple(fake_oracle(prompt, sampling, max_tokens))


@dataclass(eq=False)
class Wanted:
    """One request, and what has to come of it."""

    admit: Admit
    prompt: tuple[int, ...]
    sampling: Sampling
    # Tokens of earlier targets.
    before: list[int] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def output(self) -> tuple[int, ...]:
        return oracle(self.prompt, self.sampling, self.admit.max_tokens)


@dataclass(order=True)
class _Posted:
    due: float
    number: int
    target: "Target" = field(compare=False)
    epoch: int = field(compare=False)
    message: Message = field(compare=False)


class _PumpedMailbox(LinkMailbox):
    """Waits by letting the world go on."""

    def __init__(self, world: "LinkWorld", statistics: Statistics) -> None:
        super().__init__(statistics)
        self._world = world
        self.delivered: deque[tuple[Stamp, tuple[int, ...]]] = deque(maxlen=REMEMBERED_ROWS)

    def wait_for(self, step_id: int, stream_epoch: int, timeout_seconds: float) -> bool:
        self._world.go_on_until(
            self._world.clock.now + timeout_seconds,
            is_over=lambda: self._answered_step_id >= step_id,
        )
        return super().wait_for(step_id, stream_epoch, 0.0)

    def deliver(self, response: draft_pb2.LinkResponse) -> None:
        if response.HasField("draft"):
            for row in decode_draft(response.draft, self._world.sizes.num_slots):
                self.delivered.append((row.stamp, row.token_ids))
        super().deliver(response)


class _WatchedDrafts(LinkedDrafts):
    """What is used must have come with the stamps of the sequence that uses it."""

    def collect(self, sequences, *, has_news):  # type: ignore[no-untyped-def]
        collected = super().collect(sequences, has_news=has_news)
        for sequence in sequences:
            if sequence.arrival in collected.drafts:
                used = self._told._stamp(sequence), collected.drafts[sequence.arrival]
                if used not in self._mailbox.delivered:  # type: ignore[attr-defined]
                    raise Violation(f"a draft that never came was used: {used}")
        return collected


class _TimedRunner(FakeRunner):
    def __init__(self, world: "LinkWorld") -> None:
        super().__init__(BLOCK_SIZE, world.sizes.max_step_rows)
        self._world = world

    def forward(self, batch, tap=None):  # type: ignore[no-untyped-def]
        logits = super().forward(batch, tap)
        self._world.go_on_until(self._world.clock.now + STEP_SECONDS)
        return logits


class Target:
    """One target process and its end of the link."""

    def __init__(self, world: "LinkWorld", boot_id: int, schedule: Schedule) -> None:
        self.world = world
        self.boot_id = boot_id
        self.epoch = 0
        self.terms: LinkTerms | None = None
        self.reconnects_at = 0.0
        self.statistics = Statistics(DRAFT_LENGTH)
        self.mailbox = _PumpedMailbox(world, self.statistics)
        self.sink = Collector()
        self.wanted: dict[int, Wanted] = {}
        runner = _TimedRunner(world)
        self.tap = runner.make_tap(world.texts.projection, schedule.num_blocks)
        self.drafts = _WatchedDrafts(
            mailbox=self.mailbox,
            send=lambda epoch, messages: world.send_to_draft(self, epoch, messages),
            num_unsent=lambda: 0,
            target_boot_id=boot_id,
            num_slots=world.sizes.num_slots,
            vocab_size=VOCAB_SIZE,
            wait=DraftWait([(1, STEP_SECONDS), (64, STEP_SECONDS)]),
            statistics=self.statistics,
        )
        late = LateSteps(runner)
        self.pool = WatchedPool(schedule.num_blocks, lambda: late.blocks_in_use)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerBounds(
                max_running_sequences=world.sizes.num_slots,
                max_waiting_sequences=1000,
                max_step_rows=world.sizes.max_step_rows,
                max_prefill_rows=16,
                block_size=BLOCK_SIZE,
                caches_prefixes=True,
            ),
            on_preempt=self.drafts.stopped,
        )
        self.loop = StepLoop(
            engine=late if schedule.runs_ahead else FakeSteps(runner),
            ahead=late if schedule.runs_ahead else None,
            scheduler=self.scheduler,
            drafts=self.drafts,
            statistics=self.statistics,
            max_step_rows=world.sizes.max_step_rows,
            activity=lambda name: nullcontext(),
        )
        self.policy = Policy(rules=((64, DRAFT_LENGTH),))
        self.loop.set_policy(self.policy)

    def admit(self, wanted: Wanted) -> None:
        sequence_id = len(self.wanted)
        self.wanted[sequence_id] = wanted
        self.loop.admit(
            [
                Request(
                    sink=self.sink,
                    sequence_id=sequence_id,
                    prompt_token_ids=wanted.prompt,
                    resumed_output_token_ids=tuple(wanted.before),
                    max_tokens=wanted.admit.max_tokens,
                    sampling=wanted.sampling,
                    stop_token_ids=frozenset(),
                    deadline=None,
                    priority=0,
                    draft_length_override=None,
                    patience_seconds=0.0,
                )
            ]
        )

    def step(self) -> None:
        """One, if there is anything to do; otherwise what an idle loop does."""
        self.world.connect(self)
        if self.scheduler.has_work:
            self.loop.step()
        else:
            self.loop._send_reports()
            self.drafts.flush(is_bypassed=False)
            self.world.go_on_until(self.world.clock.now + STEP_SECONDS)
        self.check()

    def cancel(self, sequence_id: int) -> None:
        self.wanted[sequence_id].is_cancelled = True
        self.loop.cancel(self.sink, frozenset([sequence_id]))

    def cancel_all(self) -> None:
        for sequence_id in self.unfinished():
            self.cancel(sequence_id)

    def tokens(self, sequence_id: int) -> list[int]:
        own = self.sink.tokens(sequence_id) if sequence_id in self.sink.outcomes else []
        return [*self.wanted[sequence_id].before, *own]

    def unfinished(self) -> list[int]:
        return [
            sequence_id
            for sequence_id, wanted in self.wanted.items()
            if not wanted.is_cancelled and len(self.tokens(sequence_id)) < len(wanted.output)
        ]

    def check(self) -> None:
        """Tokens so far, and that a draft was used only where it continues its sequence."""
        for sequence_id, wanted in self.wanted.items():
            tokens = self.tokens(sequence_id)
            if tuple(tokens) != wanted.output[: len(tokens)]:
                raise Violation(f"{tokens} instead of {wanted.output}")
            for outcome in self.sink.outcomes.get(sequence_id, ()):
                is_whole = outcome.accepted_length == outcome.drafted_length
                if self.world.trusts_features and not is_whole:
                    raise Violation(f"the draft of another text or seed was used: {outcome}")
        self.world.check()


class LinkWorld:
    """Use `run`. The first target is the one that things happen to; the second must not notice."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        schedule: Schedule,
        sizes: Sizes | None = None,
        *,
        bend: Callable[[Message], Message] = lambda message: message,
    ) -> None:
        """`bend`: what becomes of all of the first target's messages to the draft service. With
        features that may be wrong, say so by `trusts_features`.
        """
        self.clock = Clock()
        self.sizes = sizes or Sizes()
        self.trusts_features = True
        self._bend = bend
        for module in TIMED_MODULES:
            monkeypatch.setattr(f"{module}.time", self.clock)
        self.schedule = schedule
        self.texts = Texts(projection())
        self.objections: list[str] = []
        self.boot_ids = itertools.count(1)
        self.draft_boots = 0
        self._posted: list[_Posted] = []
        self._numbers = itertools.count()
        # By boot id, slot and generation.
        self._holders: dict[tuple[int, int, int], Wanted] = {}
        self._last_due: dict[tuple[int, Direction], float] = {}
        self._tampers: dict[Direction, list[Tamper]] = {direction: [] for direction in Direction}
        self._remembered: dict[Direction, list[Message]]
        self._remembered = {direction: [] for direction in Direction}
        self.start_draft()
        self.target = Target(self, next(self.boot_ids), schedule)
        self.bystander = Target(self, next(self.boot_ids), schedule)

    # The draft service.

    def start_draft(self) -> None:
        self.draft_boots += 1
        self.draft_boot_id = next(self.boot_ids)
        self.head_pool = BlockPool(self.sizes.head_blocks)
        self.proposer = Proposer(
            drafter=witness_drafter(
                self.texts, self.head_pool, self.objections.append, self.clock.monotonic
            ),
            draft_boot_id=self.draft_boot_id,
            max_sequences=100,
            activity=lambda name: nullcontext(),
            counters=Counters(clock=self.clock.monotonic),
        )

    def connect(self, target: Target) -> None:
        """A new stream, where there is none and its time has come."""
        if target.terms is not None or self.clock.now < target.reconnects_at:
            return
        target.epoch += 1
        reader = writer = None
        if self.schedule.uses_ring:
            reader = SharedRing.create(random_ring_name(), RING_BYTES)
            writer = SharedRing.attach(reader.name)
        target.terms = LinkTerms(
            target_boot_id=target.boot_id,
            stream_epoch=target.epoch,
            vocab_size=VOCAB_SIZE,
            max_draft_length=DRAFT_LENGTH,
            max_sequences=self.sizes.num_slots,
            feature_ring=reader,
        )
        self.proposer.attach(target.terms)
        target.mailbox.open_stream(
            LinkView(
                stream_epoch=target.epoch,
                draft_boot_id=self.draft_boot_id,
                max_draft_length=DRAFT_LENGTH,
                max_sequence_length=MAX_SEQUENCE_LENGTH,
                features=LinkFeatures(tap=target.tap, ring=writer),
            )
        )

    def cut(self, target: Target, pause_seconds: float, *, fell_silent: bool = False) -> None:
        if target.terms is None:
            return
        self.proposer.detach(target.terms)
        if target.terms.feature_ring is not None:
            target.terms.feature_ring.close()
        target.terms = None
        target.mailbox.close_stream(fell_silent=fell_silent)
        target.reconnects_at = self.clock.now + pause_seconds

    # The transport.

    def send_to_draft(
        self, target: Target, epoch: int, messages: Sequence[draft_pb2.LinkRequest]
    ) -> None:
        for slot, sequence in target.drafts._slots._sequences.items():
            holder = target.boot_id, slot, target.drafts._slots.generation(slot)
            self._holders[holder] = target.wanted[sequence.request.sequence_id]
        for message in messages:
            bent = message if target is self.bystander else self._bend(message)
            self._post(Direction.TO_DRAFT, target, epoch, bent)

    def _post(
        self,
        direction: Direction,
        target: Target,
        epoch: int,
        message: Message,
    ) -> None:
        way = (target.boot_id, direction)
        due = max(self.clock.now + WAY_SECONDS, self._last_due.get(way, 0.0))
        if target is not self.bystander:
            self._remembered[direction].append(message)
            del self._remembered[direction][:-REMEMBERED_MESSAGES]
            if self._tampers[direction]:
                tamper = self._tampers[direction].pop(0)
                later = due + tamper.milliseconds / 1000 + WAY_SECONDS
                if tamper.fault is Fault.DROP:
                    return
                if tamper.fault is Fault.DUPLICATE:
                    self._put(later, target, epoch, message)
                elif tamper.fault is Fault.DELAY:
                    self._put(later, target, epoch, message)
                    return
                elif tamper.fault is Fault.STALL:
                    due = later
                else:
                    message = corrupted(message, tamper.field)
        self._last_due[way] = due
        self._put(due, target, epoch, message)

    def _put(
        self,
        due: float,
        target: Target,
        epoch: int,
        message: Message,
    ) -> None:
        heapq.heappush(self._posted, _Posted(due, next(self._numbers), target, epoch, message))

    def go_on_until(self, end: float, is_over=lambda: False) -> None:  # type: ignore[no-untyped-def]
        """Delivers what is due, in the order in which it is."""
        while not is_over():
            next_due = self._posted[0].due if self._posted else end
            self._prepare_until(min(next_due, end))
            if not self._posted or next_due > end:
                break
            posted = heapq.heappop(self._posted)
            self.clock.now = max(self.clock.now, posted.due)
            target = posted.target
            # A stream takes what it had under way with it.
            if target.terms is not None and posted.epoch == target.epoch:
                if isinstance(posted.message, draft_pb2.LinkRequest):
                    self._turn_of_the_draft(target.terms, posted.message)
                else:
                    target.mailbox.deliver(posted.message)
        if not is_over():
            self.clock.now = max(self.clock.now, end)

    def _turn_of_the_draft(self, terms: LinkTerms, message: draft_pb2.LinkRequest) -> None:
        sessions = self.proposer._links[terms]._sessions
        before = {key: _extent(session) for key, session in sessions.items()}
        self.proposer.receive(terms, message, self.clock.now)
        self._check_sessions(terms, message, before)
        self.proposer.propose()
        self._send_answers()

    def _prepare_until(self, end: float) -> None:
        while self.proposer.has_unprepared and self.clock.now + PIECE_SECONDS <= end:
            self.clock.now += PIECE_SECONDS
            self.proposer.prepare()
            self._send_answers()

    def _send_answers(self) -> None:
        for answered, answer in self.proposer.take_answers():
            for target in (self.target, self.bystander):
                if target.terms is answered:
                    self._post(Direction.TO_TARGET, target, target.epoch, answer)

    def _check_sessions(
        self, terms: LinkTerms, message: draft_pb2.LinkRequest, before: Mapping[int, object]
    ) -> None:
        """Each is what its own sequence's committed tokens make of it, and only a row of its own
        generation moves it.
        """
        step = message.step
        rows = set(zip(column(step.slots, "<u4"), column(step.generations, "<u4"), strict=True))
        for slot, session in self.proposer._links[terms]._sessions.items():
            moved = message.HasField("step") and before.get(slot) != _extent(session)
            if moved and (slot, session.generation) not in rows:
                raise Violation(f"a row of {rows} moved slot {slot} of {session.generation}")
            wanted = self._holders.get((terms.target_boot_id, slot, session.generation))
            # What an Open said is not checked at once, nor trusted before.
            if wanted is None or not session.is_checked:
                continue
            text = (*wanted.prompt, *wanted.output)
            if tuple(session.token_ids) != text[: session.length]:
                raise Violation(f"the draft has {session.token_ids} of {text}")
            if session.state.sampling != wanted.sampling:
                raise Violation(f"the draft has the seed of another: {session.state.sampling}")

    # What happens.

    def run(self, *, heals: bool = True) -> None:
        """The whole schedule, then until everything has its tokens; then drafts must come again."""
        try:
            self.bystander.admit(self._wanted(Admit(3, 1, 30, 1), 3))
            for event in self.schedule.events:
                self._happen(event)
            for tampers in self._tampers.values():
                tampers.clear()
            self._finish()
            if heals:
                self._heal()
            self._leave()
        finally:
            for target in (self.target, self.bystander):
                self.cut(target, 0.0)

    def check(self) -> None:
        if self.objections and self.trusts_features:
            raise Violation(self.objections[0])

    def _happen(self, event: Event) -> None:
        target = self.target
        match event:
            case Admit():
                for index in range(event.count):
                    target.admit(self._wanted(event, event.prompt + index))
            case Run():
                for _ in range(event.steps):
                    target.step()
                    self.bystander.step()
            case Tamper():
                self._tampers[event.direction].append(event)
            case Replay():
                remembered = self._remembered[event.direction]
                if remembered:
                    message = remembered[-1 - event.back % len(remembered)]
                    self._put(self.clock.now, target, target.epoch, message)
            case Cut():
                pause = event.pause_milliseconds / 1000
                self.cut(target, pause, fell_silent=event.fell_silent)
            case RestartDraft():
                for each in (target, self.bystander):
                    self.cut(each, event.pause_milliseconds / 1000)
                self.start_draft()
            case RestartTarget():
                self._restart_target(event.pause_milliseconds / 1000)
            case Speculate():
                policy = Policy(
                    rules=((64, event.draft_length),), max_decode_rows=event.max_decode_rows
                )
                target.loop.set_policy(policy)
            case Cancel():
                unfinished = target.unfinished()
                if unfinished:
                    target.cancel(unfinished[event.index % len(unfinished)])

    def _wanted(self, admit: Admit, prompt: int) -> Wanted:
        # The same text twice, each time with another seed, is the worst that slots can hold.
        index, turn = prompt % len(PROMPTS), prompt // len(PROMPTS)
        wanted = Wanted(
            admit=admit,
            prompt=PROMPTS[index],
            sampling=SAMPLINGS[(admit.sampling + turn) % len(SAMPLINGS)],
        )
        self.texts.add((*wanted.prompt, *wanted.output))
        return wanted

    def _restart_target(self, pause_seconds: float) -> None:
        old = self.target
        self.cut(old, 0.0)
        old.loop._send_reports()
        self.target = Target(self, next(self.boot_ids), self.schedule)
        self.target.reconnects_at = self.clock.now + pause_seconds
        for sequence_id in old.unfinished():
            wanted = old.wanted[sequence_id]
            wanted.before = old.tokens(sequence_id)
            self.target.admit(wanted)

    def _finish(self) -> None:
        for _ in range(MOST_STEPS):
            busy = [each for each in (self.target, self.bystander) if each.scheduler.has_work]
            if not busy:
                break
            for target in busy:
                target.step()
        for target in (self.target, self.bystander):
            target.step()
            if target.scheduler.has_work or target.unfinished():
                raise Violation(f"sequences {target.unfinished()} do not end")
            if target.pool.num_used:
                raise Violation(f"{target.pool.num_used} blocks are not released")

    def _heal(self) -> None:
        """Whatever was, in the end drafts are used as if nothing had been."""
        self.go_on_until(self.clock.now + LONGEST_WAY_SECONDS)
        self.clock.now += LONGEST_PAUSE_SECONDS
        self.target.loop.set_policy(self.target.policy)
        # The threshold's dwell, and the circuit's trial.
        for _ in range(2):
            self.target.admit(self._wanted(Admit(0, 0, 30, 1), 0))
            self._finish()
        drafts = self.target.statistics.drafts
        self.target.admit(self._wanted(Admit(1, 0, 30, 1), 1))
        self._finish()
        # Of 30 tokens, one comes with the prompt, and at best five in each step.
        if self.target.statistics.drafts - drafts < 5:
            raise Violation(f"{self.target.statistics.drafts - drafts} drafts for 29 tokens")
        if self.draft_boots == 1:
            dropped = +self.bystander.statistics.draft_rows_dropped
            if dropped or self.bystander.statistics.drafts < 5:
                raise Violation(f"the bystander noticed: {dropped}")

    def _leave(self) -> None:
        """Nothing is kept of streams that have ended."""
        for target in (self.target, self.bystander):
            self.cut(target, 0.0)
        if self.proposer.session_count or self.head_pool.num_used:
            raise Violation(
                f"{self.proposer.session_count} sessions and {self.head_pool.num_used} blocks "
                "outlive their stream"
            )
        for target in (self.target, self.bystander):
            target.drafts.flush(is_bypassed=False)
            assert target.mailbox.view() is NO_LINK


def _extent(session: "Session[Eagle3Sequence]") -> tuple[int, int, int]:
    return id(session), session.length, session.state.features_end

"""The engine's thread: takes commands, runs steps, commits tokens. The whole of continuous
batching on one page.

It does not know gRPC, nor where drafts come from.
"""

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from outrider.engine.acceptance import Verdict
from outrider.engine.verify_step import AheadEngine, RunningStep, StepEngine
from outrider.v1 import generation_pb2, target_pb2
from target_service import policy as reasons
from target_service.batch import Batch, DecodeRow
from target_service.drafts import NOTHING_COLLECTED, Collected, DraftSource
from target_service.policy import Policy
from target_service.scheduler import Scheduler
from target_service.sequence import (
    Outcome,
    ReportSink,
    Request,
    StepSummary,
)
from target_service.sequence import Sequence as TokenSequence
from target_service.statistics import Statistics
from target_service.threshold_bypass import ThresholdBypass

IDLE_POLL_SECONDS = 0.05

Command = Callable[["StepLoop"], None]
Activity = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """A plain step that was launched behind one that ran."""

    batch: Batch
    running: RunningStep
    bypass_reason: str


class StepLoop:
    """Owned by the engine's thread; other threads hand it commands through `submit`.

    An engine that can is kept one plain step ahead: the next one is launched before the verdicts of
    the one that runs are there. A sequence that ends meanwhile has a row too many in it, whose
    verdict is dropped; its blocks are released once that row has run.
    """

    def __init__(
        self,
        *,
        engine: StepEngine,
        ahead: AheadEngine | None,
        scheduler: Scheduler,
        drafts: DraftSource,
        statistics: Statistics,
        max_step_rows: int,
        activity: Activity,
    ) -> None:
        self._engine = engine
        self._ahead = ahead
        self._scheduler = scheduler
        self._drafts = drafts
        self._statistics = statistics
        self._max_step_rows = max_step_rows
        self._activity = activity
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._policy = Policy()
        self._bypass = ThresholdBypass()
        self._step_id = 0
        self._is_stopping = False
        # The longest draft that was asked for the step to come.
        self._asked_length = 0
        self._next_step: NextStep | None = None
        # Ended, with a row in the next step that is there already.
        self._leaving: list[TokenSequence] = []
        # When the last step ended, in time.perf_counter seconds.
        self._ended_at = 0.0
        # A step's reports that are written while the next one runs.
        self._unsent: tuple[Sequence[tuple[TokenSequence, Outcome]], StepSummary] | None = None

    # For other threads.

    def submit(self, command: Command) -> None:
        """Has a command run between two steps."""
        self._commands.put(command)

    # Commands: to be called on the engine's thread, through `submit`.

    def admit(self, requests: Sequence[Request]) -> None:
        """Queues requests; those that find no place are rejected."""
        for request in requests:
            if self._is_stopping:
                request.sink.reject(
                    request.sequence_id,
                    target_pb2.REJECT_REASON_DRAINING,
                    "the target is draining",
                )
            elif self._scheduler.is_full:
                request.sink.reject(
                    request.sequence_id,
                    target_pb2.REJECT_REASON_OVERLOADED,
                    f"{self._scheduler.num_waiting} sequences wait already",
                )
            else:
                self._scheduler.admit(request)

    def cancel(self, sink: ReportSink, sequence_ids: frozenset[int] | None = None) -> None:
        """Ends a stream's sequences, or some of them, without a report."""
        self._send_reports()
        for sequence in self._live_sequences():
            if sequence.request.sink is sink and (
                sequence_ids is None or sequence.request.sequence_id in sequence_ids
            ):
                self._end(sequence)

    def set_policy(self, policy: Policy) -> None:
        """When to speculate from the next step on."""
        self._policy = policy

    def stop_admitting(self) -> None:
        """From here on every request is rejected."""
        self._is_stopping = True

    # The loop.

    def run(self) -> None:
        """Runs for ever; an exception that leaves it is the end of the service."""
        while True:
            self._run_commands(wait=not self._scheduler.has_work)
            self._end_overdue()
            if self._scheduler.has_work:
                self.step()
            else:
                self._send_reports()
                # Nothing decodes, so nothing is above any bound.
                self._drafts.flush(is_bypassed=False)

    def step(self) -> None:
        """One forward for all running sequences, and what follows from it.

        The forward's seconds are those from its launch until its verdicts are there. A step that
        was launched ahead begins, and its forward with it, where the step before it ended: what
        the engine had done of it by then was in that step's time.
        """
        with self._activity("step"):
            launched, self._next_step = self._next_step, None
            started = time.perf_counter() if launched is None else self._ended_at
            asked_length = self._asked_length
            self._drafts.started(self._scheduler.start_waiting())
            if launched is None:
                collected = self._collect()
                batch = self._batch(collected)
                if batch.decode_rows and collected is NOTHING_COLLECTED:
                    decoding = [row.sequence for row in batch.decode_rows]
                    self._statistics.bypass_steps[self._bypass_reason(decoding)] += 1
            else:
                collected, batch = NOTHING_COLLECTED, launched.batch
                self._statistics.bypass_steps[launched.bypass_reason] += 1
            with self._activity("verify") if batch.is_speculative else nullcontext():
                if launched is None:
                    forward_started = time.perf_counter()
                    running = self._engine.launch(batch.steps(), self._drafts.tap())
                else:
                    forward_started, running = started, launched.running
                self._next_step = self._launch_next(batch, running)
                self._send_reports()
                verdicts = running.verdicts()
                forward_seconds = time.perf_counter() - forward_started
                outcomes = self._commit(batch, verdicts)
            self._bypass.observe(self._policy, len(batch.decode_rows))
            self._asked_length = self._ask()
            self._ended_at = time.perf_counter()
            seconds = self._ended_at - started
            self._step_id += 1
            self._statistics.count_step(
                is_speculative=batch.is_speculative,
                seconds=seconds,
                forward_seconds=forward_seconds,
                draft_wait_seconds=collected.waited_seconds,
            )
            self._drafts.observe(
                collected=collected,
                decode_rows=len(batch.decode_rows),
                seconds=seconds - collected.waited_seconds,
                emitted_tokens=sum(len(outcome.emitted_token_ids) for _, outcome in outcomes),
                is_pure=not batch.chunks,
            )
            self._unsent = (
                outcomes,
                StepSummary(
                    step_id=self._step_id,
                    is_speculative=batch.is_speculative,
                    decode_rows=len(batch.decode_rows),
                    draft_length=asked_length,
                    prefill_tokens=batch.prefill_tokens,
                    running_sequences=self._num_running,
                    waiting_sequences=self._scheduler.num_waiting,
                    forward_seconds=forward_seconds,
                    draft_wait_seconds=collected.waited_seconds,
                    step_seconds=seconds,
                ),
            )
            # Written while somebody else works: the draft service, or the device on the next step.
            is_next_step_free = self._engine.runs_beside_host and not self._asked_length
            if not (is_next_step_free and self._scheduler.has_work):
                self._send_reports()

    def _send_reports(self) -> None:
        if self._unsent is not None:
            outcomes, summary = self._unsent
            self._unsent = None
            self._report(outcomes, summary, also=self._live_sequences())

    def _run_commands(self, *, wait: bool) -> None:
        try:
            command = self._commands.get(timeout=IDLE_POLL_SECONDS if wait else 0)
            while True:
                command(self)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for sequence in self._live_sequences():
            deadline = sequence.request.deadline
            if deadline is not None and now > deadline:
                self._send_reports()
                self._end(sequence)
                outcome = Outcome(
                    sequence_id=sequence.request.sequence_id,
                    emitted_token_ids=(),
                    drafted_length=0,
                    accepted_length=0,
                    finish_reason=generation_pb2.FINISH_REASON_DEADLINE,
                )
                self._report([(sequence, outcome)], self._idle_summary())

    def _collect(self) -> Collected:
        decoding = self._scheduler.decoding()
        if not decoding or self._bypass.is_on(self._policy, len(decoding)):
            return NOTHING_COLLECTED
        return self._drafts.collect(decoding, has_news=lambda: not self._commands.empty())

    def _batch(self, collected: Collected) -> Batch:
        """The next step's rows, with their blocks reserved."""
        decoding = self._scheduler.decoding()
        drafts = self._drafts_of(decoding, collected)
        # Sequences may have left or joined since the drafts were asked for.
        rows_left = self._max_step_rows - len(decoding)
        lengths = {}
        for sequence in decoding:
            draft = drafts.get(sequence.arrival, ())
            length = min(len(draft), sequence.room - 1, rows_left)
            if length > 0:
                lengths[sequence.arrival] = length
                rows_left -= length
        remaining = self._scheduler.reserve_decode_rows(lengths)
        decode_rows = [
            DecodeRow(
                sequence=sequence,
                draft_token_ids=drafts.get(sequence.arrival, ())[
                    : lengths.get(sequence.arrival, 0)
                ],
            )
            for sequence in remaining
        ]
        chunks = self._scheduler.prefill_chunks(
            sum(1 + len(row.draft_token_ids) for row in decode_rows)
        )
        return Batch(decode_rows=decode_rows, chunks=chunks)

    def _drafts_of(
        self, decoding: Sequence[TokenSequence], collected: Collected
    ) -> Mapping[int, tuple[int, ...]]:
        """By arrival: what came, or what a grammar forces where that is more. Only a step that may
        have drafts at all has these.
        """
        drafts = collected.drafts
        if collected is NOTHING_COLLECTED or all(one.constraint is None for one in decoding):
            return drafts
        drafts = dict(drafts)
        most = self._draft_lengths(decoding)
        for sequence in decoding:
            forced = tuple(sequence.forced_token_ids)[: most.get(sequence.arrival, 0)]
            if forced != drafts.get(sequence.arrival, ())[: len(forced)]:
                drafts[sequence.arrival] = forced
        return drafts

    def _launch_next(self, batch: Batch, running: RunningStep) -> NextStep | None:
        """Launches the step behind this one, which runs, if all of it is known: a row for each
        sequence that goes on. Whatever is to join, to be drafted or to be preempted first waits for
        the verdicts.
        """
        if self._ahead is None or batch.is_speculative or batch.has_rules:
            return None
        if len(self._scheduler.running) != len(batch.decode_rows):
            return None  # others run beside these: prompts
        places = [
            index
            for index, row in enumerate(batch.decode_rows)
            if row.sequence.room > 1 and row.sequence not in self._leaving
        ]
        makes_room = len(places) < len(batch.decode_rows)
        if not places or (makes_room and self._scheduler.num_waiting):
            return None
        next_batch = Batch(decode_rows=[batch.decode_rows[index] for index in places], chunks=())
        sequences = [row.sequence for row in next_batch.decode_rows]
        bypass_reason = self._bypass_reason(sequences)
        if bypass_reason == reasons.NOT_ASKED:
            return None
        # The token that is drawn now needs the place that a draft of one token would have.
        lengths = {sequence.arrival: 1 for sequence in sequences}
        self._scheduler.reserve_decode_rows(lengths)
        if len(lengths) < len(sequences):
            return None
        return NextStep(
            batch=next_batch,
            running=self._ahead.launch_next(
                batch.next_rows(places), self._drafts.tap(), after=running
            ),
            bypass_reason=bypass_reason,
        )

    def _commit(
        self, batch: Batch, verdicts: Sequence[Verdict]
    ) -> list[tuple[TokenSequence, Outcome]]:
        judged = batch.judged(verdicts)
        left, self._leaving = self._leaving, []
        for sequence in left:
            self._scheduler.finish(sequence)
        for chunk in batch.chunks:
            if not chunk.is_last:
                chunk.sequence.cached_length += chunk.length
                self._scheduler.computed(chunk.sequence)
        outcomes = []
        for row, verdict in judged:
            if row.sequence in left:
                continue
            constraint = row.sequence.constraint
            if constraint is not None and constraint.failure is not None:
                self._give_up(row.sequence, constraint.failure)
            else:
                outcomes.append(self._commit_verdict(row, verdict))
        return outcomes

    def _give_up(self, sequence: TokenSequence, reason: str) -> None:
        """Ends a sequence whose grammar cannot be followed any further, with its output so far."""
        self._end(sequence)
        sequence.request.sink.reject(
            sequence.request.sequence_id,
            target_pb2.REJECT_REASON_INVALID,
            f"structured_output cannot be followed behind {sequence.output_length} tokens: "
            f"{reason}",
        )

    def _commit_verdict(self, row: DecodeRow, verdict: Verdict) -> tuple[TokenSequence, Outcome]:
        sequence, draft_token_ids = row.sequence, row.draft_token_ids
        cached_prompt_length = 0
        if not sequence.has_emitted:
            cached_prompt_length = sequence.cached_prompt_length or 0
            self._statistics.prompt_tokens += len(sequence.request.prompt_token_ids)
            self._statistics.cached_prompt_tokens += cached_prompt_length
        emitted, finish_reason = sequence.commit(verdict.emitted_token_ids(draft_token_ids))
        # The rows of the committed tokens before the last are in the cache; what a rejected draft
        # wrote behind them is overwritten by the next step.
        sequence.cached_length = sequence.committed_length - 1
        self._scheduler.computed(sequence)
        accepted_length = min(verdict.accepted_length, len(emitted))
        if draft_token_ids:
            self._statistics.count_verdict(len(draft_token_ids), accepted_length)
        self._statistics.emitted_tokens += len(emitted)
        if finish_reason:
            self._end(sequence)
        return sequence, Outcome(
            sequence_id=sequence.request.sequence_id,
            emitted_token_ids=emitted,
            drafted_length=len(draft_token_ids),
            accepted_length=accepted_length,
            finish_reason=finish_reason,
            cached_prompt_length=cached_prompt_length,
        )

    def _ask(self) -> int:
        """Asks for the next step's drafts, where there shall be any: its decode rows are known as
        soon as this step has committed. Returns the longest that it asked for.
        """
        if self._next_step is not None:
            self._drafts.flush(is_bypassed=self._next_step.bypass_reason == reasons.THRESHOLD)
            return 0
        decoding = self._scheduler.decoding()
        if self._bypass.is_on(self._policy, len(decoding)):
            self._drafts.flush(is_bypassed=True)
            return 0
        lengths = self._draft_lengths(decoding)
        patience = self._patience_seconds()
        if lengths and self._drafts.unavailable(patience_seconds=patience) is None:
            asked = [sequence for sequence in decoding if sequence.arrival in lengths]
            is_asked = self._drafts.ask(
                asked, lengths, decode_rows=len(decoding), patience_seconds=patience
            )
            return max(lengths.values()) if is_asked else 0
        self._drafts.flush(is_bypassed=False)
        return 0

    def _draft_lengths(self, decoding: Sequence[TokenSequence]) -> dict[int, int]:
        """Draft length above 0 by arrival: the policy's or the request's own, within room and
        step.
        """
        if not decoding:
            return {}
        table_length = self._policy.draft_length(len(decoding))
        most = self._max_step_rows // len(decoding) - 1
        lengths = {}
        for sequence in decoding:
            override = sequence.request.draft_length_override
            wanted = table_length if override is None else override
            # A draft that fills the whole room would leave none for the bonus token.
            draft_length = min(wanted, most, sequence.room - 1)
            if draft_length > 0:
                lengths[sequence.arrival] = draft_length
        return lengths

    def _patience_seconds(self) -> float:
        """What the least patient of all sequences allows, also of those that do not decode yet."""
        return min(
            (sequence.request.patience_seconds for sequence in self._live_sequences()),
            default=0.0,
        )

    def _bypass_reason(self, decoding: Sequence[TokenSequence]) -> str:
        """Why a step of these asks nothing of the draft service; NOT_ASKED where it might."""
        unavailable = self._drafts.unavailable(patience_seconds=self._patience_seconds())
        if self._bypass.is_on(self._policy, len(decoding)):
            return reasons.THRESHOLD
        if unavailable != reasons.NO_DRAFT_SERVICE and not self._draft_lengths(decoding):
            return reasons.DRAFT_LENGTH_ZERO
        return unavailable or reasons.NOT_ASKED

    def _report(
        self,
        outcomes: Sequence[tuple[TokenSequence, Outcome]],
        summary: StepSummary,
        also: Iterable[TokenSequence] = (),
    ) -> None:
        """`also`: whose streams hear of the step even if it has no outcome for them: a prefill in
        many steps is progress.
        """
        by_sink: dict[ReportSink, list[Outcome]] = {sequence.request.sink: [] for sequence in also}
        for sequence, outcome in outcomes:
            by_sink.setdefault(sequence.request.sink, []).append(outcome)
        for sink, sink_outcomes in by_sink.items():
            sink.report(sink_outcomes, summary)

    def _idle_summary(self) -> StepSummary:
        return StepSummary(
            step_id=self._step_id,
            is_speculative=False,
            decode_rows=0,
            draft_length=0,
            prefill_tokens=0,
            running_sequences=self._num_running,
            waiting_sequences=self._scheduler.num_waiting,
            forward_seconds=0.0,
            draft_wait_seconds=0.0,
            step_seconds=0.0,
        )

    @property
    def _num_running(self) -> int:
        return len(self._scheduler.running) - len(self._leaving)

    def _live_sequences(self) -> list[TokenSequence]:
        """Running and waiting, without those that have ended."""
        return [
            sequence
            for sequence in self._scheduler.all_sequences()
            if sequence not in self._leaving
        ]

    def _end(self, sequence: TokenSequence) -> None:
        if sequence in self._scheduler.running:
            self._drafts.stopped(sequence)
        if self._next_step is not None and self._next_step.batch.has_row_of(sequence):
            self._leaving.append(sequence)
        else:
            self._scheduler.finish(sequence)

"""The engine's thread: takes commands, runs steps, commits tokens. The whole of continuous
batching on one page.

It does not know gRPC, nor where drafts come from.
"""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from outrider.engine.acceptance import Verdict
from outrider.engine.verify_step import StepEngine
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

IDLE_POLL_SECONDS = 0.05

Command = Callable[["StepLoop"], None]
Activity = Callable[[str], AbstractContextManager[None]]


class StepLoop:
    """Owned by the engine's thread; other threads hand it commands through `submit`."""

    def __init__(
        self,
        *,
        engine: StepEngine,
        scheduler: Scheduler,
        drafts: DraftSource,
        statistics: Statistics,
        max_step_rows: int,
        activity: Activity,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._drafts = drafts
        self._statistics = statistics
        self._max_step_rows = max_step_rows
        self._activity = activity
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._policy = Policy()
        self._step_id = 0
        self._is_stopping = False
        # The longest draft that was asked for the step to come.
        self._asked_length = 0
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
        for sequence in list(self._scheduler.all_sequences()):
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
        """One forward for all running sequences, and what follows from it."""
        with self._activity("step"):
            started = time.perf_counter()
            asked_length = self._asked_length
            self._drafts.started(self._scheduler.start_waiting())
            collected = self._collect()
            batch = self._batch(collected)
            self._count_bypass(batch.decode_rows, collected)
            with self._activity("verify") if batch.is_speculative else nullcontext():
                forward_started = time.perf_counter()
                running = self._engine.launch(batch.steps(), self._drafts.tap())
                self._send_reports()
                verdicts = running.verdicts()
                forward_seconds = time.perf_counter() - forward_started
                outcomes = self._commit(batch, verdicts)
            self._asked_length = self._ask()
            seconds = time.perf_counter() - started
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
                    running_sequences=len(self._scheduler.running),
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
            self._report(outcomes, summary)

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
        for sequence in list(self._scheduler.all_sequences()):
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
        if not decoding or self._policy.is_bypassed(len(decoding)):
            return NOTHING_COLLECTED
        return self._drafts.collect(decoding, has_news=lambda: not self._commands.empty())

    def _batch(self, collected: Collected) -> Batch:
        """The next step's rows, with their blocks reserved."""
        decoding = self._scheduler.decoding()
        # Sequences may have left or joined since the drafts were asked for.
        rows_left = self._max_step_rows - len(decoding)
        lengths = {}
        for sequence in decoding:
            draft = collected.drafts.get(sequence.arrival, ())
            length = min(len(draft), sequence.room - 1, rows_left)
            if length > 0:
                lengths[sequence.arrival] = length
                rows_left -= length
        remaining = self._scheduler.reserve_decode_rows(lengths)
        decode_rows = [
            DecodeRow(
                sequence=sequence,
                draft_token_ids=collected.drafts.get(sequence.arrival, ())[
                    : lengths.get(sequence.arrival, 0)
                ],
            )
            for sequence in remaining
        ]
        chunks = self._scheduler.prefill_chunks(
            sum(1 + len(row.draft_token_ids) for row in decode_rows)
        )
        return Batch(decode_rows=decode_rows, chunks=chunks)

    def _commit(
        self, batch: Batch, verdicts: Sequence[Verdict]
    ) -> list[tuple[TokenSequence, Outcome]]:
        judged = batch.judged(verdicts)
        for chunk in batch.chunks:
            if not chunk.is_last:
                chunk.sequence.cached_length += chunk.length
        return [self._commit_verdict(row, verdict) for row, verdict in judged]

    def _commit_verdict(self, row: DecodeRow, verdict: Verdict) -> tuple[TokenSequence, Outcome]:
        sequence, draft_token_ids = row.sequence, row.draft_token_ids
        emitted, finish_reason = sequence.commit(verdict.emitted_token_ids(draft_token_ids))
        # The rows of the committed tokens before the last are in the cache; what a rejected draft
        # wrote behind them is overwritten by the next step.
        sequence.cached_length = sequence.committed_length - 1
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
        )

    def _ask(self) -> int:
        """Asks for the next step's drafts, where there shall be any: its decode rows are known as
        soon as this step has committed. Returns the longest that it asked for.
        """
        decoding = self._scheduler.decoding()
        if self._policy.is_bypassed(len(decoding)):
            self._drafts.flush(is_bypassed=True)
            return 0
        lengths = self._draft_lengths(decoding)
        patience = self._patience_seconds()
        if lengths and self._drafts.unavailable(patience_seconds=patience) is None:
            asked = [sequence for sequence in decoding if sequence.arrival in lengths]
            self._drafts.ask(asked, lengths, decode_rows=len(decoding), patience_seconds=patience)
            return max(lengths.values())
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
            (sequence.request.patience_seconds for sequence in self._scheduler.all_sequences()),
            default=0.0,
        )

    def _count_bypass(self, decode_rows: Sequence[DecodeRow], collected: Collected) -> None:
        if not decode_rows or collected is not NOTHING_COLLECTED:
            return
        decoding = [row.sequence for row in decode_rows]
        unavailable = self._drafts.unavailable(patience_seconds=self._patience_seconds())
        if self._policy.is_bypassed(len(decode_rows)):
            reason = reasons.THRESHOLD
        elif unavailable != reasons.NO_DRAFT_SERVICE and not self._draft_lengths(decoding):
            reason = reasons.DRAFT_LENGTH_ZERO
        else:
            reason = unavailable or reasons.NOT_ASKED
        self._statistics.bypass_steps[reason] += 1

    def _report(
        self, outcomes: Sequence[tuple[TokenSequence, Outcome]], summary: StepSummary
    ) -> None:
        by_sink: dict[ReportSink, list[Outcome]] = {}
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
            running_sequences=len(self._scheduler.running),
            waiting_sequences=self._scheduler.num_waiting,
            forward_seconds=0.0,
            draft_wait_seconds=0.0,
            step_seconds=0.0,
        )

    def _end(self, sequence: TokenSequence) -> None:
        if sequence in self._scheduler.running:
            self._drafts.stopped(sequence)
        self._scheduler.finish(sequence)

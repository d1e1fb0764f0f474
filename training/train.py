"""Trains a head against a frozen target: updates, evaluation, checkpoints, until its time is up."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import torch

from training.batches import Batch, Batcher, BatchRows, batches_of, plan_epoch
from training.checkpoint import ResumeError, RunState, save_state
from training.data import RowSet
from training.evaluate import Acceptance, evaluate
from training.head import Head, Rotation
from training.loss import Kernels, TargetRows, Vocabulary, unrolled_steps
from training.metrics import MetricsFile
from training.progress import Progress
from training.schedule import Schedule

RunTarget = Callable[[BatchRows, Batch], TargetRows]
CHECKPOINT_FILE = "checkpoint.pt"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How to train. One of `max_seconds` and `max_updates` ends the run and paces the schedule."""

    schedule: Schedule
    unroll_steps: int
    step_decay: float  # weight of each step's loss relative to the one before
    tokens_per_batch: int
    batches_per_update: int
    max_length: int
    max_seconds: float | None
    max_updates: int | None
    pause_seconds: float | None  # of this process: checkpoint then and stop
    clip_norm: float
    weight_decay: float
    average_decay: float  # of the running average of weights; 0 keeps none
    seed: int
    evaluate_every: int  # updates
    checkpoint_seconds: float
    log_seconds: float
    draft_lengths: tuple[int, ...]


class Ending(Enum):
    FINISHED = "finished"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run trains on and with."""

    run_target: RunTarget
    run_held_out_target: RunTarget
    rows: RowSet
    held_out: RowSet
    vocabulary: Vocabulary
    draft_ids: torch.Tensor  # [draft_vocab] on CPU
    rotation: Rotation
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    directory: Path


def trainable_rows(rows: RowSet, max_length: int) -> RowSet:
    """The rows that have at least one token to predict once cut to `max_length`."""
    lengths = rows.lengths.clip(max=max_length)
    counts = lengths - 2 - (rows.answer_starts - 2).clip(min=0)
    return rows.select((counts > 0).nonzero()[0])


class Trainer:
    """One head being trained. Owned by one thread; `request_stop` may be called by a signal."""

    def __init__(
        self, head: Head, setting: Setting, options: TrainOptions, progress: Progress
    ) -> None:
        self._head = head
        self._setting = setting
        self._options = options
        self._progress = progress
        self._parameters = list(head.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=options.schedule.peak,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=options.weight_decay,
            fused=setting.device.type == "cuda",
        )
        self._average = (
            [parameter.detach().clone() for parameter in self._parameters]
            if options.average_decay > 0
            else []
        )
        decays = [options.step_decay**step for step in range(options.unroll_steps)]
        total = sum(decays) * options.batches_per_update
        self._step_shares = torch.tensor(decays, device=setting.device) / total
        self._batcher = Batcher(setting.rows, setting.device)
        self._data_digest = _data_digest(setting.rows, options)
        self._metrics = MetricsFile(setting.directory / METRICS_FILE)
        self._update = self._epoch = self._batch = self._trained_tokens = 0
        self._earlier_seconds = 0.0
        self._stop = False

    def request_stop(self) -> None:
        """Write a checkpoint after the update under way, and end `run`."""
        self._stop = True

    @property
    def update(self) -> int:
        return self._update

    def restore(self, state: RunState) -> None:
        """Continue where a checkpoint was written; raises ResumeError for another run's."""
        if state.data_digest != self._data_digest:
            raise ResumeError("the checkpoint was trained on other data, or in another order")
        if not torch.equal(state.draft_ids, self._setting.draft_ids):
            raise ResumeError("the checkpoint has another draft vocabulary")
        if bool(state.average) != bool(self._average):
            raise ResumeError("the checkpoint and this run differ in keeping an average of weights")
        self._head.load_state_dict(state.head)
        self._optimizer.load_state_dict(state.optimizer)
        for kept, name in zip(self._average, state.head, strict=False):
            kept.copy_(state.average[name])
        torch.set_rng_state(state.rng)
        self._update, self._epoch, self._batch = state.update, state.epoch, state.batch
        self._trained_tokens = state.trained_tokens
        self._earlier_seconds = state.seconds

    def run(self) -> Ending:
        """Train to the end of the schedule, or until stopped; a checkpoint is written at both."""
        options = self._options
        self._metrics.start(self._update)
        if self._update == 0:
            self._evaluate(0.0)
        started = last_log = last_checkpoint = time.monotonic()
        window = _Window(options.unroll_steps, self._setting.device)
        planned = self._planned_batches()
        first_update = self._update
        ending = Ending.FINISHED
        while True:
            now = time.monotonic()
            seconds = self._earlier_seconds + now - started
            fraction = self._fraction(seconds)
            if fraction >= 1.0:
                break
            # Every process makes some progress, however short it may be.
            is_pausing = (
                options.pause_seconds is not None
                and now - started >= options.pause_seconds
                and self._update > first_update
            )
            if self._stop or is_pausing:
                ending = Ending.PAUSED
                break
            self._train_once(planned, fraction, window)
            if now - last_log >= options.log_seconds:
                self._log(fraction, seconds, window)
                last_log = now
            if self._update % options.evaluate_every == 0:
                self._evaluate(seconds)
            if now - last_checkpoint >= options.checkpoint_seconds:
                self._save(self._earlier_seconds + time.monotonic() - started)
                last_checkpoint = now
        seconds = self._earlier_seconds + time.monotonic() - started
        self._log(self._fraction(seconds), seconds, window)
        self._save(seconds)
        return ending

    @torch.no_grad()
    def use_average(self) -> None:
        """Put the running average of weights, where one is kept, into the head for good."""
        for parameter, kept in zip(self._parameters, self._average, strict=False):
            parameter.copy_(kept)

    def _fraction(self, seconds: float) -> float:
        options = self._options
        shares = [0.0]
        if options.max_seconds is not None:
            shares.append(seconds / options.max_seconds)
        if options.max_updates is not None:
            shares.append(self._update / options.max_updates)
        return max(shares)

    def _planned_batches(self) -> Iterator[BatchRows]:
        """The rest of this epoch's batches, then further epochs without end."""
        options = self._options
        while True:
            plan = plan_epoch(
                self._setting.rows.lengths,
                tokens_per_batch=options.tokens_per_batch,
                max_length=options.max_length,
                seed=options.seed,
                epoch=self._epoch,
            )
            for planned in plan[self._batch :]:
                self._batch += 1
                yield planned
            self._epoch += 1
            self._batch = 0

    def _train_once(self, planned: Iterator[BatchRows], fraction: float, window: "_Window") -> None:
        options, setting = self._options, self._setting
        for _ in range(options.batches_per_update):
            rows = next(planned)
            batch = self._batcher.build(rows)
            target = setting.run_target(rows, batch)
            outcomes = list(
                unrolled_steps(
                    self._head.cast(setting.dtype), batch, target, setting.vocabulary,
                    setting.rotation, setting.kernels, options.unroll_steps,
                )
            )  # fmt: skip
            losses = torch.stack([outcome.loss for outcome in outcomes])
            (losses * self._step_shares).sum().backward()  # type: ignore[no-untyped-call]
            window.add(
                losses.detach(),
                torch.stack([outcome.is_valid for outcome in outcomes]),
                torch.stack([outcome.is_correct for outcome in outcomes]),
                batch.token_count,
            )
            self._trained_tokens += batch.token_count
        rate = options.schedule.rate(fraction)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for parameter in self._parameters:
            assert parameter.grad is not None
            # One bad value must not spoil every weight through the norm.
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        window.add_norm(torch.nn.utils.clip_grad_norm_(self._parameters, options.clip_norm))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter, kept in zip(self._parameters, self._average, strict=False):
            kept.lerp_(parameter.detach(), 1.0 - options.average_decay)
        self._update += 1

    def _log(self, fraction: float, seconds: float, window: "_Window") -> None:
        if window.updates == 0:
            return
        report = window.take()
        rate = self._options.schedule.rate(fraction)
        self._metrics.write(
            {
                "kind": "training",
                "update": self._update,
                "epoch": self._epoch,
                "seconds": round(seconds, 2),
                "trained_tokens": self._trained_tokens,
                "learning_rate": rate,
                **asdict(report),
            }
        )
        losses = " ".join(f"{loss:.3f}" for loss in report.losses)
        right = " ".join(f"{share:.2f}" for share in report.correct)
        self._progress.show(
            fraction,
            f"update {self._update}  loss {losses}  correct {right}  norm {report.norm:.2f}  "
            f"rate {rate:.1e}  {report.tokens_per_second / 1000:.1f}k tokens/s  "
            f"{seconds:.0f} s  epoch {self._epoch}",
        )

    def evaluate_rows(
        self, rows: RowSet, run_target: RunTarget, draft_lengths: tuple[int, ...]
    ) -> list[Acceptance]:
        """Acceptance of the head, as it is now, over rows (greedy drafts)."""
        setting = self._setting
        with torch.no_grad():
            return evaluate(
                self._head.cast(setting.dtype),
                batches_of(
                    rows,
                    setting.device,
                    tokens_per_batch=self._options.tokens_per_batch,
                    max_length=self._options.max_length,
                ),
                run_target,
                setting.vocabulary,
                setting.rotation,
                setting.kernels,
                draft_lengths,
            )

    def _evaluate(self, seconds: float) -> None:
        if len(self._setting.held_out) == 0:
            return
        kept = [parameter.detach().clone() for parameter in self._parameters]
        self.use_average()
        found = self.evaluate_rows(
            self._setting.held_out, self._setting.run_held_out_target, self._options.draft_lengths
        )
        with torch.no_grad():
            for parameter, value in zip(self._parameters, kept, strict=True):
                parameter.copy_(value)
        self._metrics.write(
            {
                "kind": "evaluation",
                "update": self._update,
                "seconds": round(seconds, 2),
                "acceptance": [one.record() for one in found],
            }
        )
        lengths = "  ".join(f"{one.draft_length}: {one.acceptance_length:.3f}" for one in found)
        shares = " ".join(f"{share:.3f}" for share in found[-1].per_position)
        self._progress.note(
            f"update {self._update}: held-out acceptance length by draft length {lengths}; "
            f"accepted up to each position {shares}"
        )

    def _save(self, seconds: float) -> None:
        names = [name for name, _ in self._head.named_parameters()]
        save_state(
            self._setting.directory / CHECKPOINT_FILE,
            RunState(
                head=self._head.state_dict(),
                optimizer=self._optimizer.state_dict(),
                average=dict(zip(names, self._average, strict=False)),
                rng=torch.get_rng_state(),
                draft_ids=self._setting.draft_ids,
                layer_ids=list(self._head.shape.layer_ids),
                data_digest=self._data_digest,
                update=self._update,
                epoch=self._epoch,
                batch=self._batch,
                trained_tokens=self._trained_tokens,
                seconds=seconds,
            ),
        )


def _data_digest(rows: RowSet, options: TrainOptions) -> str:
    order = f"{options.seed} {options.tokens_per_batch} {options.max_length}"
    digest = hashlib.sha256(order.encode())
    digest.update(rows.row_starts.tobytes())
    digest.update(rows.tokens.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """Means over a window of updates."""

    losses: list[float]  # by step
    correct: list[float]  # share of the valid rows of each step
    estimated_acceptance_length: float  # of drafts from every position alike
    norm: float  # of the gradient, before clipping
    tokens_per_second: float


class _Window:
    """Sums over the updates since the last report, kept on the device until it is due."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._sums = torch.zeros(4, steps, device=device)
        self._norm = torch.zeros((), device=device)
        self._batches = self.updates = self._tokens = 0
        self._since = time.monotonic()

    def add(
        self, losses: torch.Tensor, valid: torch.Tensor, correct: torch.Tensor, tokens: int
    ) -> None:
        """losses [steps]; valid and correct [steps, chains]."""
        alive = correct.cumprod(0)
        sums = torch.stack((losses, valid.sum(1), correct.sum(1), alive.sum(1)))
        self._sums += sums
        self._batches += 1
        self._tokens += tokens

    def add_norm(self, norm: torch.Tensor) -> None:
        self._norm += norm
        self.updates += 1

    def take(self) -> "_Report":
        """What there is to report; starts the next window. Waits for the device."""
        losses, valid, correct, alive = self._sums.tolist()
        norm = float(self._norm) / self.updates
        seconds = max(1e-6, time.monotonic() - self._since)
        report = _Report(
            losses=[round(one / self._batches, 5) for one in losses],
            correct=[round(c / max(1.0, v), 5) for c, v in zip(correct, valid, strict=True)],
            estimated_acceptance_length=round(1.0 + sum(alive) / max(1.0, valid[0]), 4),
            norm=round(norm, 4),
            tokens_per_second=round(self._tokens / seconds, 1),
        )
        self._sums.zero_()
        self._norm.zero_()
        self._batches = self.updates = self._tokens = 0
        self._since = time.monotonic()
        return report

"""The command line of training, parsed into typed values."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.kernels import KernelChoice
from training.schedule import Schedule
from training.train import TrainOptions

# Below what a repository takes for one file without complaint.
DEFAULT_MAX_BYTES = 24_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a run was asked to do."""

    target: str
    data: Path
    output: Path
    export: Path
    held_out: Path | None
    held_out_rows: int
    evaluation: tuple[Path, ...]
    stored_features: Path | None
    generate: str | None
    device: str
    kernels: KernelChoice
    layer_ids: tuple[int, ...]  # empty for the default
    draft_vocab_size: int  # 0 for the largest that fits
    max_bytes: int
    resume: bool
    training: TrainOptions


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; exits with usage on a bad one, as argparse does."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.max_seconds is None and given.max_updates is None:
        parser.error("give --max-seconds or --max-updates")
    for name in ("unroll_steps", "tokens_per_batch", "batches_per_update", "evaluate_every"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return Options(
        target=given.target,
        data=given.data,
        output=given.output,
        export=given.export or given.output / "head",
        held_out=given.held_out,
        held_out_rows=given.held_out_rows,
        evaluation=tuple(given.evaluate),
        stored_features=given.stored_features,
        generate=given.generate,
        device=given.device,
        kernels=given.kernels,
        layer_ids=tuple(given.layer_ids),
        draft_vocab_size=given.draft_vocabulary_size,
        max_bytes=given.max_bytes,
        resume=given.resume,
        training=TrainOptions(
            schedule=Schedule(
                peak=given.learning_rate,
                warmup=given.warmup,
                final_ratio=given.final_ratio,
                kind=given.schedule,
            ),
            unroll_steps=given.unroll_steps,
            step_decay=given.step_decay,
            tokens_per_batch=given.tokens_per_batch,
            batches_per_update=given.batches_per_update,
            max_length=given.max_length,
            max_seconds=given.max_seconds,
            max_updates=given.max_updates,
            pause_seconds=given.pause_seconds,
            clip_norm=given.clip_norm,
            weight_decay=given.weight_decay,
            average_decay=given.average_decay,
            seed=given.seed,
            evaluate_every=given.evaluate_every,
            checkpoint_seconds=given.checkpoint_seconds,
            log_seconds=given.log_seconds,
            draft_lengths=tuple(sorted(given.draft_lengths)),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train-eagle3",
        description="Train an EAGLE-3 head for a target from text that the target wrote.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m-instruct", help="directory, .gguf file, Hub id or alias")
    add("--data", type=Path, required=True, help="directory of shards that the target wrote")
    add("--output", type=Path, required=True, help="directory of the run")
    add("--export", type=Path, help="directory of the exported head (default: OUTPUT/head)")
    add("--held-out", type=Path, help="a shard to watch acceptance on, instead of data set aside")
    add("--held-out-rows", type=int, default=64, help="rows to watch acceptance on")
    add("--evaluate", type=Path, nargs="*", default=[], help="shards to evaluate the end on")
    add("--stored-features", type=Path, help="directory that keeps the target's features (small "
        "data): computed once, then read")  # fmt: skip
    add("--generate", help="arguments for training.generate, which then fills --data first")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--kernels", choices=("auto", "fused", "plain"), default="auto", help="form of the "
        "attention and the loss: auto tries the fast one against the plain one")  # fmt: skip
    add("--layer-ids", type=int, nargs="*", default=[], help="layers whose input is captured "
        "(default: 2, half, last but two)")  # fmt: skip
    add("--draft-vocabulary-size", type=int, default=0, help="0: the largest that fits --max-bytes")
    add("--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="bound on the exported file")
    add("--resume", action="store_true", help="continue from OUTPUT's checkpoint, if it has one")
    add("--max-seconds", type=float, help="length of the run, over all its processes")
    add("--max-updates", type=int, help="length of the run in updates")
    add("--pause-seconds", type=float, help="stop this process then, to be continued by --resume")
    add("--learning-rate", type=float, default=3e-3)
    add("--schedule", choices=("cosine", "wsd"), default="cosine")
    add("--warmup", type=float, default=0.02, help="share of the run")
    add("--final-ratio", type=float, default=0.01, help="of the learning rate, at the end")
    add("--unroll-steps", type=int, default=5, help="drafting steps per position")
    add("--step-decay", type=float, default=1.0, help="weight of each step's loss by the last's")
    add("--tokens-per-batch", type=int, default=16384, help="with padding")
    add("--batches-per-update", type=int, default=1)
    add("--max-length", type=int, default=2048, help="longer rows are cut")
    add("--clip-norm", type=float, default=1.0)
    add("--weight-decay", type=float, default=0.0)
    add("--average-decay", type=float, default=0.0, help="of averaged weights; 0: none")
    add("--seed", type=int, default=0)
    add("--evaluate-every", type=int, default=1000, help="updates")
    add("--checkpoint-seconds", type=float, default=60.0)
    add("--log-seconds", type=float, default=5.0)
    add("--draft-lengths", type=int, nargs="+", default=[3, 5, 7], help="to evaluate at")
    return parser

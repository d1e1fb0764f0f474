"""The command line of training, parsed into typed values."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.kernels import KernelChoice
from training.row_store import TRAIN
from training.schedule import Schedule
from training.train import TrainOptions

DATA_DIRECTORY = "data"
# Below what a repository takes for one file without complaint.
DEFAULT_MAX_BYTES = 24_000_000
# Of --max-seconds, for the data: more of it helps more than further passes over less.
GENERATE_SHARE = 0.3
GENERATE_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How the target writes the data of a run that was given none."""

    directory: Path
    seconds: float
    documents: tuple[Path, ...]
    prompts: tuple[Path, ...]
    arguments: tuple[str, ...]  # further ones of training.generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a run was asked to do."""

    target: str
    data: Path  # directory of shards
    generation: Generation | None  # None where the data was given
    output: Path
    export: Path
    held_out: Path | None
    held_out_rows: int
    evaluation: tuple[Path, ...]
    stored_features: Path | None
    device: str
    kernels: KernelChoice
    layer_ids: tuple[int, ...]  # empty for the default
    draft_vocab_size: int  # 0 for the largest that fits
    start_from: Path | None  # an exported head, with its layers and draft vocabulary
    max_bytes: int
    resume: bool
    training: TrainOptions


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; exits with usage on a bad one, as argparse does."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.max_seconds is None and given.max_updates is None:
        parser.error("give --max-seconds or --max-updates")
    if given.start_from is not None:
        for name in ("layer_ids", "draft_vocabulary_size"):
            if getattr(given, name):
                flag = name.replace("_", "-")
                parser.error(f"--{flag} is the head's own: not with --start-from")
    generation = _generation(parser, given)
    max_seconds = given.max_seconds
    if generation is not None and max_seconds is not None:
        max_seconds -= generation.seconds
    for name in ("unroll_steps", "tokens_per_batch", "batches_per_update", "evaluate_every"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return Options(
        target=given.target,
        data=given.data or given.output / DATA_DIRECTORY / TRAIN,
        generation=generation,
        output=given.output,
        export=given.export or given.output / "head",
        held_out=given.held_out,
        held_out_rows=given.held_out_rows,
        evaluation=tuple(given.evaluate),
        stored_features=given.stored_features,
        device=given.device,
        kernels=given.kernels,
        layer_ids=tuple(given.layer_ids),
        draft_vocab_size=given.draft_vocabulary_size,
        start_from=given.start_from,
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
            max_seconds=max_seconds,
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


def _generation(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Generation | None:
    if given.data is not None:
        for name in ("generate_seconds", "documents", "prompts", "generate_arguments"):
            if getattr(given, name):
                flag = name.replace("_", "-")
                parser.error(f"--{flag} is for data that the target writes: not with --data")
        return None
    seconds = given.generate_seconds
    if seconds is None:
        seconds = GENERATE_SECONDS
        if given.max_seconds is not None:
            seconds = GENERATE_SHARE * given.max_seconds
    if seconds <= 0 or (given.max_seconds is not None and seconds >= given.max_seconds):
        parser.error(f"--generate-seconds is {seconds:g}: must be above 0 and below --max-seconds")
    return Generation(
        directory=given.output / DATA_DIRECTORY,
        seconds=seconds,
        documents=tuple(given.documents),
        prompts=tuple(given.prompts),
        arguments=tuple(shlex.split(given.generate_arguments)),
    )


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", False) or action.default == []:
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider train-eagle3",
        description="Train an EAGLE-3 head for a target from text that the target writes: data, "
        "draft vocabulary, training, export (OUTPUT/head), evaluation, picture.",
        epilog="Exit status: 0 done; 1 error; 2 wrong arguments; 3 stopped before the end (Ctrl-C, "
        "SIGTERM or --pause-seconds), to be continued with --resume.",
        usage="%(prog)s --output DIR --max-seconds N [--target MODEL] [options]",
        formatter_class=_Help,
    )
    group = parser.add_argument_group("usual")
    add = group.add_argument
    add("--target", default="smollm2-135m-instruct", help="directory, .gguf file, Hub id or alias")
    add("--output", type=Path, required=True, help="directory of the run")
    add("--max-seconds", type=float, help="length of the run, over all its processes; with the "
        "data's time unless --data is given")  # fmt: skip
    add("--resume", action="store_true", help="continue from OUTPUT's checkpoint, if it has one")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--start-from", type=Path, metavar="HEAD", help="directory of a head for this target to "
        "train further, instead of a copy of the target's last layer")  # fmt: skip
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--data", type=Path, help="directory of shards that the target wrote (default: the target "
        "writes OUTPUT/data first)")  # fmt: skip
    add("--generate-seconds", type=float, help=f"time for writing data (default: "
        f"{GENERATE_SHARE:g} of --max-seconds; without that, {GENERATE_SECONDS:g})")  # fmt: skip
    add("--documents", type=Path, action="append", default=[], metavar="FILE",
        help="texts to summarise and to ask about: JSONL with text, or one a line")  # fmt: skip
    add("--prompts", type=Path, action="append", default=[], metavar="FILE",
        help="prompts to answer: JSONL with prompt or messages")  # fmt: skip
    add("--generate-arguments", default="", help="further arguments of training.generate, in one "
        "string")  # fmt: skip
    group = parser.add_argument_group("expert")
    add = group.add_argument
    add("--export", type=Path, help="directory of the exported head (default: OUTPUT/head)")
    add("--held-out", type=Path, help="a shard to watch acceptance on, instead of data set aside")
    add("--held-out-rows", type=int, default=64, help="rows to watch acceptance on")
    add("--evaluate", type=Path, nargs="*", default=[], help="shards to evaluate the end on")
    add("--stored-features", type=Path, help="directory that keeps the target's features (small "
        "data): computed once, then read")  # fmt: skip
    add("--kernels", choices=("auto", "fused", "plain"), default="auto", help="form of the "
        "attention and the loss: auto tries the fast one against the plain one")  # fmt: skip
    add("--layer-ids", type=int, nargs="*", default=[], help="layers whose input is captured "
        "(default: 2, half, last but two)")  # fmt: skip
    add("--draft-vocabulary-size", type=int, default=0, help="0: the largest that fits --max-bytes")
    add("--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="bound on the exported file")
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

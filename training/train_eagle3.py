"""From a target to a head: data, draft vocabulary, training, export, evaluation, picture.

`outrider train-eagle3 --target MODEL --output DIR --max-seconds N`
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.eagle3.head_config import RecordedTarget
from outrider.engine.errors import EngineError
from outrider.serving.errors import ConfigurationError
from outrider.serving.model_source import ModelSource, resolve_model
from outrider.serving.tokenizer import load_tokenizer
from training.checkpoint import ResumeError, RunState, load_state
from training.data import DataError, RowSet, shard_paths
from training.draft_vocabulary import (
    DraftVocabulary,
    choose_draft_vocabulary,
    covered_share,
    largest_size,
)
from training.earlier_head import EarlierHead, read_earlier_head
from training.export import export_head, file_bytes
from training.head import Head, HeadShape, default_layer_ids, head_shape, initialise, rotation_of
from training.kernels import choose_kernels
from training.loss import Vocabulary
from training.metrics import MetricsFile
from training.options import Options, parse_options
from training.own_data import write_own_data
from training.plot import PlotError, plot_run
from training.progress import Progress, open_progress
from training.target import DenseTarget, load_target
from training.target_rows import ComputedRows, stored_rows
from training.train import (
    CHECKPOINT_FILE,
    METRICS_FILE,
    Ending,
    RunTarget,
    Setting,
    Trainer,
    trainable_rows,
)

# Exit status of a run that stopped before its end and can be resumed.
PAUSED_STATUS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, 1 for an error, 3 for a paused run)."""
    options = parse_options(arguments)
    progress = open_progress()
    try:
        return run(options, progress)
    except (
        ConfigurationError, DataError, EngineError, OSError, ResumeError, RuntimeError, ValueError
    ) as error:  # fmt: skip
        if isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        progress.close()


def run(options: Options, progress: Progress) -> int:
    """All stages in order; returns the exit status."""
    device = _device(options.device)
    if options.generation is not None:
        write_own_data(options, options.generation, str(device), progress)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = resolve_model(options.target)
    target = load_target(source.path, dtype=dtype, device=device)
    rows, held_out = load_rows(options)
    checkpoint = options.output / CHECKPOINT_FILE
    state = load_state(checkpoint) if options.resume and checkpoint.is_file() else None
    earlier = None
    if options.start_from is not None:
        earlier = read_earlier_head(options.start_from, target.config)
    choice = _draft_vocabulary(options, target, rows, state, earlier)
    shape = _shape(target, _layer_ids(options, target, state, earlier), len(choice.ids))
    progress.note(
        f"{source.name}: {len(rows)} rows, {len(rows.tokens)} tokens, {rows.answer_token_count} "
        f"written by the target; {len(held_out)} rows held out; {len(choice.ids)} draft ids cover "
        f"{choice.coverage:.2%}; layers {shape.layer_ids}; {device}"
    )
    head = _new_head(shape, target, choice, earlier, options.training.seed).to(device)
    setting = _setting(options, target, shape, choice, rows, held_out, progress)
    trainer = Trainer(head, setting, options.training, progress)
    if state is not None:
        trainer.restore(state)
        progress.note(f"continuing after update {trainer.update}")
    ending = _train(trainer)
    trainer.use_average()
    metadata = {
        "target": source.name,
        "updates": str(trainer.update),
        "draft_vocabulary_coverage": f"{choice.coverage:.6f}",
    }
    size = export_head(
        head,
        choice.ids,
        options.export,
        metadata=metadata,
        max_bytes=options.max_bytes,
        target=_recorded_target(source, progress),
    )
    progress.note(f"{options.export}: {size} bytes of weights")
    if ending is Ending.PAUSED:
        # What there is so far can be drafted with, though its rate has not come down yet.
        progress.note(f"paused after update {trainer.update}; continue with --resume")
        return PAUSED_STATUS
    _evaluate(options, trainer, setting, target, shape, progress)
    try:
        plot_run(options.output / METRICS_FILE, options.output / "training.png")
    except PlotError as error:
        progress.note(f"no picture: {error}")
    return 0


def load_rows(options: Options) -> tuple[RowSet, RowSet]:
    """The rows to train on and those set aside; raises DataError."""
    longest = options.training.max_length
    rows = trainable_rows(RowSet.load(shard_paths(options.data)), longest)
    random = np.random.default_rng(options.training.seed)
    if options.held_out is not None:
        held_out = trainable_rows(RowSet.load([options.held_out]), longest)
        chosen = random.permutation(len(held_out))[: options.held_out_rows]
        held_out = held_out.select(np.sort(chosen))
    else:
        order = random.permutation(len(rows))
        aside = min(options.held_out_rows, len(rows) // 10)
        held_out = rows.select(np.sort(order[:aside]))
        rows = rows.select(np.sort(order[aside:]))
    if len(rows) == 0:
        raise DataError(f"{options.data}: no row has a token of the target's to predict")
    return rows, held_out


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _layer_ids(
    options: Options, target: DenseTarget, state: RunState | None, earlier: EarlierHead | None
) -> tuple[int, ...]:
    if state is not None:
        return tuple(state.layer_ids)
    if earlier is not None:
        return earlier.layer_ids
    return options.layer_ids or default_layer_ids(target.config.num_layers)


def _shape(target: DenseTarget, layer_ids: tuple[int, ...], draft_vocab_size: int) -> HeadShape:
    return head_shape(target.config, draft_vocab_size=draft_vocab_size, layer_ids=layer_ids)


def _draft_vocabulary(
    options: Options,
    target: DenseTarget,
    rows: RowSet,
    state: RunState | None,
    earlier: EarlierHead | None,
) -> DraftVocabulary:
    if state is not None:
        ids = state.draft_ids.numpy()
        return DraftVocabulary(ids, covered_share(rows, ids))
    if earlier is not None:
        return DraftVocabulary(earlier.draft_ids, covered_share(rows, earlier.draft_ids))
    size = options.draft_vocab_size
    vocab_size = target.config.vocab_size
    if size == 0:
        layer_ids = _layer_ids(options, target, None, None)
        fixed, per_id = file_bytes(_shape(target, layer_ids, 1))
        size = largest_size(
            fixed_bytes=fixed,
            bytes_per_id=per_id,
            max_bytes=options.max_bytes,
            vocab_size=vocab_size,
        )
    return choose_draft_vocabulary(
        rows, size=size, vocab_size=vocab_size, always=target.config.eos_token_ids
    )


def _new_head(
    shape: HeadShape,
    target: DenseTarget,
    choice: DraftVocabulary,
    earlier: EarlierHead | None,
    seed: int,
) -> Head:
    head = Head(shape)
    if earlier is not None:
        head.load_state_dict(earlier.parameters)
        return head
    ids = torch.from_numpy(choice.ids).to(target.head.device)
    initialise(
        head,
        last_layer=target.layer_state(target.config.num_layers - 1),
        final_norm=target.final_norm,
        draft_rows=target.head[ids],
        generator=torch.Generator().manual_seed(seed),
    )
    return head


def _setting(
    options: Options,
    target: DenseTarget,
    shape: HeadShape,
    choice: DraftVocabulary,
    rows: RowSet,
    held_out: RowSet,
    progress: Progress,
) -> Setting:
    device, dtype = target.embedding.device, target.embedding.dtype
    ids = torch.from_numpy(choice.ids)
    index = torch.full((target.config.vocab_size,), -1, dtype=torch.long)
    index[ids] = torch.arange(len(ids))
    longest_chain = max(options.training.unroll_steps, *options.training.draft_lengths)
    return Setting(
        run_target=_run_target(options, target, shape, rows),
        run_held_out_target=_run_target(options, target, shape, held_out),
        rows=rows,
        held_out=held_out,
        vocabulary=Vocabulary(
            embedding=target.embedding,
            draft_rows=target.head[ids.to(device)].contiguous(),
            draft_index=index.to(device),
        ),
        draft_ids=ids,
        rotation=rotation_of(
            shape, options.training.max_length + 64 + longest_chain, device=device
        ),
        kernels=choose_kernels(
            device,
            dtype,
            draft_vocab_size=len(ids),
            choice=options.kernels,
            note=progress.note,
        ),
        device=device,
        dtype=dtype,
        directory=options.output,
    )


def _run_target(options: Options, target: DenseTarget, shape: HeadShape, rows: RowSet) -> RunTarget:
    computed = ComputedRows(target, shape.layer_ids)
    if options.stored_features is None or len(rows) == 0:
        return computed
    return stored_rows(
        options.stored_features,
        rows,
        computed,
        identity=f"{options.target} {shape.layer_ids}",
        device=target.embedding.device,
        max_length=options.training.max_length,
    )


def _recorded_target(source: ModelSource, progress: Progress) -> RecordedTarget | None:
    try:
        vocabulary = load_tokenizer(source.path)
    except ValueError as error:
        # Data given as token ids needs no tokenizer.
        progress.note(f"the head's config.json records no tokenizer: {error}")
        return None
    return RecordedTarget(name=source.name, tokenizer_sha256=vocabulary.sha256)


def _train(trainer: Trainer) -> Ending:
    """Train with SIGTERM and SIGINT turned into a checkpoint and a pause."""
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        signal.signal(number, lambda *_: trainer.request_stop())
    try:
        return trainer.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Evaluated:
    name: str
    rows: RowSet


def _evaluate(
    options: Options,
    trainer: Trainer,
    setting: Setting,
    target: DenseTarget,
    shape: HeadShape,
    progress: Progress,
) -> None:
    computed = ComputedRows(target, shape.layer_ids)
    sets = [_Evaluated("held out", setting.held_out)]
    for path in options.evaluation:
        rows = trainable_rows(RowSet.load([path]), options.training.max_length)
        sets.append(_Evaluated(path.stem, rows))
    report: dict[str, object] = {}
    for one in sets:
        found = trainer.evaluate_rows(one.rows, computed, options.training.draft_lengths)
        report[one.name] = [acceptance.record() for acceptance in found]
        for acceptance in found:
            shares = " ".join(f"{share:.3f}" for share in acceptance.per_position)
            progress.note(
                f"{one.name}: draft length {acceptance.draft_length}: acceptance length "
                f"{acceptance.acceptance_length:.3f} over {acceptance.drafts} drafts; "
                f"accepted up to each position {shares}"
            )
    MetricsFile(options.output / METRICS_FILE).write(
        {
            "kind": "evaluation",
            "update": trainer.update,
            "seconds": 0.0,
            "acceptance": report["held out"],
        }
    )
    text = json.dumps(report, indent=2) + "\n"
    (options.output / "evaluation.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

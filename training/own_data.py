"""The data of a run that was given none: the target writes it, once per run."""

from training.data import SHARD_SUFFIX
from training.generate import SUMMARY_FILE, generate, parse
from training.options import Generation, Options
from training.progress import Progress
from training.row_store import HELD_OUT, TRAIN


def write_own_data(
    options: Options, generation: Generation, device: str, progress: Progress
) -> None:
    """Fill the run's data directory; a resumed run keeps data that is complete.

    Raises what `training.generate.generate` raises; exits with usage on bad arguments for it.
    """
    summary = generation.directory / SUMMARY_FILE
    if options.resume and summary.is_file():
        progress.note(f"{generation.directory}: written by the run that is continued")
        return
    arguments = parse(_arguments(options, generation, device))
    # Shards of an earlier run would be trained on too.
    summary.unlink(missing_ok=True)
    for split in (TRAIN, HELD_OUT):
        for shard in (generation.directory / split).glob(f"*{SHARD_SUFFIX}"):
            shard.unlink()
    generate(arguments, progress)


def _arguments(options: Options, generation: Generation, device: str) -> list[str]:
    arguments = [
        "--target", options.target, "--output", str(generation.directory),
        "--max-seconds", str(generation.seconds), "--seed", str(options.training.seed),
        "--device", device,
    ]  # fmt: skip
    for flag, paths in (("--documents", generation.documents), ("--prompts", generation.prompts)):
        for path in paths:
            arguments += [flag, str(path)]
    return arguments + list(generation.arguments)

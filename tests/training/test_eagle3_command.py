"""`outrider train-eagle3` from nothing but a target: data, head, evaluation, picture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.engine.boot import read_model
from outrider.engine.eagle3.head_config import read_head_config, read_recorded_target
from outrider.engine.eagle3.head_weights import TargetCheckpoint, load_head
from outrider.serving.tokenizer import load_tokenizer
from tests.engine.engine_support import make_model, save
from training.metrics import read_metrics
from training.options import parse_options
from training.train_eagle3 import main

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model over bytes, which writes a step's tokens in milliseconds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_to_ids = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_to_ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END])
    model = make_model(
        "llama", vocab_size=264, hidden_size=32, num_hidden_layers=7, eos_token_id=257
    )
    directory = save(model, tmp_path_factory.mktemp("model"))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def arguments(target: Path, output: Path, *more: str) -> list[str]:
    return [
        "--target", str(target), "--output", str(output), "--device", "cpu",
        "--generate-seconds", "4", "--generate-arguments", "--rows 32 --long-share 0",
        "--draft-vocabulary-size", "128", "--unroll-steps", "2", "--tokens-per-batch", "1024",
        "--held-out-rows", "2", *more,
    ]  # fmt: skip


def test_one_command_makes_a_head_that_the_engine_loads(target: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-W", "error", "-m", "outrider.cli.main", "train-eagle3",
            *arguments(target, tmp_path / "run", "--max-updates", "3", "--log-seconds", "0"),
        ],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = tmp_path / "run"
    assert "  update 3  loss " in done.stderr
    assert "held out: draft length 3: acceptance length" in done.stderr
    summary = json.loads((output / "data" / "summary.json").read_text())
    assert summary["rows"]["train"] >= 10
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert [one["draft_length"] for one in evaluation["held out"]] == [3, 5, 7]
    assert evaluation["held out"][0]["drafts"] > 0
    assert [one["update"] for one in read_metrics(output / "metrics.jsonl")][-1] == 3
    assert (output / "training.png").read_bytes().startswith(b"\x89PNG")

    model, source = read_model(target)
    head_config = read_head_config(output / "head", model)
    assert head_config.feature_layers.inputs == (2, 3, 4)
    weights = load_head(
        head_config,
        output / "head",
        TargetCheckpoint(config=model, source=source),
        torch.float32,
    )
    assert weights.target_token_ids is not None and len(weights.target_token_ids) == 128
    recorded = read_recorded_target(output / "head")
    assert recorded is not None
    assert recorded.tokenizer_sha256 == load_tokenizer(target).sha256


def test_a_resumed_run_keeps_its_data_and_a_new_one_drops_it(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "data" / "train" / "00009.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of an earlier run")
    assert main(arguments(target, tmp_path, "--max-updates", "1")) == 0
    assert not stale.exists()
    written = (tmp_path / "data" / "summary.json").read_bytes()
    capsys.readouterr()
    assert main(arguments(target, tmp_path, "--max-updates", "2", "--resume")) == 0
    text = capsys.readouterr().err
    assert "data: written by the run that is continued" in text
    assert "continuing after update 1" in text
    assert (tmp_path / "data" / "summary.json").read_bytes() == written


def test_the_time_is_shared_between_writing_and_training() -> None:
    options = parse_options(["--output", "run", "--max-seconds", "1000"])
    assert options.generation is not None
    assert (options.generation.seconds, options.training.max_seconds) == (300, 700)
    assert options.data == options.generation.directory / "train" == Path("run/data/train")
    options = parse_options(
        ["--output", "run", "--max-seconds", "1000", "--generate-seconds", "400"]
    )
    assert options.generation is not None
    assert (options.generation.seconds, options.training.max_seconds) == (400, 600)
    options = parse_options(["--output", "run", "--max-updates", "9"])
    assert options.generation is not None
    assert (options.generation.seconds, options.training.max_seconds) == (240, None)
    options = parse_options(["--output", "run", "--max-seconds", "1000", "--data", "shards"])
    assert options.generation is None
    assert (options.data, options.training.max_seconds) == (Path("shards"), 1000)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "give --max-seconds or --max-updates"),
        (
            ("--max-seconds", "60", "--generate-seconds", "60"),
            "--generate-seconds is 60: must be above 0 and below --max-seconds",
        ),
        (
            ("--max-seconds", "60", "--data", "shards", "--documents", "texts.jsonl"),
            "--documents is for data that the target writes: not with --data",
        ),
    ],
)
def test_arguments_that_contradict_are_refused(
    more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(["--output", "run", *more])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err

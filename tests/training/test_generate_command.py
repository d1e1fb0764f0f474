"""The whole command over a small random target with the default model's tokenizer."""

import json
from pathlib import Path

import pytest

from outrider.serving.tokenizer import load_tokenizer
from tests.engine.engine_support import default_model_path, make_model, save
from training.data import RowSet, shard_paths
from training.generate import main

ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = load_tokenizer(default_model_path())
    model = make_model("llama", vocab_size=vocabulary.vocab_size, hidden_size=32)
    directory = save(model, tmp_path_factory.mktemp("model"))
    (directory / "tokenizer.json").write_text(vocabulary.first_run.to_str(), encoding="utf-8")
    settings = {"chat_template": vocabulary.chat_template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def run(model_directory: Path, output: Path, *options: str) -> dict[str, object]:
    arguments = [
        "--target", str(model_directory), "--output", str(output), "--device", "cpu",
        "--rows", "12", "--long-rows", "4", *options,
    ]  # fmt: skip
    assert main(arguments) == 0
    summary: dict[str, object] = json.loads((output / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.full)])
def test_short_and_long_rows_are_written_with_their_prompts(
    model_directory: Path, tmp_path: Path, workers: str
) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"Text {n} tells of rain and wind. " * 60}) for n in range(20)]
    texts.write_text("\n".join(lines), encoding="utf-8")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": f"Is {n} even?"}) for n in range(40)), encoding="utf-8"
    )
    summary = run(
        model_directory, tmp_path / "out", "--max-seconds", "10", "--workers", workers,
        "--documents", str(texts), "--prompts", str(prompts), "--long-share", "0.5",
    )  # fmt: skip
    kinds = summary["rows_by_kind"]
    assert isinstance(kinds, dict)
    assert kinds.keys() & {"summaries", "questions"}, kinds
    assert kinds.keys() - {"summaries", "questions"}, kinds
    given = summary["prompts_given"]
    assert isinstance(given, dict) and given["left"] < 40
    rows = RowSet.load(shard_paths(tmp_path / "out" / "train"))
    counted = summary["rows"]
    assert isinstance(counted, dict) and counted["train"] == len(rows) > 2
    vocabulary = load_tokenizer(model_directory)
    for index in range(len(rows)):
        row = rows.row(index)
        start = row.answer_start
        prompt = vocabulary.decode(list(map(int, row.tokens[:start])), skip_special=False)
        assert prompt.startswith("<|im_start|>system\n") and prompt.endswith(ASSISTANT)
        assert start < len(row.tokens) <= 1024


def test_bad_inputs_end_the_command_with_their_name(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        run(model_directory, tmp_path / "out", "--documents", str(broken))
    assert stopped.value.code == 2
    assert "broken.jsonl: line 1: not JSON" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(model_directory, tmp_path / "out", "--long-share", "1")
    assert "--long-share is 1.0: must be from 0 to below 1" in capsys.readouterr().err

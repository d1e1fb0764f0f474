"""Training that goes on from an exported head."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from eagle3_toy import write_data, write_target
from safetensors.torch import load_file, save_file

from training.metrics import read_metrics
from training.train_eagle3 import main


def train(directory: Path, output: Path, *more: str) -> int:
    return main(
        [
            "--target", str(directory / "target"), "--data", str(directory / "data"),
            "--output", str(output), "--held-out", str(directory / "aside.safetensors"),
            "--tokens-per-batch", "512", "--unroll-steps", "3", "--device", "cpu", *more,
        ]
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, data, and a head of layers 1, 3 and 5 trained for a while in `run`."""
    directory = tmp_path_factory.mktemp("start_from")
    target = write_target(directory / "target")
    write_data(directory / "data" / "a.safetensors", target, rows=150, length=30, seed=0)
    write_data(directory / "aside.safetensors", target, rows=24, length=30, seed=1)
    arguments = ("--draft-vocabulary-size", "48", "--layer-ids", "1", "3", "5")
    assert train(directory, directory / "run", *arguments, "--max-updates", "60") == 0
    return directory


def evaluations(run: Path) -> list[float]:
    """Acceptance length at draft length 3, in order."""
    return [
        one["acceptance"][0]["acceptance_length"]
        for one in read_metrics(run / "metrics.jsonl")
        if one["kind"] == "evaluation"
    ]


def test_a_run_begins_as_good_as_the_head_it_starts_from(trained: Path, tmp_path: Path) -> None:
    head = trained / "run" / "head"
    assert train(trained, tmp_path, "--start-from", str(head), "--max-updates", "40") == 0
    before, after = evaluations(trained / "run"), evaluations(tmp_path)
    # The file's bfloat16 may move a near tie.
    assert after[0] == pytest.approx(before[-1], abs=0.02)
    assert before[-1] > before[0] + 0.1
    assert after[-1] > after[0]
    earlier, later = (load_file(run / "head" / "model.safetensors") for run in
                      (trained / "run", tmp_path))  # fmt: skip
    assert torch.equal(earlier["d2t"], later["d2t"])
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]


def test_without_a_step_the_head_comes_out_as_it_went_in(trained: Path, tmp_path: Path) -> None:
    head = trained / "run" / "head"
    arguments = ("--max-updates", "1", "--learning-rate", "1e-12")
    assert train(trained, tmp_path, "--start-from", str(head), *arguments) == 0
    earlier, later = (load_file(directory / "model.safetensors") for directory in
                      (head, tmp_path / "head"))  # fmt: skip
    assert earlier.keys() == later.keys()
    for name, tensor in earlier.items():
        assert torch.equal(tensor, later[name]), name


def test_draft_ids_in_any_order_are_the_same_head(trained: Path, tmp_path: Path) -> None:
    head = tmp_path / "shuffled"
    shutil.copytree(trained / "run" / "head", head)
    tensors = load_file(head / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    shuffled = {
        **tensors,
        "d2t": ids[order] - torch.arange(48),
        "lm_head.weight": tensors["lm_head.weight"][order].contiguous(),
    }
    save_file(shuffled, head / "model.safetensors")
    arguments = ("--max-updates", "1", "--learning-rate", "1e-12")
    assert train(trained, tmp_path / "run", "--start-from", str(head), *arguments) == 0
    later = load_file(tmp_path / "run" / "head" / "model.safetensors")
    for name in ("d2t", "lm_head.weight"):
        assert torch.equal(tensors[name], later[name]), name


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("norm_before_residual", True, "norm_before_residual is true"),
        ("vocab_size", 65, "vocab_size is 65: must be the target's, 64"),
        ("draft_vocab_size", 47, "tensor d2t has shape [48]: must be [47]"),
    ],
)
def test_another_form_of_head_is_refused_by_name(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    value: object,
    words: str,
) -> None:
    head = tmp_path / "head"
    shutil.copytree(trained / "run" / "head", head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, setting: value}))
    assert train(trained, tmp_path / "run", "--start-from", str(head), "--max-updates", "1") == 1
    assert words in capsys.readouterr().err


def test_a_head_without_one_of_its_tensors_is_refused_by_name(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    shutil.copytree(trained / "run" / "head", head)
    tensors = load_file(head / "model.safetensors")
    del tensors["midlayer.mlp.up_proj.weight"]
    save_file(tensors, head / "model.safetensors")
    assert train(trained, tmp_path / "run", "--start-from", str(head), "--max-updates", "1") == 1
    assert "tensor midlayer.mlp.up_proj.weight is missing" in capsys.readouterr().err


def test_what_the_head_decides_cannot_be_given_beside_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(
            trained, tmp_path, "--start-from", str(trained / "run" / "head"), "--max-updates", "1",
            "--layer-ids", "1", "3", "5",
        )  # fmt: skip
    assert "not with --start-from" in capsys.readouterr().err

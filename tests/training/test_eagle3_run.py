"""The whole command on a tiny random target: learning, resuming, stopping, export, errors."""

import json
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from eagle3_toy import write_data, write_target
from safetensors import safe_open
from safetensors.torch import load_file

from training.metrics import read_metrics
from training.train_eagle3 import PAUSED_STATUS, main


@dataclass(frozen=True)
class Toy:
    target: Path
    data: Path
    aside: Path


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    directory = tmp_path_factory.mktemp("toy")
    target = write_target(directory / "target")
    write_data(directory / "data" / "a.safetensors", target, rows=150, length=30, seed=0)
    write_data(directory / "aside.safetensors", target, rows=24, length=30, seed=1)
    return Toy(directory / "target", directory / "data", directory / "aside.safetensors")


def train(toy: Toy, output: Path, *more: str) -> int:
    return main(
        [
            "--target", str(toy.target), "--data", str(toy.data), "--output", str(output),
            "--held-out", str(toy.aside), "--tokens-per-batch", "512",
            "--draft-vocabulary-size", "48", "--unroll-steps", "3", "--device", "cpu", *more,
        ]
    )  # fmt: skip


def test_training_raises_acceptance_and_exports_what_it_trained(toy: Toy, tmp_path: Path) -> None:
    arguments = ("--max-updates", "70", "--evaluate-every", "35", "--evaluate", str(toy.aside))
    assert train(toy, tmp_path, *arguments) == 0
    records = read_metrics(tmp_path / "metrics.jsonl")
    lengths = [
        one["acceptance"][0]["acceptance_length"] for one in records if one["kind"] == "evaluation"
    ]
    assert len(lengths) == 4  # the start, every 35 updates, the exported head
    assert lengths[-1] > lengths[0] + 0.1
    losses = [one["losses"] for one in records if one["kind"] == "training"]
    assert len(losses[-1]) == 3
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["aside"] == evaluation["held out"]

    tensors = load_file(tmp_path / "head" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": (32, 96),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (64, 32),
        "midlayer.mlp.up_proj.weight": (64, 32),
        "midlayer.mlp.down_proj.weight": (32, 64),
        "norm.weight": (32,),
        "lm_head.weight": (48, 32),
        "d2t": (48,),
        "t2d": (64,),
    }
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for name, parameter in checkpoint["head"].items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], parameter.bfloat16())
    ids = tensors["d2t"] + torch.arange(48)
    assert torch.equal(ids, checkpoint["draft_ids"])
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert 2 in ids
    with safe_open(tmp_path / "head" / "model.safetensors", framework="pt") as reader:
        assert reader.metadata()["updates"] == "70"
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, 48)
    assert "eagle_config" not in config


def test_a_run_of_many_processes_is_bit_equal_to_a_run_of_one(toy: Toy, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    arguments = ("--max-updates", "4", "--average-decay", "0.5", "--resume", "--log-seconds", "0")
    assert train(toy, whole, *arguments) == 0
    statuses = [train(toy, pieces, *arguments, "--pause-seconds", "0") for _ in range(4)]
    assert statuses == [PAUSED_STATUS] * 3 + [0]
    one, other = (load_file(path / "head" / "model.safetensors") for path in (whole, pieces))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    losses = [
        [record["losses"] for record in read_metrics(path / "metrics.jsonl") if "losses" in record]
        for path in (whole, pieces)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_stored_features_train_as_computed_ones_do(toy: Toy, tmp_path: Path) -> None:
    store = str(tmp_path / "features")
    for name, more in (("a", ()), ("b", ("--stored-features", store))):
        assert train(toy, tmp_path / name, "--max-updates", "2", *more) == 0
    assert len(list((tmp_path / "features").iterdir())) == 2
    one, other = (load_file(tmp_path / name / "head" / "model.safetensors") for name in "ab")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], msg=name)


def test_sigterm_writes_a_checkpoint_and_pauses(toy: Toy, tmp_path: Path) -> None:
    seen = threading.Event()

    def stop() -> None:
        metrics = tmp_path / "metrics.jsonl"
        while not seen.wait(0.05):
            if metrics.is_file() and '"training"' in metrics.read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=stop)
    watcher.start()
    before = signal.getsignal(signal.SIGTERM)
    status = train(toy, tmp_path, "--max-seconds", "60", "--log-seconds", "0")
    seen.set()
    watcher.join()
    assert status == PAUSED_STATUS
    assert signal.getsignal(signal.SIGTERM) is before
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["update"] >= 1
    assert 0 < state["seconds"] < 60
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_a_checkpoint_of_other_data_or_no_checkpoint_is_refused(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(toy, tmp_path, "--max-updates", "1") == 0
    assert train(toy, tmp_path, "--max-updates", "2", "--resume", "--seed", "1") == 1
    assert "trained on other data, or in another order" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"cut short")
    assert train(toy, tmp_path, "--max-updates", "2", "--resume") == 1
    assert "checkpoint.pt: is not a checkpoint" in capsys.readouterr().err


def test_a_file_over_its_bound_and_missing_data_are_errors(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(toy, tmp_path, "--max-updates", "1", "--max-bytes", "20000") == 1
    assert "must be below 20000" in capsys.readouterr().err
    assert not (tmp_path / "head" / "model.safetensors").exists()
    empty = Toy(toy.target, tmp_path / "none", toy.aside)
    assert train(empty, tmp_path, "--max-updates", "1") == 1
    assert "holds no .safetensors files" in capsys.readouterr().err

"""The start-up of the EAGLE-3 drafter over files: its stages, its evidence, and what it refuses."""

import hashlib
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import EOS_TOKEN_ID, MAX_SEQUENCE_LENGTH, VOCAB_SIZE, write_checkpoint

from draft_service.boot import boot_drafter
from draft_service.config import DraftConfig
from draft_service.drafters.eagle3_boot import boot_eagle3_drafter
from outrider.engine.eagle3 import first_extend
from outrider.engine.errors import CheckpointError, ConfigError, InvarianceError
from outrider.engine.feature_projection import load_projection
from outrider.serving.errors import ConfigurationError
from outrider.serving.tokenizer import load_tokenizer
from tests.engine.head_checkpoint import HIDDEN_SIZE, HeadFiles, flat_head
from tests.processor import ENGINE_DTYPES

IDS = "eagle_aux_hidden_state_layer_ids"


class Report:
    """A boot report that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []

    def enter(self, stage: str) -> None:
        self.stages.append(stage)

    def skip(self, stage: str, reason: str) -> None:
        self.stages.append(f"{stage} skipped")

    def note(self, detail: str) -> None:
        self.notes.append(detail)


def head_for_two_layers() -> HeadFiles:
    """For the tiny target, of whose layers the default ones would be the same."""
    files = flat_head(vocab_size=VOCAB_SIZE, eagle_config={IDS: [0]}, num_aux_hidden_states=1)
    files.tensors["fc.weight"] = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)
    del files.tensors["t2d"]
    return files


@pytest.fixture
def config(tmp_path: Path) -> DraftConfig:
    target = write_checkpoint(tmp_path / "target")
    head = head_for_two_layers().write(tmp_path / "head")
    return DraftConfig(
        draft="eagle3",
        draft_model=str(head),
        model=str(target),
        dtype="float32",
        kv_cache_mib=4,
        draft_window=64,
        draft_min_probability=0.01,
    )


def test_the_stages_end_with_a_head_that_has_run_and_a_service_that_has_proposed(
    config: DraftConfig,
) -> None:
    report = Report()
    booted = boot_drafter(config, report)
    assert report.stages == [
        "config",
        "weights",
        "kv_cache",
        "attention",
        "graphs skipped",
        "first_decode",
    ]
    assert booted.identity.vocab_size == VOCAB_SIZE
    assert booted.identity.eos_token_ids == (EOS_TOKEN_ID,)
    assert booted.identity.tokenizer_sha256 == load_tokenizer(Path(config.model)).sha256
    limits = booted.limits
    assert limits["features"] == f"input of layers 1 (output of layers 0 by eagle_config.{IDS})"
    assert limits["draft_vocabulary"] == "40 of 264"
    assert limits["feature_rows"] == "32 numbers, bfloat16"
    assert (limits["dtype"], limits["block_size"]) == ("float32", "32")
    assert limits["step_milliseconds"].startswith("1: ")
    offer = booted.drafter.offer
    # Of the target, not of what the head was trained with.
    assert offer.max_sequence_length == MAX_SEQUENCE_LENGTH
    assert offer.name == "eagle3" and len(offer.fingerprint) == 64
    needs = offer.feature_needs
    assert needs.projection_sha256 == hashlib.sha256(needs.projection).hexdigest()
    projection = load_projection(needs.projection, hidden_size=HIDDEN_SIZE, dtype=torch.float32)
    assert projection.layer_ids == (1,)
    assert any("12 rows alike in one piece, alone and run again" in note for note in report.notes)
    assert 1 <= len(booted.first_draft.draft_token_ids) <= 4


@pytest.mark.parametrize("dtype", ENGINE_DTYPES)
def test_the_first_decode_holds_in_either_dtype(dtype: str, config: DraftConfig) -> None:
    report = Report()
    booted = boot_eagle3_drafter(config.model_copy(update={"dtype": dtype}), report)
    assert booted.limits["dtype"] == dtype


def test_a_head_in_float16_asks_for_rows_in_float16(config: DraftConfig, tmp_path: Path) -> None:
    files = head_for_two_layers()
    files.tensors |= {
        name: tensor.half() for name, tensor in files.tensors.items() if tensor.is_floating_point()
    }
    files.write(tmp_path / "head")
    booted = boot_drafter(config, Report())
    assert booted.drafter.offer.feature_needs.dtype == "float16"
    assert booted.first_draft.draft_token_ids


def test_rows_that_come_out_otherwise_the_second_time_end_the_start(
    config: DraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(first_extend.TOLERANCES, torch.float32, -1.0)
    words = "logits of rows in one piece and rows alone differ by up to .* must be within -1 of it"
    with pytest.raises(InvarianceError, match=words):
        boot_eagle3_drafter(config, Report())


def test_a_head_without_its_target_is_refused(config: DraftConfig) -> None:
    with pytest.raises(ConfigurationError, match="model is ''"):
        boot_eagle3_drafter(config.model_copy(update={"model": ""}), Report())


def test_a_head_for_another_vocabulary_is_refused_in_stage_config(
    config: DraftConfig, tmp_path: Path
) -> None:
    report = Report()
    flat_head().write(tmp_path / "head")
    with pytest.raises(ConfigError, match="vocab_size is 96: must be the target's, 264"):
        boot_eagle3_drafter(config, report)
    assert report.stages == ["config"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"name": "other", "tokenizer_sha256": "ab"}, r"tokenizer_sha256 is ab \(of other\): must"),
        ({"name": "other"}, "outrider_target.tokenizer_sha256 is None: must be a text"),
    ],
)
def test_a_head_that_records_another_tokenizer_is_refused_in_stage_config(
    record: dict[str, str], words: str, config: DraftConfig, tmp_path: Path
) -> None:
    files = head_for_two_layers()
    files.settings["outrider_target"] = record
    files.write(tmp_path / "head")
    report = Report()
    with pytest.raises(ConfigError, match=words):
        boot_eagle3_drafter(config, report)
    assert report.stages == ["config"]


def test_a_head_that_records_its_own_target_is_taken(config: DraftConfig, tmp_path: Path) -> None:
    files = head_for_two_layers()
    sha256 = load_tokenizer(Path(config.model)).sha256
    files.settings["outrider_target"] = {"name": "tiny", "tokenizer_sha256": sha256}
    files.write(tmp_path / "head")
    assert boot_eagle3_drafter(config, Report()).identity.tokenizer_sha256 == sha256


def test_a_broken_head_is_refused_in_stage_weights(config: DraftConfig, tmp_path: Path) -> None:
    report = Report()
    files = head_for_two_layers()
    files.tensors["norm.weight"][0] = float("nan")
    files.write(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight has values that are not"):
        boot_eagle3_drafter(config, report)
    assert report.stages[-1] == "weights"

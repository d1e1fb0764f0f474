"""Boot reports its stages in order, stops where it fails, and refuses bad configuration."""

import importlib.util
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import RecordingReport, boot_engine, make_model, random_tokens, run_rows, save

from outrider.engine import devices
from outrider.engine.boot import Engine, EngineConfig, Stage, boot
from outrider.engine.config import resolve_dtype
from outrider.engine.errors import CheckpointError, ConfigError, InvarianceError, StepError
from outrider.engine.first_decode import decode_once
from outrider.engine.gpu.device import find_device
from outrider.engine.invariance import check_steps
from outrider.engine.runner import Runner, SequenceRows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return boot_engine(checkpoint, max_step_rows=64)


def test_the_stages_are_entered_in_order_and_graphs_are_skipped(checkpoint: Path) -> None:
    report = RecordingReport()
    boot(EngineConfig(model_path=checkpoint, kv_cache_bytes=8 << 20), report)
    assert report.stages == list(Stage)
    assert report.stages == [
        "config", "weights", "kv_cache", "attention", "graphs", "first_decode"
    ]  # fmt: skip
    assert list(report.skipped) == ["graphs"]
    assert {"weights", "kv_cache", "attention", "first_decode"} <= {at for at, _ in report.notes}


def test_a_failed_boot_stops_at_its_stage(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    report = RecordingReport()
    with pytest.raises(CheckpointError, match="all zero"):
        boot(EngineConfig(model_path=save(model, tmp_path)), report)
    assert report.stages == ["config", "weights"]


def test_an_engine_carries_the_evidence_of_its_first_decode(engine: Engine) -> None:
    evidence = engine.first_decode
    table = engine.block_pool.allocate(2)
    logits = run_rows(engine.runner, table, evidence.prompt_token_ids, 0, 1)
    engine.block_pool.release(table)
    assert int(logits[0].argmax()) == evidence.token_ids[0]
    assert "bitwise equal" in evidence.compared
    assert evidence.seconds > 0
    with pytest.raises(TypeError):
        Engine(model_config=engine.model_config)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        engine.dtype = "float64"  # type: ignore[misc]


def test_limits_are_what_boot_measured(engine: Engine) -> None:
    limits = engine.limits
    assert engine.block_pool.num_free == limits.num_blocks - 1
    assert [rows for rows, _ in limits.step_seconds] == [1, 8, 16, 32, 64]
    assert all(seconds > 0 for _, seconds in limits.step_seconds)
    assert limits.max_sequence_length == 1024
    assert (engine.dtype, engine.device) == ("float32", "cpu")
    assert len(engine.fingerprint) == 64


def test_all_rows_are_checked_against_a_runner_that_mixes_them_up(engine: Engine) -> None:
    class Mixing(Runner):
        """A forward whose rows see how many others there are."""

        def forward(self, batch: list[SequenceRows]) -> np.ndarray:
            num_rows = sum(len(rows.token_ids) for rows in batch)
            return super().forward(batch) * np.float32(1 + 1e-6 * num_rows)

    fields = {name: getattr(engine.runner, name) for name in Runner.__slots__}
    mixing = Mixing(**fields)
    with pytest.raises(InvarianceError, match="rows from position"):
        check_steps(mixing)
    with pytest.raises(InvarianceError, match="decode and verify rows differ"):
        decode_once(mixing, engine.block_pool)
    assert engine.block_pool.num_used == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"block_size": 24}, "block_size is 24"),
        ({"block_size": 512}, "block_size is 512"),
        ({"max_step_rows": 0}, "max_step_rows is 0"),
        ({"max_sequence_length": 0}, "max_sequence_length is 0"),
        ({"max_sequence_length": 1025}, "must be at most 1024, the model's positions"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes is 0"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes is 1000"),
        (
            {"kv_cache_bytes": 100_000, "max_sequence_length": 900},
            "max_sequence_length is 900: must be at most 160, the KV cache's tokens",
        ),
    ],
)
def test_an_impossible_setting_is_refused_with_value_and_bound(
    checkpoint: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        boot_engine(checkpoint, **settings)


def test_a_small_cache_bounds_the_sequence_length(checkpoint: Path) -> None:
    engine = boot_engine(checkpoint, kv_cache_bytes=100_000)
    assert engine.limits.max_sequence_length == 160
    tiny = boot_engine(checkpoint, kv_cache_bytes=2 * 32 * 2 * 32 * 2 * 4, max_sequence_length=3)
    assert len(tiny.first_decode.token_ids) >= 1


def test_rows_beyond_the_limits_are_refused(engine: Engine) -> None:
    table = engine.block_pool.allocate(33)
    cases: list[tuple[dict[str, object], str]] = [
        ({"token_ids": []}, "0 rows"),
        ({"token_ids": [1] * 65}, "65 rows: must be at most 64"),
        ({"start": -1}, "position -1"),
        ({"start": 1024}, "1025: must be at most 1024"),
        ({"num_logits": 2}, "num_logits is 2"),
        ({"token_ids": [272]}, "outside 0 to 271"),
        ({"token_ids": [-1]}, "outside 0 to 271"),
        ({"block_table": table[:1], "start": 32}, "must cover 33 tokens"),
        ({"block_table": [0]}, "a block is outside 1"),
        ({"block_table": [engine.limits.num_blocks]}, "a block is outside 1"),
    ]
    for changes, words in cases:
        fields = {"token_ids": [1], "start": 0, "block_table": table, "num_logits": 1} | changes
        with pytest.raises(StepError, match=words):
            engine.runner.forward([SequenceRows(**fields)])
    with pytest.raises(StepError, match="at least one sequence"):
        engine.runner.forward([])
    engine.block_pool.release(table)


def test_only_the_wanted_logits_come_back_in_float32(engine: Engine) -> None:
    table = engine.block_pool.allocate(1)
    token_ids = random_tokens(9)
    whole = run_rows(engine.runner, table, token_ids, 0, 9)
    some = run_rows(engine.runner, table, token_ids, 0, 3)
    none = run_rows(engine.runner, table, token_ids, 0, 0)
    engine.block_pool.release(table)
    assert whole.dtype == some.dtype == none.dtype == np.float32
    assert whole.shape == (9, 272)
    assert none.shape == (0, 272)
    assert np.array_equal(some, whole[-3:])


def test_automatic_dtype_follows_the_processor(checkpoint: Path) -> None:
    engine = boot_engine(checkpoint, dtype="auto")
    capabilities = torch.cpu.get_capabilities()
    is_fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    assert engine.dtype == ("bfloat16" if is_fast else "float32")


def test_a_gpu_that_cannot_be_used_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"triton is not installed .*outrider\[cuda\]"):
        find_device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is 'cuda': torch finds no NVIDIA GPU"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="device is 'cuda:1': must be below cuda:1"):
        find_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5: must be"):
        find_device("cuda:0")


@pytest.mark.parametrize("missing", ["triton", "flashinfer"])
def test_a_missing_library_is_named_with_its_remedy_where_an_engine_boots_on_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    monkeypatch.setitem(sys.modules, missing, None)
    config = EngineConfig(model_path=checkpoint, device="cuda")
    with pytest.raises(ConfigError, match=rf"{missing} is not installed .*outrider\[cuda\]"):
        devices.boot_engine(config, RecordingReport())


def test_bfloat16_on_a_processor_without_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx512bw\nand a long trace")

    monkeypatch.setattr("outrider.engine.config.pack", fails)
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16': .* use float32 or auto \(bf16"):
        resolve_dtype("bfloat16")

"""A target on a GPU that cannot start says so; one that is told to stop while it starts does."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.engine.config import EngineConfig
from outrider.engine.devices import boot_engine
from outrider.engine.gpu.memory import OutOfMemory
from tests.engine.engine_support import RecordingReport, default_model_path

pytestmark = pytest.mark.gpu


@contextmanager
def target(*flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "target_service", "--device", "cuda", "--port", "0", *flags],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_fault_while_graphs_are_captured_ends_the_service_by_its_name(
    device: torch.device,
) -> None:
    with target(OUTRIDER_INJECT_FAULT="target:graphs:raise") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert "target: FAILED in stage graphs" in errors


def test_sigterm_while_graphs_are_captured_ends_the_service_within_two_seconds(
    device: torch.device,
) -> None:
    with target("--max-running-sequences", "256", "--max-draft-length", "8",
                "--max-step-rows", "2304") as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "target: graphs" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        rest = process.stderr.read()
        process.wait(timeout=20)
        seconds = time.monotonic() - told
    assert process.returncode == 0, rest
    assert "target: first_decode" not in rest
    assert seconds < 2.0


def test_a_cache_larger_than_the_gpu_is_out_of_memory_in_its_stage(device: torch.device) -> None:
    config = EngineConfig(
        model_path=default_model_path(), device="cuda", kv_cache_bytes=2**42, max_sequences=1
    )
    with pytest.raises(OutOfMemory, match="stage kv_cache ran out of memory on cuda:0: "):
        boot_engine(config, RecordingReport())
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("left_mib", "flags", "words"),
    [
        (800, ("--kv-cache-mib", "64"), "stage (weights|kv_cache) ran out of memory"),
        (1500, ("--kv-cache-mib", "64"), "stage (attention|graphs) ran out of memory"),
        (5000, (), "stage kv_cache found no room"),
    ],
)
def test_a_gpu_that_others_have_filled_is_named_with_the_stage_that_found_it_full(
    device: torch.device, left_mib: int, flags: tuple[str, ...], words: str
) -> None:
    """What is left holds a process's own context, some hundred MiB, and then not much."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    others = torch.empty(free - left_mib * 2**20, dtype=torch.uint8, device=device)
    try:
        with target(*flags) as process:
            _, errors = process.communicate(timeout=120)
    finally:
        del others
        torch.cuda.empty_cache()
    assert process.returncode not in (0, None)
    assert re.search(f"FAILED in stage .*{words}", errors), errors[-2000:]


def test_an_automatic_cache_leaves_its_reserve(device: torch.device) -> None:
    """With more sequences than a step has rows for whole drafts of."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    report = RecordingReport()
    engine = boot_engine(
        EngineConfig(
            model_path=default_model_path(), device="cuda", max_sequences=256, max_draft_length=3
        ),
        report,
    )
    free, _ = torch.cuda.mem_get_info(device)
    assert engine.limits.num_blocks > 256 * 128
    assert free > total / 10
    del engine
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("cache_bytes", "max_sequences", "max_draft_length", "block_size"),
    [(2**30, 1, 0, 32), (2**30, 4, 32, 16), (8 * 2**20, 64, 5, 32)],
    ids=["one sequence without drafts", "drafts longer than a block", "a cache of few blocks"],
)
def test_unusual_bounds_boot(
    device: torch.device,
    cache_bytes: int,
    max_sequences: int,
    max_draft_length: int,
    block_size: int,
) -> None:
    engine = boot_engine(
        EngineConfig(
            model_path=default_model_path(),
            device="cuda",
            kv_cache_bytes=cache_bytes,
            max_sequences=max_sequences,
            max_draft_length=max_draft_length,
            block_size=block_size,
        ),
        RecordingReport(),
    )
    assert "bitwise equal" in engine.first_decode.compared
    assert engine.block_pool.num_free == engine.limits.num_blocks - 1

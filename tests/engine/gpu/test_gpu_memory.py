"""How large a cache a GPU gets: arithmetic, without a GPU."""

from dataclasses import replace

import pytest
import torch

from outrider.engine.gpu.kv_cache import block_bytes
from outrider.engine.gpu.memory import CacheRoom, cache_bytes, find_room, step_bytes
from outrider.engine.gpu.memory import OutOfMemory as NamedOutOfMemory
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.model_config import ModelConfig

GIB = 2**30
LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
BOUNDS = StepBounds(
    block_size=32, max_sequence_length=8192, max_step_rows=512, max_sequences=64, max_draft_length=5
)
SIXTEEN_BIT = torch.bfloat16


def bytes_of(bounds: StepBounds, config: ModelConfig = LLAMA_8B) -> int:
    return step_bytes(config, bounds, num_feature_layers=3, dtype=SIXTEEN_BIT)


def test_the_cache_gets_what_steps_and_the_reserve_leave() -> None:
    room = CacheRoom(free=100 * GIB, for_steps=5 * GIB, reserve=14 * GIB)
    assert room.cache == 81 * GIB
    one_block = block_bytes(LLAMA_8B, block_size=32, dtype=SIXTEEN_BIT)
    assert one_block == 32 * 128 * 2**10  # 128 KiB a token
    # 64 sequences of 8,192 tokens and six rows, and the block of padding, are less than that.
    assert cache_bytes(room, LLAMA_8B, BOUNDS, SIXTEEN_BIT) == (64 * 257 + 1) * one_block
    small = replace(room, free=30 * GIB)
    assert cache_bytes(small, LLAMA_8B, BOUNDS, SIXTEEN_BIT) == 11 * GIB


def test_steps_need_more_with_every_bound_and_at_least_their_logits() -> None:
    plain = bytes_of(BOUNDS)
    assert 64 * 6 * 128_256 * 2 < plain < 8 * GIB
    for larger in (
        replace(BOUNDS, max_sequences=128),
        replace(BOUNDS, max_draft_length=7),
        replace(BOUNDS, max_step_rows=2048),
        replace(BOUNDS, max_sequence_length=131_072),
    ):
        assert bytes_of(larger) > plain
    assert bytes_of(BOUNDS, replace(LLAMA_8B, vocab_size=256_000)) > plain


@pytest.mark.parametrize("free", [6 * GIB, 1 * GIB])
def test_without_room_that_is_said_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * GIB))
    with pytest.raises(
        NamedOutOfMemory, match=rf"found no room on cuda:0 of 24576 MiB: {free // 2**20} MiB free"
    ):
        find_room(
            LLAMA_8B, BOUNDS, num_feature_layers=3, dtype=SIXTEEN_BIT, device=torch.device("cuda:0")
        )


@pytest.mark.parametrize(("total_gib", "reserve_gib"), [(140, 14), (24, 3)])
def test_with_room_a_tenth_of_the_gpu_stays_in_reserve_and_room_for_a_draft_service(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, reserve_gib: int
) -> None:
    free = (total_gib - 10) * GIB
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total_gib * GIB))
    room = find_room(
        LLAMA_8B, BOUNDS, num_feature_layers=3, dtype=SIXTEEN_BIT, device=torch.device("cuda:0")
    )
    assert room.reserve == reserve_gib * GIB
    assert room.cache == free - reserve_gib * GIB - bytes_of(BOUNDS)


def test_an_engine_for_one_sequence_has_room_for_what_the_first_decode_looks_at() -> None:
    assert replace(BOUNDS, max_sequences=1, max_draft_length=0).most_logits == 5
    assert BOUNDS.most_logits == 64 * 6

"""A widened model and head say what the small ones say: probabilities, not only the best token."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from bench.widen import Widener, write_head, write_model, write_tokenizer
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.boot import boot_head
from outrider.engine.step import SequenceRows
from outrider.engine.tensor_source import open_safetensors
from outrider.serving.tokenizer import load_tokenizer
from tests.engine.engine_support import (
    RecordingReport,
    boot_engine,
    default_model_path,
    engine_logits,
    random_tokens,
)
from tests.training.eagle3_toy import CONFIG, write_target
from training.export import export_head
from training.head import Head, head_shape

FACTOR = 2
VOCAB_SIZE = CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small`, `wide`, and heads of theirs, `small_head` and `wide_head`."""
    directory = tmp_path_factory.mktemp("widen")
    target = write_target(directory / "small")
    shape = head_shape(target.config, draft_vocab_size=40, layer_ids=(2, 3, 4))
    head = Head(shape)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            # Norms away from one, products that keep the stream's size.
            parameter.copy_(
                1 + 0.3 * random if parameter.ndim == 1 else random * parameter.shape[1] ** -0.5
            )
            assert torch.isfinite(parameter).all(), name
    ids = np.sort(np.random.default_rng(0).choice(VOCAB_SIZE, 40, replace=False))
    export_head(head, ids, directory / "small_head", metadata={}, max_bytes=2**20)
    widener = Widener(FACTOR, device="cpu", dtype=torch.float32, seed=0)
    write_model(directory / "small", directory / "wide", widener)
    write_head(
        directory / "small_head", directory / "small", directory / "wide_head", widener, "wide"
    )
    return directory


def probabilities(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).double().softmax(-1).numpy()


def test_probabilities_of_the_widened_model_are_the_small_ones(models: Path) -> None:
    tokens = random_tokens(60, VOCAB_SIZE)
    small, wide = (boot_engine(models / name) for name in ("small", "wide"))
    assert wide.model_config.hidden_size == FACTOR * small.model_config.hidden_size
    assert wide.model_config.num_kv_heads == FACTOR * small.model_config.num_kv_heads
    found = probabilities(engine_logits(wide, tokens))
    wanted = probabilities(engine_logits(small, tokens))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)
    assert wanted.max() > 10 / VOCAB_SIZE  # far from flat


def test_drafts_of_the_widened_head_are_the_small_ones(models: Path) -> None:
    outputs = []
    for name, factor in (("small", 1), ("wide", FACTOR)):
        config = EngineConfig(model_path=models / name, dtype="float32", kv_cache_bytes=2**20)
        report = RecordingReport()
        report.enter("config")
        engine = boot_head(config, models / f"{name}_head", report)
        features = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
        table = engine.block_pool.allocate(1)

        def rows(token_ids: list[int], start: int, blocks: list[int] = table) -> SequenceRows:
            return SequenceRows(
                token_ids=token_ids, start=start, block_table=blocks, num_logits=len(token_ids)
            )

        tokens = random_tokens(9, VOCAB_SIZE)
        first = engine.runner.forward([rows(tokens, 0)], features.repeat(1, factor))
        # What it drafts with next is its own output, replicated like a feature.
        second = engine.runner.forward([rows([3], 9)], first.features[-1:])
        outputs.append((first, second))
    for small, wide in zip(*outputs, strict=True):
        np.testing.assert_allclose(
            probabilities(wide.logits), probabilities(small.logits), rtol=1e-3, atol=1e-6
        )
        torch.testing.assert_close(
            wide.features, small.features.repeat(1, FACTOR), rtol=1e-3, atol=1e-4
        )


def test_no_two_rows_of_a_product_are_equal(models: Path) -> None:
    source = open_safetensors(models / "wide")
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        weight = source.load(f"model.layers.3.{name}.weight")
        assert len(torch.unique(weight, dim=0)) == len(weight), name
        assert len(torch.unique(weight, dim=1)) != 1


def test_the_tokenizer_is_the_small_models_own(tmp_path: Path) -> None:
    model = default_model_path()
    write_tokenizer(model, tmp_path)
    small = load_tokenizer(model)
    settings = {"vocab_size": small.vocab_size, "eos_token_id": list(small.eos_token_ids)}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "llama"}))
    wide = load_tokenizer(tmp_path)
    assert wide.sha256 == small.sha256
    assert wide.chat_template == small.chat_template
    assert wide.eos_token_ids == small.eos_token_ids
    text = "Grüße, <|im_start|>user\n  can't 1234 stop!\n"
    ids = AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False)
    assert ids == small.encode(text, parse_special=True, add_bos=False)

"""What was exported gives, in the engine's head, what it gave in training."""

from pathlib import Path

import numpy as np
import torch
from eagle3_support import SlowDrafter
from eagle3_toy import write_target

from outrider.engine.attention.cpu_probe import build_cpu_attention
from outrider.engine.boot import read_model
from outrider.engine.eagle3.head import Eagle3Head
from outrider.engine.eagle3.head_config import read_head_config
from outrider.engine.eagle3.head_runner import HeadRunner
from outrider.engine.eagle3.head_weights import TargetCheckpoint, load_head
from outrider.engine.feature_projection import load_projection
from outrider.engine.kv_cache import allocate_kv_cache
from outrider.engine.rope import rotation_table
from outrider.engine.step import SequenceRows
from training.export import export_head
from training.head import Head, head_shape


@torch.no_grad()
def test_engine_drafts_what_training_computed(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    shape = head_shape(target.config, draft_vocab_size=16, layer_ids=(1, 3, 5))
    generator = torch.Generator().manual_seed(0)
    head = Head(shape)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        value = 1 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5
        parameter.copy_(value.bfloat16().float())
    draft_ids = np.arange(1, 64, 4, dtype=np.int64)
    export_head(head, draft_ids, tmp_path / "head", metadata={}, max_bytes=1 << 20)

    config, source = read_model(tmp_path / "target")
    head_config = read_head_config(tmp_path / "head", config)
    assert head_config.feature_layers.inputs == (1, 3, 5)
    weights = load_head(
        head_config,
        tmp_path / "head",
        TargetCheckpoint(config=config, source=source),
        torch.float32,
    )
    assert weights.target_token_ids is not None
    assert weights.target_token_ids.tolist() == draft_ids.tolist()
    layer = head_config.layer
    cache = allocate_kv_cache(layer, kv_cache_bytes=1 << 16, block_size=32, dtype=torch.float32)
    runner = HeadRunner(
        head=Eagle3Head(
            config=head_config,
            weights=weights,
            rotations=rotation_table(layer.head_dim, layer.rope_theta, layer.rope_scaling, 32),
        ),
        attention=build_cpu_attention(layer, cache),
        block_size=32,
        max_sequence_length=32,
        max_step_rows=32,
    )
    tokens = torch.randint(3, 64, (1, 10), generator=generator)
    captured, _ = target(tokens, shape.layer_ids)
    features = captured[0] @ head.fc.weight.T
    projection = load_projection(weights.projection, hidden_size=32, dtype=torch.float32)
    projected = projection.project(captured[0]).float()
    torch.testing.assert_close(projected, features, rtol=0.01, atol=0.01)

    drafter = SlowDrafter(head, target.embedding)
    expected = [
        drafter.row(int(tokens[0, position + 1]), features[position], position)
        for position in range(9)
    ]
    rows = SequenceRows(token_ids=tokens[0, 1:].tolist(), start=0, block_table=[0], num_logits=9)
    output = runner.forward([rows], features[:9])
    torch.testing.assert_close(output.features, torch.stack(expected), rtol=1e-4, atol=1e-4)
    found = torch.from_numpy(output.logits)
    torch.testing.assert_close(
        found, torch.stack([drafter.logits(row) for row in expected]), rtol=1e-4, atol=1e-4
    )
    own = drafter.row(5, expected[-1], 9)
    rows = SequenceRows(token_ids=[5], start=9, block_table=[0], num_logits=1)
    output = runner.forward([rows], output.features[-1:])
    torch.testing.assert_close(output.features[0], own, rtol=1e-4, atol=1e-4)

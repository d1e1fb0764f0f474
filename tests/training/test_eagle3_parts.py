"""Layers in config.json, the start from the target, the schedule, the choice of kernels."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from eagle3_support import SHAPE
from eagle3_toy import write_target

from outrider.engine.rope import FrequencyFactors, LinearScaling, Llama3Scaling
from training.export import file_bytes, head_config
from training.head import Head, HeadShape, default_layer_ids, head_shape, initialise
from training.kernels import choose_kernels
from training.plot import PlotError, plot_run
from training.schedule import Schedule


def test_other_layers_than_the_default_are_stated_in_both_meanings() -> None:
    assert "eagle_aux_hidden_state_layer_ids" not in head_config(SHAPE)
    config = head_config(replace(SHAPE, layer_ids=(1, 3, 5)))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    nested = config["eagle_config"]
    assert isinstance(nested, dict)
    assert nested["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]


def test_rotary_scaling_is_written_as_published_configurations_have_it() -> None:
    linear = head_config(replace(SHAPE, rope_scaling=LinearScaling(factor=4.0)))
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert head_config(replace(SHAPE, rope_scaling=scaling))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_default_head_of_the_default_model_leaves_room_for_11776_ids() -> None:
    shape = HeadShape(
        vocab_size=49152,
        draft_vocab_size=1,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        rope_scaling=None,
        max_position_embeddings=8192,
        layer_ids=default_layer_ids(30),
        target_layers=30,
    )
    assert shape.layer_ids == (2, 15, 27)
    fixed, per_id = file_bytes(shape)
    assert fixed + 11776 * per_id < 24_000_000 < fixed + 12288 * per_id


def test_shallow_targets_need_named_layers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 6 layers: with fewer than 7"):
        default_layer_ids(6)
    config = write_target(tmp_path / "target").config
    with pytest.raises(ValueError, match=r"\(2, 2\) must ascend"):
        head_shape(config, draft_vocab_size=8, layer_ids=(2, 2))
    with pytest.raises(ValueError, match="must be 0 to 6"):
        head_shape(config, draft_vocab_size=8, layer_ids=(2, 7))
    free = replace(config, rope_scaling=FrequencyFactors(factors=(1.0,) * 4))
    assert head_shape(free, draft_vocab_size=8, layer_ids=(2, 3)).rope_scaling is None


def test_a_new_head_is_the_targets_last_layer_over_its_highest_captured_stream(
    tmp_path: Path,
) -> None:
    target = write_target(tmp_path / "target")
    shape = head_shape(target.config, draft_vocab_size=64, layer_ids=(2, 3, 6))
    head = Head(shape)
    initialise(
        head,
        last_layer=target.layer_state(6),
        final_norm=target.final_norm,
        draft_rows=target.head,
        generator=torch.Generator().manual_seed(0),
    )
    width = shape.hidden_size
    with torch.no_grad():
        # Without the embedding's half the head is the target from its last layer's input on.
        head.midlayer.self_attn.v_proj.weight[:, :width] = 0
    tokens = torch.arange(3, 23)[None]
    features, final_hidden = target(tokens, shape.layer_ids)
    from training.chain_attention import plain_attention
    from training.head import rotation_of

    cast = head.cast(torch.float32)
    feature = cast.project(features)
    part = cast.embedding_part(target.embedding[tokens])
    rotation = rotation_of(shape, 20, device=torch.device("cpu"))
    query, key, value = cast.attention_inputs(feature, part, rotation)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    rows = cast.finish(feature, plain_attention(query, key, value, [], []))
    torch.testing.assert_close(cast.normed_output(rows), final_hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_rate_warms_up_and_ends_at_its_final_share(kind: str) -> None:
    schedule = Schedule(peak=1.0, warmup=0.1, final_ratio=0.01, kind=kind)  # type: ignore[arg-type]
    rates = [schedule.rate(step / 100) for step in range(101)]
    assert rates[5] == pytest.approx(0.5)
    assert max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.01)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert schedule.rate(2.0) == pytest.approx(0.01)


def test_kernels_that_work_are_chosen_without_a_note() -> None:
    notes: list[str] = []
    device = torch.device("cpu")
    chosen = choose_kernels(
        device, torch.float32, draft_vocab_size=64, choice="auto", note=notes.append
    )
    assert chosen.attention.__name__ == "flash_attention"  # type: ignore[attr-defined]
    assert notes == []


def test_a_picture_without_records_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(PlotError, match="has no records of training"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "a.png")

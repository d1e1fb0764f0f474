"""EAGLE-3 heads as they are published: both layouts load; what does not fit is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.eagle3.head_config import Eagle3Config, LayerIdSource, read_head_config
from outrider.engine.eagle3.head_weights import HeadWeights, TargetCheckpoint, load_head
from outrider.engine.errors import CheckpointError, ConfigError
from outrider.engine.model_config import ModelConfig
from outrider.engine.rope import Llama3Scaling
from tests.engine.head_checkpoint import (
    DRAFT_VOCAB_SIZE,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    HeadFiles,
    MemorySource,
    flat_head,
    speculators_head,
    target_config,
    target_tensors,
)

IDS = "eagle_aux_hidden_state_layer_ids"


def config_of(files: HeadFiles, directory: Path, target: ModelConfig | None = None) -> Eagle3Config:
    return read_head_config(files.write(directory), target or target_config())


def load(
    files: HeadFiles,
    directory: Path,
    target_names: tuple[str, ...] = ("model.embed_tokens.weight",),
) -> HeadWeights:
    target = target_config()
    tensors = {name: target_tensors()[name] for name in target_names}
    return load_head(
        config_of(files, directory, target),
        directory,
        TargetCheckpoint(config=target, source=MemorySource(tensors)),
        torch.float32,
    )


def test_the_default_layers_are_inputs_of_2_the_middle_and_the_third_last(tmp_path: Path) -> None:
    layers = config_of(flat_head(), tmp_path).feature_layers
    assert (layers.source, layers.inputs) == (LayerIdSource.DEFAULT, (2, 4, 5))
    assert layers.words() == "input of layers 2, 4, 5 (default)"
    layers = config_of(flat_head(), tmp_path, target_config(num_layers=30)).feature_layers
    assert layers.words() == "input of layers 2, 15, 27 (default)"


def test_ids_at_the_top_level_are_inputs_and_nested_ones_outputs(tmp_path: Path) -> None:
    layers = config_of(flat_head(**{IDS: [1, 3, 7]}), tmp_path).feature_layers
    assert (layers.source, layers.inputs, layers.stated) == (
        LayerIdSource.INPUTS,
        (1, 3, 7),
        (1, 3, 7),
    )
    assert layers.words() == f"input of layers 1, 3, 7 ({IDS})"
    nested = {"use_aux_hidden_state": True, IDS: [1, 3, 6]}
    layers = config_of(flat_head(eagle_config=nested), tmp_path).feature_layers
    assert (layers.source, layers.inputs, layers.stated) == (
        LayerIdSource.OUTPUTS,
        (2, 4, 7),
        (1, 3, 6),
    )
    assert layers.words() == (
        f"input of layers 2, 4, 7 (output of layers 1, 3, 6 by eagle_config.{IDS})"
    )
    both = flat_head(eagle_config=nested, num_aux_hidden_states=3, **{IDS: [2, 4, 7]})
    assert config_of(both, tmp_path).feature_layers.inputs == (2, 4, 7)


def test_speculators_normalise_the_residual_unless_they_say_not(tmp_path: Path) -> None:
    assert config_of(speculators_head(), tmp_path).norm_before_residual
    assert not config_of(
        speculators_head(norm_before_residual=False), tmp_path
    ).norm_before_residual
    assert not config_of(flat_head(), tmp_path).norm_before_residual
    assert config_of(flat_head(norm_before_residual=True), tmp_path).norm_before_residual


def test_what_changes_the_result_is_read(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = config_of(
        flat_head(
            draft_vocab_size=None,
            rope_scaling=scaling,
            norm_output=True,
            fc_norm=True,
            bias=True,
            attention_bias=True,
            initializer_range=0.02,
            pretraining_tp=1,
            sliding_window=None,
            max_window_layers=64,
            use_sliding_window=False,
        ),
        tmp_path,
    )
    assert isinstance(config.layer.rope_scaling, Llama3Scaling)
    assert config.layer.rope_theta == 500.0
    assert config.draft_vocab_size == VOCAB_SIZE and config.has_whole_vocabulary
    assert config.norm_output and config.norm_parts_before_fc and config.fc_bias
    assert config.layer.attention_bias and config.layer.attention_output_bias
    nested = flat_head(eagle_config={"norm_before_fc": True})
    assert config_of(nested, tmp_path).norm_before_fc


REFUSED_SETTINGS = {
    "architectures": (
        {"architectures": ["LlamaForCausalLM"]},
        "architectures is ['LlamaForCausalLM']: must name one of LlamaForCausalLMEagle3",
    ),
    "other speculator": (
        {"speculators_model_type": "dflash"},
        "speculators_model_type is 'dflash': must be 'eagle3'",
    ),
    "no layer": ({"speculators_model_type": "eagle3"}, "transformer_layer_config is missing"),
    "model type": ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2: must be 1"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "MLP bias": ({"mlp_bias": True}, "mlp_bias is true"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "rope": ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn' is not supported"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "window": ({"use_sliding_window": True}, "use_sliding_window is true"),
    "layer types": ({"layer_types": ["sliding_attention"]}, "layer_types is ['sliding_att"),
    "unknown arithmetic": ({"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
    "unknown nested": ({"eagle_config": {"topk": 3}}, "eagle_config.topk is 3"),
    "parallel drafts": ({"parallel_drafting": True}, "parallel_drafting is True"),
    "last layer only": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "eagle_config.use_aux_hidden_state is false",
    ),
    "not a flag": ({"norm_output": "yes"}, "norm_output is 'yes': must be true or false"),
    "two norms": ({"norm_before_fc": True, "fc_norm": True}, "must be one"),
    "norms disagree": (
        {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
        "eagle_config.norm_before_fc is True: must agree",
    ),
    "vocabulary": ({"vocab_size": 97}, "vocab_size is 97: must be the target's, 96"),
    "draft vocabulary": (
        {"draft_vocab_size": 97},
        "draft_vocab_size is 97: must be at most vocab_size, which is 96",
    ),
    "no draft vocabulary": ({"draft_vocab_size": 0}, "draft_vocab_size is 0: must be at least 1"),
    "target's width": (
        {"target_hidden_size": 64},
        "target_hidden_size is 64: must be the target's, 32",
    ),
    "layer ids disagree": (
        {IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 5]}},
        "must name the same hidden states",
    ),
    "layer ids twice": ({IDS: [2, 2, 5]}, "must be ascending, without duplicates"),
    "layer ids unsorted": ({IDS: [4, 2, 5]}, "input of layers 4, 2, 5"),
    "layer ids out of range": ({IDS: [2, 4, 8]}, "inputs of layers 0 to 7 of the target"),
    "outputs out of range": ({"eagle_config": {IDS: [1, 3, 7]}}, "inputs of layers 0 to 7"),
    "layer ids no numbers": ({IDS: [True, 2]}, f"{IDS} is [True, 2]: must be a list of layers"),
    "number of layers": ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4: must be 3"),
}


@pytest.mark.parametrize("case", REFUSED_SETTINGS)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(case: str, tmp_path: Path) -> None:
    settings, words = REFUSED_SETTINGS[case]
    with pytest.raises(ConfigError, match=re.escape(words)):
        config_of(flat_head(**settings), tmp_path)


def test_a_window_inside_the_speculators_layer_is_refused(tmp_path: Path) -> None:
    files = speculators_head()
    files.layer_settings["layer_types"] = ["sliding_attention"]
    with pytest.raises(ConfigError, match="layer_types"):
        config_of(files, tmp_path)


def test_default_layers_that_coincide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"input of layers 2, 3, 3 \(default\): must be"):
        config_of(flat_head(), tmp_path, target_config(num_layers=6))


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_both_naming_schemes_give_the_same_weights(layer: str, prefix: str, tmp_path: Path) -> None:
    files = flat_head()
    files.layer, files.prefix = layer, prefix
    files.tensors[f"{files.stored_name('layers.0.')}self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    found, wanted = load(files, tmp_path / "a"), load(flat_head(), tmp_path / "b")
    assert torch.equal(found.qkv.weight.to_dense(), wanted.qkv.weight.to_dense())
    assert torch.equal(found.feature_norm.weight, wanted.feature_norm.weight)
    assert found.projection == wanted.projection
    assert found.fingerprint == wanted.fingerprint


def test_older_names_of_the_part_norms_are_known(tmp_path: Path) -> None:
    files = flat_head(use_aux_norm=True)
    wanted = load(files, tmp_path / "a").projection
    for index, name in enumerate(("low", "mid", "high")):
        files.tensors[f"aux_norm_{name}.weight"] = files.tensors.pop(f"fc_norm.{index}.weight")
    assert load(files, tmp_path / "b").projection == wanted


def test_sharded_files_are_one_head(tmp_path: Path) -> None:
    whole = load(flat_head(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[:7], names[7:])):
        file_name = f"model-{shard}.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = target_config()
    source = MemorySource(
        {"model.embed_tokens.weight": target_tensors()["model.embed_tokens.weight"]}
    )
    found = load_head(
        read_head_config(tmp_path, target),
        tmp_path,
        TargetCheckpoint(config=target, source=source),
        torch.float32,
    )
    assert found.fingerprint == whole.fingerprint


def test_without_a_draft_vocabulary_the_targets_head_is_used(tmp_path: Path) -> None:
    files = flat_head(draft_vocab_size=None)
    tied = load(files, tmp_path)
    assert tied.target_token_ids is None
    embedding = target_tensors()["model.embed_tokens.weight"]
    assert torch.equal(tied.head.weight.to_dense(), embedding)
    target = target_config(tie_word_embeddings=False)
    own = load_head(
        config_of(files, tmp_path, target),
        tmp_path,
        TargetCheckpoint(config=target, source=MemorySource(target_tensors())),
        torch.float32,
    )
    assert torch.equal(own.head.weight.to_dense(), target_tensors()["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("d2t", torch.zeros(VOCAB_SIZE, dtype=torch.int64)),
        ("embed_tokens.weight", torch.ones(VOCAB_SIZE, HIDDEN_SIZE)),
    ],
)
def test_the_targets_head_fits_neither_other_ids_nor_another_embedding(
    name: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    files = flat_head(draft_vocab_size=None)
    files.tensors[name] = tensor
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing"):
        load(files, tmp_path)


def test_draft_ids_are_put_in_the_order_of_the_targets(tmp_path: Path) -> None:
    files = flat_head()
    wanted = load(files, tmp_path / "a")
    order = torch.randperm(DRAFT_VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    target_ids = torch.from_numpy(wanted.target_token_ids)[order]
    files.tensors["d2t"] = target_ids - torch.arange(DRAFT_VOCAB_SIZE)
    files.tensors["lm_head.weight"] = files.tensors["lm_head.weight"][order]
    found = load(files, tmp_path / "b")
    assert np.array_equal(found.target_token_ids, wanted.target_token_ids)
    assert torch.equal(found.head.weight.to_dense(), wanted.head.weight.to_dense())


def test_rows_travel_in_float16_where_the_head_is_stored_in_it(tmp_path: Path) -> None:
    files = flat_head()
    assert load(files, tmp_path / "a").row_dtype is torch.bfloat16
    files.tensors["fc.weight"] = files.tensors["fc.weight"].half()
    assert load(files, tmp_path / "b").row_dtype is torch.float16


Change = Callable[[HeadFiles], object]


def _rename(old: str, new: str) -> Change:
    return lambda files: files.tensors.update({new: files.tensors.pop(old)})


def _set(name: str, index: int, value: float) -> Change:
    return lambda files: files.tensors[name].view(-1).__setitem__(index, value)


REFUSED_TENSORS: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda files: files.tensors.pop("layers.0.hidden_norm.weight"),
        "tensor midlayer.hidden_norm.weight is missing (1 missing in all)",
    ),
    "wrong prefix": (
        lambda files: setattr(files, "prefix", "draft."),
        "tensor draft.fc.weight is not part of an EAGLE-3 head",
    ),
    "mixed prefix": (
        _rename("fc.weight", "model.fc.weight"),
        "tensor model.fc.weight begins with 'model.' and tensor midlayer.",
    ),
    "unexpected": (
        lambda files: files.tensors.update(mask_hidden=torch.ones(HIDDEN_SIZE)),
        "tensor mask_hidden is not part of an EAGLE-3 head of this configuration (1 unexp",
    ),
    "unexpected bias": (
        lambda files: files.tensors.update({"fc.bias": torch.ones(HIDDEN_SIZE)}),
        "tensor fc.bias is not part of",
    ),
    "no output layer": (
        lambda files: files.tensors.pop("lm_head.weight"),
        "tensor lm_head.weight is missing",
    ),
    "shape": (
        lambda files: files.tensors.update({"fc.weight": torch.ones(HIDDEN_SIZE, 2 * HIDDEN_SIZE)}),
        "tensor fc.weight has shape [32, 64]: must be [32, 96]",
    ),
    "NaN": (
        _set("layers.0.mlp.up_proj.weight", 3, float("nan")),
        "tensor midlayer.mlp.up_proj.weight has values that are not finite",
    ),
    "infinite projection": (
        _set("fc.weight", 3, float("inf")),
        "tensor fc.weight has values that are not finite",
    ),
    "zero": (
        lambda files: files.tensors["layers.0.self_attn.o_proj.weight"].zero_(),
        "tensor midlayer.self_attn.o_proj.weight is all zero",
    ),
    "zero projection": (
        lambda files: files.tensors["fc.weight"].zero_(),
        "tensor fc.weight is all zero",
    ),
    "no map": (lambda files: files.tensors.pop("d2t"), "tensor d2t is missing"),
    "map's shape": (
        lambda files: files.tensors.update(d2t=torch.zeros(39, dtype=torch.int64)),
        "tensor d2t has shape [39]: must be [40]",
    ),
    "map's dtype": (
        lambda files: files.tensors.update(d2t=torch.zeros(DRAFT_VOCAB_SIZE)),
        "d2t: dtype is torch.float32: must be whole numbers",
    ),
    "map too high": (
        _set("d2t", 39, 57),
        "tensor d2t maps draft id 39 to 96: must be from 0 to 95",
    ),
    "map negative": (_set("d2t", 0, -1), "tensor d2t maps draft id 0 to -1: must be from 0 to 95"),
    "map not one each": (
        lambda files: files.tensors["d2t"].__setitem__(1, files.tensors["d2t"][0] - 1),
        "tensor d2t maps 2 draft ids to",
    ),
    "mask disagrees": (
        lambda files: files.tensors["t2d"].logical_not_(),
        "tensor t2d says False of target id 0, and d2t True (96 ids differ)",
    ),
    "mask's shape": (
        lambda files: files.tensors.update(t2d=torch.ones(95, dtype=torch.bool)),
        "tensor t2d has shape [95]: must be [96]",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, words = REFUSED_TENSORS[case]
    files = flat_head()
    change(files)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(files, tmp_path)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    flat_head().write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    target = target_config()
    with pytest.raises(CheckpointError, match=r"tensors layers\.0\.hidden_norm.* and midlayer\."):
        load_head(
            read_head_config(tmp_path, target),
            tmp_path,
            TargetCheckpoint(config=target, source=MemorySource(target_tensors())),
            torch.float32,
        )


def test_a_target_without_its_embedding_is_refused_by_name(tmp_path: Path) -> None:
    words = r"tensor model\.embed_tokens\.weight is missing in the target's checkpoint"
    with pytest.raises(CheckpointError, match=words):
        load(flat_head(), tmp_path, target_names=())


def test_a_head_narrower_than_its_target_brings_its_own_embedding(tmp_path: Path) -> None:
    files = flat_head(target_hidden_size=64)
    files.tensors["fc.weight"] = torch.randn(HIDDEN_SIZE, 3 * 64)
    target = TargetCheckpoint(config=target_config(hidden_size=64), source=MemorySource({}))
    config = config_of(files, tmp_path, target.config)
    with pytest.raises(CheckpointError, match=r"tensor embed_tokens\.weight is missing"):
        load_head(config, tmp_path, target, torch.float32)
    files.tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    files.write(tmp_path)
    weights = load_head(config, tmp_path, target, torch.float32)
    assert torch.equal(weights.embedding.weight, files.tensors["embed_tokens.weight"])


def test_the_fingerprint_sees_every_part_of_a_head(tmp_path: Path) -> None:
    prints = [load(flat_head(), tmp_path / "a").fingerprint]
    for number, name in enumerate(("fc.weight", "lm_head.weight", "layers.0.hidden_norm.weight")):
        files = flat_head()
        files.tensors[name] = files.tensors[name] * 1.5
        prints.append(load(files, tmp_path / str(number)).fingerprint)
    prints.append(load(flat_head(norm_output=True), tmp_path / "b").fingerprint)
    assert len(set(prints)) == len(prints)

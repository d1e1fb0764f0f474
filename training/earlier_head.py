"""Reads an exported head so that training goes on from it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.eagle3.head_config import Eagle3Config, read_head_config
from outrider.engine.eagle3.head_source import LAYER, MIDDLE_LAYER, open_head
from outrider.engine.eagle3.head_weights import target_token_ids
from outrider.engine.errors import CheckpointError, ConfigError
from outrider.engine.fingerprint import Fingerprint
from outrider.engine.model_config import ModelConfig
from outrider.engine.weights import load_checked
from training.head import Head, head_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierHead:
    """What a head brings along: all but the target's sizes."""

    layer_ids: tuple[int, ...]
    draft_ids: npt.NDArray[np.int64]  # [draft_vocab] target ids, ascending
    parameters: dict[str, torch.Tensor]  # float32, by the names of `Head`


def read_earlier_head(directory: Path, target: ModelConfig) -> EarlierHead:
    """Raises ConfigError for a head of another form or target, CheckpointError for its tensors."""
    config = read_head_config(directory, target)
    _require_plain(directory, config)
    layer_ids = config.feature_layers.inputs
    source = open_head(directory)
    ids = target_token_ids(config, source, Fingerprint(config))
    if ids is None:
        ids = np.arange(config.draft_vocab_size)
    shape = head_shape(target, draft_vocab_size=config.draft_vocab_size, layer_ids=layer_ids)
    parameters = {}
    for name, parameter in Head(shape).named_parameters():
        stored_name = source.stored_name(name.replace(MIDDLE_LAYER, LAYER))
        if stored_name not in source.files.names():
            raise CheckpointError(f"{directory}: tensor {stored_name} is missing")
        parameters[name] = load_checked(
            source.files, stored_name, tuple(parameter.shape), torch.float32
        )[1]
    order = ids.argsort()
    parameters["lm_head.weight"] = parameters["lm_head.weight"][torch.from_numpy(order)]
    return EarlierHead(layer_ids=layer_ids, draft_ids=ids[order], parameters=parameters)


def _require_plain(directory: Path, config: Eagle3Config) -> None:
    forms = {
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.norm_parts_before_fc,
        "bias": config.fc_bias,
        "attention_bias": config.layer.attention_bias,
    }
    for name, is_set in forms.items():
        if is_set:
            raise ConfigError(f"{directory}: {name} is true: training knows heads without it only")

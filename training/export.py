"""Writes a head in the public layout: config.json and model.safetensors in bfloat16.

The default layers are stated nowhere, since every engine assumes them. Other layers are stated
twice, in the two meanings in use: `eagle_aux_hidden_state_layer_ids` at the top level names the
layers whose input is captured, the same field inside `eagle_config` the layers whose output is.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from outrider.engine.eagle3.head_config import TARGET_RECORD, RecordedTarget
from outrider.engine.rope import Llama3Scaling, RopeScaling
from training.head import Head, HeadShape

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Bound on the file's header: names, shapes and metadata.
_HEADER_BYTES = 4096


def head_config(shape: HeadShape, target: RecordedTarget | None = None) -> dict[str, object]:
    """The content of config.json; engines other than ours do not read the record of the target."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _scaling_fields(shape.rope_scaling),
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    if target is not None:
        config[TARGET_RECORD] = asdict(target)
    middle = shape.target_layers // 2
    if shape.layer_ids != (2, middle, shape.target_layers - 3):
        config["eagle_aux_hidden_state_layer_ids"] = list(shape.layer_ids)
        config["num_aux_hidden_states"] = len(shape.layer_ids)
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.layer_ids],
        }
    return config


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    factor = getattr(scaling, "factor", None)
    assert factor is not None, "head_shape leaves linear and Llama 3 scaling only"
    return {"rope_type": "linear", "factor": factor}


def file_bytes(shape: HeadShape) -> tuple[int, int]:
    """Bytes of a head's file but for its draft vocabulary (an upper bound), and per draft id."""
    query_size = shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    width = shape.hidden_size
    numbers = (
        len(shape.layer_ids) * width * width
        + 2 * width * (query_size + 2 * kv_size)
        + width * query_size
        + 3 * width * shape.intermediate_size
        + 4 * width
    )
    return 2 * numbers + shape.vocab_size + _HEADER_BYTES, 2 * width + 8


def export_tensors(head: Head, draft_ids: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Every tensor of the file, on CPU: the parameters in bfloat16, `d2t` and `t2d`."""
    tensors = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in head.named_parameters()
    }
    ids = torch.from_numpy(draft_ids)
    tensors["d2t"] = ids - torch.arange(len(ids))
    mask = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    mask[ids] = True
    tensors["t2d"] = mask
    return tensors


def export_head(
    head: Head,
    draft_ids: npt.NDArray[np.int64],
    directory: Path,
    *,
    metadata: Mapping[str, str],
    max_bytes: int,
    target: RecordedTarget | None = None,
) -> int:
    """Write both files, atomically; returns the bytes of the weights.

    Raises ValueError for a weight that is not finite or a file of `max_bytes` or more.
    """
    tensors = export_tensors(head, draft_ids)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"tensor {name} has values that are not finite: nothing was written")
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / (WEIGHTS_FILE + ".partial")
    save_file(tensors, partial, metadata={"format": "pt", **metadata})
    # The library makes its files private; a head is read by services of other users.
    partial.chmod(0o644)
    size = partial.stat().st_size
    if size >= max_bytes:
        partial.unlink()
        raise ValueError(f"the head's file has {size} bytes: must be below {max_bytes}")
    partial.replace(directory / WEIGHTS_FILE)
    text = json.dumps(head_config(head.shape, target), indent=2) + "\n"
    partial = directory / (CONFIG_FILE + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(directory / CONFIG_FILE)
    return size

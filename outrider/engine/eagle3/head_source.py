"""The tensors of a head under one name each, whichever of the published schemes its files use."""

import re
from pathlib import Path

import torch

from outrider.engine.errors import CheckpointError
from outrider.engine.tensor_source import SafetensorsSource, open_safetensors

# The decoder layer's prefix here, and in the files of SafeAILab and SpecForge.
LAYER = "layers.0."
MIDDLE_LAYER = "midlayer."
MODEL = "model."
# Never below `model.` in files where the rest is.
OUTSIDE_MODEL = frozenset({"lm_head.weight", "d2t", "t2d"})
# Older names of the norms over each captured layer.
PART_NORMS = {
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}
# Buffers that follow from the configuration.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class HeadSource:
    """A head's tensors; `layers.0.` stands for either name of its layer."""

    def __init__(self, files: SafetensorsSource, stored_names: dict[str, str]) -> None:
        self.files = files  # by stored name
        self._stored_names = stored_names

    def names(self) -> frozenset[str]:
        return frozenset(self._stored_names)

    def stored_name(self, name: str) -> str:
        """The name in the files; a tensor that is missing gets the one it would have there."""
        if name in self._stored_names:
            return self._stored_names[name]
        stored = list(self._stored_names.values())
        if name.startswith(LAYER) and any(MIDDLE_LAYER in other for other in stored):
            name = MIDDLE_LAYER + name.removeprefix(LAYER)
        if name not in OUTSIDE_MODEL and any(other.startswith(MODEL) for other in stored):
            name = MODEL + name
        return name

    def load_integers(self, name: str) -> torch.Tensor:
        """int64; raises CheckpointError naming the tensor."""
        return self.files.load_integers(self._stored_names[name])


def open_head(directory: Path) -> HeadSource:
    """Finds a head's tensors. Raises CheckpointError for files that are missing or broken, for
    names of which only some begin with `model.`, and for two that mean the same.
    """
    source = open_safetensors(directory)
    found = sorted(name for name in source.names() if not IGNORED.fullmatch(name))
    inside = [name for name in found if name not in OUTSIDE_MODEL]
    below = [name for name in inside if name.startswith(MODEL)]
    if below and len(below) < len(inside):
        other = next(name for name in inside if not name.startswith(MODEL))
        raise CheckpointError(
            f"tensor {below[0]} begins with {MODEL!r} and tensor {other} does not: must be alike"
        )
    stored_names: dict[str, str] = {}
    for name in found:
        own = _own_name(name)
        if own in stored_names:
            raise CheckpointError(f"tensors {stored_names[own]} and {name} are the same")
        stored_names[own] = name
    return HeadSource(source, stored_names)


def _own_name(stored: str) -> str:
    name = stored.removeprefix(MODEL)
    if name.startswith(MIDDLE_LAYER):
        return LAYER + name.removeprefix(MIDDLE_LAYER)
    part, dot, kind = name.rpartition(".")
    return PART_NORMS.get(part, part) + dot + kind

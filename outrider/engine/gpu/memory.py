"""How much of a GPU's memory the KV cache gets, and what running out of it is called."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.engine.errors import EngineError
from outrider.engine.gpu.kv_cache import block_bytes
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.model_config import ModelConfig

MIB = 2**20
# FlashInfer's partial results of long contexts that several thread blocks share, and its plans.
ATTENTION_FLOAT_BYTES = 2**30
ATTENTION_INTEGER_BYTES = 16 * MIB
# What truncation holds for each logit while it sorts and sums them.
TRUNCATION_BYTES = 56
# The driver's own, of one captured graph.
GRAPH_BYTES = 8 * MIB
# Of the whole GPU: left to a draft service on the same GPU, to the driver, and to whoever else.
RESERVE_SHARE = 0.1
# And at least what a draft service takes beside an 8-billion-parameter target: its context, a
# workspace, the target's embedding, a head and its cache.
LEAST_RESERVE_BYTES = 3 * 2**30


class OutOfMemory(EngineError):
    """A stage of boot asked the GPU for more memory than it has."""


@contextmanager
def named_out_of_memory(stage: str, device: torch.device) -> Iterator[None]:
    """Turns torch's error into one that says the stage, what there is, and what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise OutOfMemory(
            f"stage {stage} ran out of memory on {device}: {free // MIB} of {total // MIB} MiB are "
            "free; lower kv-cache-mib, max-running-sequences or max-step-rows, or free the GPU "
            f"({str(error).splitlines()[0]})"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """What there is for a KV cache once everything else has its place, in bytes."""

    free: int  # now, with the weights loaded
    for_steps: int  # workspaces, graphs and the tensors of the largest step
    reserve: int

    @property
    def cache(self) -> int:
        """What is left; not above 0 where there is no room."""
        return self.free - self.for_steps - self.reserve

    def words(self) -> str:
        """For the status, in MiB."""
        return (
            f"{self.free // MIB} MiB free behind the weights, {self.for_steps // MIB} for steps, "
            f"{self.reserve // MIB} in reserve"
        )


def find_room(
    config: ModelConfig,
    bounds: StepBounds,
    *,
    num_feature_layers: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CacheRoom:
    """Asks the device. Raises OutOfMemory where nothing is left for a cache."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = CacheRoom(
        free=free,
        for_steps=step_bytes(config, bounds, num_feature_layers=num_feature_layers, dtype=dtype),
        reserve=max(int(total * RESERVE_SHARE), LEAST_RESERVE_BYTES),
    )
    if room.cache <= 0:
        raise OutOfMemory(
            f"stage kv_cache found no room on {device} of {total // MIB} MiB: {room.words()}; set "
            "kv-cache-mib, lower max-running-sequences or max-step-rows, or free the GPU"
        )
    return room


def step_bytes(
    config: ModelConfig, bounds: StepBounds, *, num_feature_layers: int, dtype: torch.dtype
) -> int:
    """What steps need beside weights and cache, from the shapes of their tensors."""
    of_row = (
        (4 + num_feature_layers) * config.hidden_size
        + 2 * (config.query_size + config.kv_size)
        + 3 * config.intermediate_size
    )
    of_logit = dtype.itemsize + TRUNCATION_BYTES
    return (
        ATTENTION_FLOAT_BYTES
        + ATTENTION_INTEGER_BYTES
        + bounds.most_rows * of_row * dtype.itemsize
        + bounds.most_logits * config.vocab_size * of_logit
        + bounds.max_sequence_length * config.head_dim * torch.float32.itemsize
        + len(bounds.buckets) * GRAPH_BYTES
    )


def cache_bytes(
    room: CacheRoom, config: ModelConfig, bounds: StepBounds, dtype: torch.dtype
) -> int:
    """All the room, or less where every sequence that may run at once fits into less."""
    most_blocks = bounds.max_sequences * bounds.max_pages_each + 1  # with that of padding
    one_block = block_bytes(config, block_size=bounds.block_size, dtype=dtype)
    return min(room.cache, most_blocks * one_block)

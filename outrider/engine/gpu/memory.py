"""How much of a GPU's memory the KV cache gets, and what running out of it is called."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.engine.errors import EngineError

MIB = 2**20


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

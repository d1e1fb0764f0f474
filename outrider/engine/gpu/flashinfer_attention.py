"""FlashInfer's paged attention for one step's rows: prefill chunks, decode rows and verify rows are
ragged queries of one kernel, planned once per step and run in every layer.

`plan` works on the host; `attend` only launches, and may be captured.
"""

from dataclasses import dataclass

import flashinfer
import torch

from outrider.engine.gpu.kv_cache import GpuKvCache
from outrider.engine.gpu.memory import ATTENTION_FLOAT_BYTES
from outrider.engine.model_config import ModelConfig

# One kernel family for all rows, which packs the query heads of a key head into one tile.
BACKEND = "fa2"


class AttentionWorkspace:
    """Memory that all plans of one engine share, since one step runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.floats = torch.empty(ATTENTION_FLOAT_BYTES, dtype=torch.uint8, device=device)
        self._integers: torch.Tensor | None = None
        self._pinned: torch.Tensor | None = None

    def share(self, wrapper: "flashinfer.BatchPrefillWithPagedKVCacheWrapper") -> None:
        """Gives a wrapper the integer workspace of the first one instead of 16 MB of its own."""
        if self._integers is None:
            self._integers = wrapper._int_workspace_buffer
            self._pinned = wrapper._pin_memory_int_workspace_buffer
        wrapper._int_workspace_buffer = self._integers
        wrapper._pin_memory_int_workspace_buffer = self._pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePages:
    """Where queries and keys are, for the kernels: int32 on the device."""

    query_starts: torch.Tensor  # [sequences + 1]
    page_starts: torch.Tensor  # [sequences + 1]
    pages: torch.Tensor  # [at least page_starts[-1]]
    last_page_lengths: torch.Tensor  # [sequences]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPages:
    """The same for the plan: int32 on the host."""

    query_starts: torch.Tensor  # [sequences + 1]
    page_starts: torch.Tensor  # [sequences + 1]
    lengths: torch.Tensor  # [sequences], keys of each with its new rows


class FlashInferAttention:
    """Attention over one cache, for steps of any shape or for those of one graph."""

    def __init__(
        self,
        config: ModelConfig,
        cache: GpuKvCache,
        workspace: AttentionWorkspace,
        *,
        captured: DevicePages | None = None,
        captured_rows: int = 0,
    ) -> None:
        """`captured`: the buffers that a graph reads, whose contents later steps replace, and
        `captured_rows` its number of queries; without them every plan brings buffers of its own.
        """
        self._config = config
        self._cache = cache
        self._captured_rows = captured_rows
        if captured is None:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace.floats, "NHD", backend=BACKEND
            )
            num_sequences, rows_each = 1, 1
        else:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace.floats,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=captured.query_starts,
                paged_kv_indptr_buf=captured.page_starts,
                paged_kv_indices_buf=captured.pages,
                paged_kv_last_page_len_buf=captured.last_page_lengths,
                backend=BACKEND,
            )
            num_sequences = len(captured.last_page_lengths)
            rows_each = captured_rows // num_sequences
        workspace.share(self._wrapper)
        self._prime(num_sequences, rows_each)

    def _prime(self, num_sequences: int, rows_each: int) -> None:
        """The public plan once: it builds or loads the kernels and remembers the settings."""
        config, cache = self._config, self._cache
        starts = torch.arange(num_sequences + 1, dtype=torch.int32)
        self._wrapper.plan(
            starts * rows_each,
            starts,
            torch.zeros(num_sequences, dtype=torch.int32),
            torch.full((num_sequences,), min(rows_each, cache.block_size), dtype=torch.int32),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            cache.block_size,
            causal=True,
            q_data_type=cache.dtype,
            kv_data_type=cache.dtype,
        )

    def plan(self, host: HostPages, device: DevicePages, *, num_rows: int) -> None:
        """Divides a step's work among thread blocks. The device's buffers are the caller's to
        fill before the kernels run.

        The public plan would copy four buffers, one by one, and walk the lengths in Python.
        """
        config, wrapper = self._config, self._wrapper
        if not self._captured_rows:
            wrapper._qo_indptr_buf = device.query_starts
            wrapper._paged_kv_indptr_buf = device.page_starts
            wrapper._paged_kv_indices_buf = device.pages
            wrapper._paged_kv_last_page_len_buf = device.last_page_lengths
        wrapper._batch_size = len(host.lengths)
        wrapper._qo_indptr_last = num_rows
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            host.query_starts,
            host.page_starts,
            host.lengths,
            self._captured_rows or num_rows,
            len(host.lengths),
            config.num_heads,
            config.num_kv_heads,
            self._cache.block_size,
            bool(self._captured_rows),
            config.head_dim,
            config.head_dim,
            True,  # causal
            -1,  # no window
            -1,  # no fixed split
            False,  # long contexts may be split
            0,  # no thread blocks shared with another kernel
        )

    def attend(self, layer: int, qkv: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Attend causally over the cache, in which the rows' own keys and values already are.

        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the queries are read;
        output: [rows, num_heads * head_dim], returned.
        """
        config = self._config
        queries = qkv.view(qkv.shape[0], -1, config.head_dim)[:, : config.num_heads]
        self._wrapper.run(
            queries,
            (self._cache.keys[layer], self._cache.values[layer]),
            out=output.view(-1, config.num_heads, config.head_dim),
        )
        return output

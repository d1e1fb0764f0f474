"""Attention on CPU: torch's flash kernel over the gathered blocks of the paged cache.

Batch invariance: the kernel gives a query row the same bits whatever the batch and the number of
query rows, if that is a multiple of 4 or 8 (`cpu_probe.py` finds which), and whatever the key
length among multiples of 512 (its keys are split by 512, and wholly masked splits change nothing).
Among shorter key lengths it does not; so a row's position alone decides its key length there. A
sequence whose rows lie on both sides of such a bound is attended in several runs. The query heads
of one key head are rows of the same call, so keys are never repeated.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.kv_cache import PADDING_BLOCK, KvCache
from outrider.engine.model_config import ModelConfig
from outrider.engine.step import StepRows

# Up to here query counts are rounded to powers of two, so that a step needs few kernel calls.
LARGEST_SHARED_QUERIES = 64
KEY_SPLIT = 512
# Key lengths for the rows at positions below them; later rows have multiples of KEY_SPLIT.
SHORT_KEY_LENGTHS = (128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Neighbouring rows of one sequence whose positions ask for the same key length."""

    first_row: int  # in the step
    num_rows: int
    start: int  # position of the first row
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Runs of one padded query count and one key length, attended by one kernel call."""

    num_runs: int
    num_queries: int  # per run and key head, padded
    key_length: int
    queries: slice  # of the step's gathered queries
    keys: slice  # of the step's gathered tokens
    mask: torch.Tensor  # [num_runs, 1, num_queries, key_length], added to the scores


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAttention:
    """Attends over `cache` with the head counts of `config`."""

    config: ModelConfig
    cache: KvCache
    query_multiple: int  # query rows of a kernel call are padded to a multiple of this
    kv_granularity: int = KEY_SPLIT

    def plan(self, rows: StepRows) -> "CpuAttentionPlan":
        config, block_size = self.config, self.cache.block_size
        num_kv_heads = config.num_kv_heads
        group_size = config.num_heads // num_kv_heads
        query_indices: list[np.ndarray] = []
        # Padding rows read any finite output: that of the first query.
        output_index = np.zeros((rows.num_rows, num_kv_heads, group_size), dtype=np.int64)
        heads = np.arange(num_kv_heads)[:, None]
        blocks: list[int] = []
        groups: list[_Group] = []
        next_query = next_key = 0
        for (num_queries, key_length), runs in self._grouped_runs(rows).items():
            query = np.arange(num_queries)
            first_row = np.array([run.first_row for run in runs])[:, None]
            starts = np.array([run.start for run in runs])[:, None]
            last = np.array([run.num_rows - 1 for run in runs])[:, None]
            # [runs, num_queries]; padding queries repeat the run's last row.
            row = np.minimum(query // group_size, last)
            head = (first_row + row)[:, None] * (config.num_heads + 2 * num_kv_heads)
            query_indices.append((head + heads * group_size + query % group_size).reshape(-1))
            for order, run in enumerate(runs):
                first = next_query + order * num_queries * num_kv_heads
                own = first + np.arange(run.num_rows * group_size).reshape(-1, 1, group_size)
                own_rows = slice(run.first_row, run.first_row + run.num_rows)
                output_index[own_rows] = own + heads * num_queries
                used = min(-(-(run.start + run.num_rows) // block_size), len(run.block_table))
                blocks.extend(run.block_table[:used])
                blocks.extend([PADDING_BLOCK] * (key_length // block_size - used))
            num_gathered = len(runs) * num_queries * num_kv_heads
            groups.append(
                _Group(
                    num_runs=len(runs),
                    num_queries=num_queries,
                    key_length=key_length,
                    queries=slice(next_query, next_query + num_gathered),
                    keys=slice(next_key, next_key + len(runs) * key_length),
                    mask=_mask(starts + row, key_length, self.cache.blocks.dtype),
                )
            )
            next_query += num_gathered
            next_key += len(runs) * key_length
        return CpuAttentionPlan(
            config=config,
            cache=self.cache,
            groups=tuple(groups),
            slot_mapping=rows.slot_mapping,
            query_index=torch.from_numpy(np.concatenate(query_indices)),
            output_index=torch.from_numpy(output_index.reshape(-1)),
            block_index=torch.tensor(blocks),
        )

    def _grouped_runs(self, rows: StepRows) -> dict[tuple[int, int], list[_Run]]:
        """Every sequence's runs by padded query count and key length."""
        group_size = self.config.num_heads // self.config.num_kv_heads
        grouped: dict[tuple[int, int], list[_Run]] = defaultdict(list)
        row = 0
        for sequence in rows.sequences:
            position = sequence.start
            end = position + len(sequence.token_ids)
            while position < end:
                stop = min((end, *(bound for bound in SHORT_KEY_LENGTHS if bound > position)))
                count = stop - position
                # Beyond one split, lengths are rounded to powers of two of it, for fewer calls.
                key_length = key_length_at(stop - 1)
                if key_length > KEY_SPLIT:
                    key_length = KEY_SPLIT << (key_length // KEY_SPLIT - 1).bit_length()
                grouped[self._padded_queries(count * group_size), key_length].append(
                    _Run(
                        first_row=row,
                        num_rows=count,
                        start=position,
                        block_table=sequence.block_table,
                    )
                )
                row += count
                position = stop
        return grouped

    def _padded_queries(self, count: int) -> int:
        if count <= LARGEST_SHARED_QUERIES:
            return max(self.query_multiple, 1 << (count - 1).bit_length())
        return -(-count // self.query_multiple) * self.query_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAttentionPlan:
    """Index tensors of one step, the same in every layer."""

    config: ModelConfig
    cache: KvCache
    groups: Sequence[_Group]
    slot_mapping: torch.Tensor
    query_index: torch.Tensor  # into the heads of all rows, [rows * (heads + 2 * kv heads)]
    output_index: torch.Tensor  # [rows * num_heads], into the outputs of all groups
    block_index: torch.Tensor  # blocks of every run, in order

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        config = self.config
        blocks = self.cache.blocks[layer]
        slots = blocks.view(-1, 2 * config.kv_size)
        slots.index_copy_(0, self.slot_mapping, qkv[:, config.query_size :])
        queries = qkv.view(-1, config.head_dim).index_select(0, self.query_index)
        gathered = blocks.index_select(0, self.block_index)
        tokens = gathered.view(-1, 2, config.num_kv_heads, config.head_dim)
        outputs = [self._attend_group(group, queries, tokens) for group in self.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.index_select(0, self.output_index).view(-1, config.query_size)

    def _attend_group(
        self, group: _Group, queries: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """[runs * num_kv_heads * num_queries, head_dim]"""
        num_kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        query = queries[group.queries].view(
            group.num_runs, num_kv_heads, group.num_queries, head_dim
        )
        shape = (group.num_runs, group.key_length, 2, num_kv_heads, head_dim)
        keys, values = tokens[group.keys].view(shape).permute(2, 0, 3, 1, 4)
        return flash_attention(query, keys, values, group.mask).reshape(-1, head_dim)


def flash_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The one kernel, by name: torch's dispatcher would choose by shape.

    Arguments and result are [runs, heads, rows, head_dim]; the mask is added to the scores.
    """
    output: torch.Tensor
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=mask
    )
    return output


def key_length_at(position: int) -> int:
    """Key length that attention gives the row at a position, up to further masked splits."""
    for length in SHORT_KEY_LENGTHS:
        if position < length:
            return length
    return -(-(position + 1) // KEY_SPLIT) * KEY_SPLIT


def _mask(positions: np.ndarray, key_length: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query of `positions` [runs, queries] may see a key, -inf elsewhere."""
    hidden = torch.arange(key_length) > torch.from_numpy(positions)[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask[:, None]

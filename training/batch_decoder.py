"""Decodes thousands of rows at once: fixed slots over a dense KV cache, refilled as rows finish.

One step gives every slot its next token; all of a row's state is on the device, so that on CUDA a
step is one captured graph and the host looks at the rows only every few steps. It knows tokens,
not prompts or texts. One thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.decode_attention import DecodeAttention, matmul_attention
from training.target import DenseTarget, causal_attention
from training.token_choice import TokenChoice, plain_choice

PREFILL_TOKENS = 65536
PREFILL_MULTIPLE = 32
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """A prompt and how to continue it. `temperature` 0 is greedy.

    Tokens less likely than `min_p` times the likeliest are not drawn; 0 leaves all of them.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRow:
    """A slot's new tokens. `ended` says whether the last is an end-of-sequence token."""

    slot: int
    token_ids: list[int]
    ended: bool


class BatchDecoder:
    """`rows` slots of up to `length` tokens each."""

    def __init__(
        self,
        target: DenseTarget,
        *,
        rows: int,
        length: int,
        attention: DecodeAttention = matmul_attention,
        choice: TokenChoice = plain_choice,
        seed: int = 0,
    ) -> None:
        """Allocates the cache. Raises ValueError for a length beyond the target's positions."""
        config = target.config
        if length > config.max_position_embeddings:
            raise ValueError(
                f"length is {length}: must be at most {config.max_position_embeddings}"
            )
        device = target.embedding.device
        self.rows = rows
        self.length = length
        self._target = target
        self._attention = attention
        self._choice = choice
        self._device = device
        # [layers, 2, rows, kv_heads, length, head_dim]; never read where nothing was written,
        # but a masked product with uninitialised NaN would still be NaN.
        shape = (config.num_layers, 2, rows, config.num_kv_heads, length, config.head_dim)
        self._cache = torch.zeros(shape, dtype=target.embedding.dtype, device=device)
        self._tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self._lengths = torch.ones(rows, dtype=torch.long, device=device)
        self._limits = torch.ones(rows, dtype=torch.long, device=device)
        self._active = torch.zeros(rows, dtype=torch.bool, device=device)
        self._temperatures = torch.zeros(rows, 1, device=device)
        self._margins = torch.zeros(rows, 1, device=device)
        # Counts steps from the seed; what it counts past seeds the noise of kernels.
        self._step = torch.full((1,), seed, dtype=torch.long, device=device)
        self._every_row = torch.arange(rows, device=device)
        self._is_eos = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        self._is_eos[list(config.eos_token_ids)] = True
        self._eos_ids = frozenset(config.eos_token_ids)
        self._prompt_lengths = [1] * rows
        self._occupied: set[int] = set()
        self._graph: torch.cuda.CUDAGraph | None = None

    def free_slots(self) -> list[int]:
        return [slot for slot in range(self.rows) if slot not in self._occupied]

    def num_occupied(self) -> int:
        return len(self._occupied)

    def fits(self, request: RowRequest) -> bool:
        """Whether a row has at least one prompt token and room for all its new ones."""
        return 1 <= len(request.prompt_ids) <= self.length - request.max_new_tokens

    @torch.no_grad()
    def admit(self, slots: Sequence[int], requests: Sequence[RowRequest]) -> None:
        """Prefill rows into free slots, in chunks of rows of similar length."""
        ordered = sorted(
            zip(slots, requests, strict=True), key=lambda pair: len(pair[1].prompt_ids)
        )
        while ordered:
            width = _padded(len(ordered[-1][1].prompt_ids), self.length)
            count = max(1, PREFILL_TOKENS // width)
            chunk, ordered = ordered[-count:], ordered[:-count]
            self._admit_chunk([slot for slot, _ in chunk], [row for _, row in chunk], width)

    def _admit_chunk(
        self, slots: Sequence[int], requests: Sequence[RowRequest], width: int
    ) -> None:
        for slot, request in zip(slots, requests, strict=True):
            assert slot not in self._occupied and self.fits(request)
            self._occupied.add(slot)
            self._prompt_lengths[slot] = len(request.prompt_ids)
        lengths = [len(request.prompt_ids) for request in requests]
        rows = [[*row.prompt_ids, *[0] * (width - len(row.prompt_ids))] for row in requests]
        limits = [len(row.prompt_ids) + row.max_new_tokens for row in requests]
        settings = [[row.temperature, row.min_p] for row in requests]
        where = torch.tensor(slots, device=self._device)
        token_ids = torch.tensor(rows, device=self._device)
        self._fill(where, token_ids)
        self._tokens[where, :width] = token_ids
        self._lengths[where] = torch.tensor(lengths, device=self._device)
        self._limits[where] = torch.tensor(limits, device=self._device)
        drawn = torch.tensor(settings, dtype=torch.float32, device=self._device)
        temperature, min_p = torch.split(drawn, 1, dim=1)
        self._temperatures[where] = temperature
        self._margins[where] = torch.where(min_p > 0, temperature * min_p.log(), -torch.inf)
        self._active[where] = True

    def _fill(self, where: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keys and values of padded prompts [n, width] into the cache."""
        target = self._target
        width = token_ids.shape[1]
        rotations = target.rotations[:width].unsqueeze(1)
        hidden = F.embedding(token_ids, target.embedding)
        for index in range(target.config.num_layers):
            layer = target.decoder_layer(index)
            q, k, v = layer.heads(hidden, rotations)
            self._cache[index, 0][where, :, :width] = k.transpose(1, 2)
            self._cache[index, 1][where, :, :width] = v.transpose(1, 2)
            hidden = layer.finish(hidden, causal_attention(q, k, v))

    def run(self, steps: int) -> None:
        """Decode up to `steps` tokens for every row; on CUDA the host does not wait for it."""
        if self._device.type != "cuda":
            for _ in range(steps):
                self.step()
            return
        if self._graph is None:
            self._graph = self._capture()
        for _ in range(steps):
            self._graph.replay()

    def _capture(self) -> "torch.cuda.CUDAGraph":
        # The state that the warm-up steps move is put back, so that no row notices them.
        saved = [tensor.clone() for tensor in (self._tokens, self._lengths, self._active)]
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        live = (self._tokens, self._lengths, self._active)
        for tensor, value in zip(live, saved, strict=True):
            tensor.copy_(value)
        return graph

    @torch.no_grad()
    def step(self) -> None:
        """Give every active row its next token. Touches device state only."""
        target = self._target
        positions = self._lengths - 1
        token_ids = self._tokens.gather(1, positions.unsqueeze(1)).squeeze(1)
        rotations = target.rotations.index_select(0, positions).unsqueeze(1)
        # An idle slot writes its old key again and attends to one: it costs next to nothing.
        spans = torch.where(self._active, self._lengths, 1)
        hidden = F.embedding(token_ids, target.embedding)
        for index in range(target.config.num_layers):
            layer = target.decoder_layer(index)
            q, k, v = layer.heads(hidden, rotations)
            keys, values = self._cache[index]
            keys[self._every_row, :, positions] = k
            values[self._every_row, :, positions] = v
            hidden = layer.finish(hidden, self._attention(q, keys, values, spans))
        logits = F.linear(target.normed(hidden), target.head)
        chosen = self._choice(logits, self._temperatures, self._margins, self._step)
        self._step.add_(1)
        places = self._lengths.clamp(max=self.length - 1).unsqueeze(1)
        kept = self._tokens.gather(1, places).squeeze(1)
        written = torch.where(self._active, chosen, kept)
        self._tokens.scatter_(1, places, written.unsqueeze(1))
        self._lengths.add_(self._active)
        self._active.logical_and_(~self._is_eos[chosen] & (self._lengths < self._limits))

    def harvest(self) -> list[FinishedRow]:
        """Take the rows that have finished; their slots are free again. Waits for the device."""
        active = self._active.tolist()
        return self._take([slot for slot in sorted(self._occupied) if not active[slot]])

    def harvest_all(self) -> list[FinishedRow]:
        """Take every row, finished or not."""
        return self._take(sorted(self._occupied))

    def _take(self, slots: list[int]) -> list[FinishedRow]:
        if not slots:
            return []
        where = torch.tensor(slots, device=self._device)
        lengths = self._lengths[where].tolist()
        rows = self._tokens[where].cpu().numpy()
        self._active[where] = False
        self._occupied.difference_update(slots)
        finished = []
        for slot, length, row in zip(slots, lengths, rows, strict=True):
            token_ids = row[self._prompt_lengths[slot] : length].tolist()
            ended = bool(token_ids) and token_ids[-1] in self._eos_ids
            finished.append(FinishedRow(slot=slot, token_ids=token_ids, ended=ended))
        return finished


def _padded(length: int, limit: int) -> int:
    return min(-(-length // PREFILL_MULTIPLE) * PREFILL_MULTIPLE, limit)

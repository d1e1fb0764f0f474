"""Step times of the engine on a GPU, by batch: plain, and verifying drafts.

    python -m bench.gpu_step [--model MODEL] [--batches 1 8 64] [--draft-lengths 0 3] [--json FILE]

Without --model, one of Llama-3.1-8B's shape with random weights, whose steps cost what those of the
real one do. Each sequence has a prompt of --prompt tokens; --steps decode steps follow,
greedy. Drafts are random tokens, none of which is right: the rows cost the same. Beside each time
stands what reading the step's weights, keys and values takes at the measured copy speed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.boot import Engine
from outrider.engine.config import EngineConfig
from outrider.engine.devices import boot_engine
from outrider.engine.gpu.boot import boot_weights
from outrider.engine.gpu.device import find_device
from outrider.engine.layers import ColumnLinear, RmsNorm, RowLinear, VocabEmbedding, VocabHead
from outrider.engine.model_config import ModelConfig
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import NextRow, SequenceStep
from outrider.engine.weights import DecoderWeights, Layer
from outrider.serving.model_source import resolve_model

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_STEPS = 8
COPY_BYTES = 4 * 2**30
GREEDY = Sampling(temperature=0.0)


class Progress:
    """Boot's stages, on standard error."""

    def enter(self, stage: str) -> None:
        print(f"{time.perf_counter():9.1f} {stage}", file=sys.stderr, flush=True)

    def skip(self, stage: str, reason: str) -> None:
        self.note(f"{stage} skipped: {reason}")

    def note(self, detail: str) -> None:
        print(f"          {detail}", file=sys.stderr, flush=True)


def random_weights(config: ModelConfig, device: torch.device) -> DecoderWeights:
    """bfloat16, scaled so that the stream neither dies nor explodes."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def norm() -> RmsNorm:
        weight = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device)
        return RmsNorm(weight=weight, eps=config.rms_norm_eps)

    def layer() -> Layer:
        width, inner = config.hidden_size, config.intermediate_size
        return Layer(
            input_norm=norm(),
            qkv=ColumnLinear(weight=draw(config.query_size + 2 * config.kv_size, width), bias=None),
            qk_norm=None,
            output=RowLinear(weight=draw(width, config.query_size), bias=None),
            mlp_norm=norm(),
            gate_up=ColumnLinear(weight=draw(2 * inner, width), bias=None),
            down=RowLinear(weight=draw(width, inner), bias=None),
        )

    return DecoderWeights(
        embedding=VocabEmbedding(weight=draw(config.vocab_size, config.hidden_size)),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=norm(),
        head=VocabHead(weight=draw(config.vocab_size, config.hidden_size)),
        fingerprint="random",
    )


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written by a large copy on the device, per second."""
    source = torch.ones(COPY_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * COPY_BYTES / statistics.median(seconds)


def weight_bytes(engine: Engine) -> int:
    """That a step reads: all but the embedding, of which it takes a few rows."""
    config = engine.model_config
    width = config.hidden_size
    per_layer = (
        width * (config.query_size + 2 * config.kv_size)
        + width * config.query_size
        + 3 * width * config.intermediate_size
    )
    return 2 * (config.num_layers * per_layer + config.vocab_size * width)


@dataclass
class Stream:
    """One sequence being decoded."""

    token_ids: list[int]
    table: list[int]

    def step(self, drafts: Sequence[int]) -> SequenceStep:
        """Its next decode or verify rows."""
        return SequenceStep(
            rows=SequenceRows(
                token_ids=(self.token_ids[-1], *drafts),
                start=len(self.token_ids) - 1,
                block_table=self.table,
                num_logits=1 + len(drafts),
            ),
            draft_length=len(drafts),
            sampling=GREEDY,
            base_length=len(self.token_ids),
        )


def opened(engine: Engine, batch: int, prompt_length: int, max_length: int) -> list[Stream]:
    """Sequences whose prompts are in the cache, with one token decoded."""
    size = engine.limits.block_size
    vocab_size = engine.model_config.vocab_size
    streams = []
    for index in range(batch):
        prompt = [(index * 131 + place * 7919) % vocab_size for place in range(prompt_length)]
        table = engine.block_pool.allocate(-(-max_length // size))
        rows = SequenceRows(token_ids=prompt, start=0, block_table=table, num_logits=1)
        step = SequenceStep(rows=rows, draft_length=0, sampling=GREEDY, base_length=prompt_length)
        (verdict,) = engine.steps.launch([step], None).verdicts()
        streams.append(Stream([*prompt, verdict.bonus_token_id], table))
    return streams


def step_seconds(
    engine: Engine, batch: int, draft_length: int, prompt_length: int, steps: int
) -> float:
    """Median seconds of a step, from the rows being known to the verdicts being there."""
    vocab_size = engine.model_config.vocab_size
    max_length = prompt_length + (WARM_STEPS + steps) * (1 + draft_length) + 2 + draft_length
    streams = opened(engine, batch, prompt_length, max_length)
    seconds = []
    for count in range(WARM_STEPS + steps):
        drafts = [(count * 17 + place) % vocab_size for place in range(draft_length)]
        started = time.perf_counter()
        batch_steps = [stream.step(drafts) for stream in streams]
        verdicts = engine.steps.launch(batch_steps, None).verdicts()
        for stream, verdict in zip(streams, verdicts, strict=True):
            stream.token_ids.extend(verdict.emitted_token_ids(drafts))
        seconds.append(time.perf_counter() - started)
    for stream in streams:
        engine.block_pool.release(stream.table)
    return statistics.median(seconds[WARM_STEPS:])


def plain_step_seconds(engine: Engine, batch: int, prompt_length: int, steps: int) -> float:
    """Median seconds from one plain step's verdicts to the next one's, each step being launched
    while the one before it runs, as the target's step loop does.
    """
    assert engine.ahead is not None
    streams = opened(engine, batch, prompt_length, prompt_length + WARM_STEPS + steps + 3)
    running = engine.steps.launch([stream.step(()) for stream in streams], None)
    seconds = []
    ended = time.perf_counter()
    for _ in range(WARM_STEPS + steps):
        rows = [
            NextRow(
                index=index,
                start=len(stream.token_ids),
                block_table=stream.table,
                sampling=GREEDY,
                base_length=len(stream.token_ids) + 1,
            )
            for index, stream in enumerate(streams)
        ]
        behind = engine.ahead.launch_next(rows, None, after=running)
        for stream, verdict in zip(streams, running.verdicts(), strict=True):
            stream.token_ids.append(verdict.bonus_token_id)
        running = behind
        last, ended = ended, time.perf_counter()
        seconds.append(ended - last)
    running.verdicts()
    for stream in streams:
        engine.block_pool.release(stream.table)
    return statistics.median(seconds[WARM_STEPS:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: Llama-3.1-8B's shape, random")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--draft-lengths", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--kv-cache-mib", type=int, default=32 * 1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    longest = max(arguments.draft_lengths)
    config = EngineConfig(
        model_path=resolve_model(arguments.model).path if arguments.model else Path(),
        device=arguments.device,
        kv_cache_bytes=arguments.kv_cache_mib * 2**20,
        max_sequence_length=min(
            8192, arguments.prompt + (WARM_STEPS + arguments.steps + 2) * (1 + longest)
        ),
        max_step_rows=max(512, max(arguments.batches) * (1 + longest)),
        max_sequences=max(arguments.batches),
        max_draft_length=longest,
    )
    device = find_device(arguments.device)
    started = time.perf_counter()
    if arguments.model:
        engine = boot_engine(config, Progress())
    else:
        weights = random_weights(LLAMA_8B, device)
        layers = (2, 16, 29)
        engine = boot_weights(config, LLAMA_8B, weights, layers, device, Progress())
    print(f"boot {time.perf_counter() - started:.1f} s; {engine.first_decode.compared}")
    speed = copy_bytes_per_second(device)
    print(f"copy {speed / 1e12:.2f} TB/s; weights {weight_bytes(engine) / 1e9:.2f} GB a step")
    rows = []
    model = engine.model_config
    for batch in arguments.batches:
        for draft_length in arguments.draft_lengths:
            if draft_length:
                seconds = step_seconds(
                    engine, batch, draft_length, arguments.prompt, arguments.steps
                )
            else:
                seconds = plain_step_seconds(engine, batch, arguments.prompt, arguments.steps)
            context = arguments.prompt + (WARM_STEPS + arguments.steps / 2)
            kv_bytes = batch * context * 4 * model.num_layers * model.kv_size
            floor = (weight_bytes(engine) + kv_bytes) / speed
            rows.append(
                {
                    "batch": batch,
                    "draft_length": draft_length,
                    "milliseconds": seconds * 1e3,
                    "read_milliseconds": floor * 1e3,
                }
            )
            print(
                f"batch {batch:4d} draft length {draft_length}: {seconds * 1e3:7.2f} ms a step, "
                f"{seconds / floor:.2f} of reading weights and cache",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

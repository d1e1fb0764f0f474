"""Answers of a target, written to a file once, and the features of their tokens under a head.

What a draft can do for a text does not depend on how the text came about: so drafters are measured
on texts that are there, without a cluster.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gateway.boot import load_text_model
from outrider.engine.boot import Engine
from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.feature_tap import FeatureTap
from outrider.engine.runner import SequenceRows
from outrider.engine.sampling import Sampling, sample

# Sequences decoded together.
BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and the target's answer to it."""

    category: str
    prompt_length: int
    token_ids: tuple[int, ...]
    seed: int


def encoded_prompts(path: Path, model: str, count: int | None) -> list[tuple[str, list[int]]]:
    """(category, token ids of the first turn in the model's chat template) of a file with one JSON
    object a line: `turns`, and `category` where it has one; `count` of them, evenly spread.
    """
    text_model = load_text_model(model)
    assert text_model.chat_template is not None, f"{model} has no chat template"
    lines = path.read_text(encoding="utf-8").splitlines()
    stride = max(len(lines) / count, 1.0) if count else 1.0
    prompts = []
    for index in range(min(count or len(lines), len(lines))):
        entry = json.loads(lines[int(index * stride)])
        chat = text_model.chat_template.render([{"role": "user", "content": entry["turns"][0]}])
        token_ids = text_model.vocabulary.encode(
            chat.text, parse_special=True, add_bos=False, protected=chat.protected
        )
        prompts.append((entry.get("category", "all"), list(token_ids)))
    return prompts


def write_answers(
    engine: Engine,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    temperature: float,
    max_tokens: int,
) -> Iterator[Text]:
    """The target's answers, in batches; the seed of a prompt is its index."""
    for first in range(0, len(prompts), BATCH):
        batch = list(enumerate(prompts))[first : first + BATCH]
        token_ids = {index: list(prompt) for index, (_, prompt) in batch}
        tables = {
            index: engine.block_pool.allocate(
                -(-(len(prompt) + max_tokens) // engine.limits.block_size)
            )
            for index, (_, prompt) in batch
        }
        samplings = {index: Sampling(temperature=temperature, seed=index) for index, _ in batch}
        live = []
        for index, _ in batch:
            logits = _prefill(engine, token_ids[index], tables[index])
            token_ids[index].append(sample(logits, samplings[index], len(token_ids[index])))
            live.append(index)
        while live := [
            index
            for index in live
            if token_ids[index][-1] not in engine.model_config.eos_token_ids
            and len(token_ids[index]) < len(prompts[index][1]) + max_tokens
        ]:
            logits = engine.runner.forward(
                [
                    SequenceRows(
                        token_ids=token_ids[index][-1:],
                        start=len(token_ids[index]) - 1,
                        block_table=tables[index],
                        num_logits=1,
                    )
                    for index in live
                ]
            )
            for row, index in zip(logits, live, strict=True):
                token_ids[index].append(sample(row, samplings[index], len(token_ids[index])))
        for index, (category, prompt) in batch:
            engine.block_pool.release(tables[index])
            yield Text(
                category=category,
                prompt_length=len(prompt),
                token_ids=tuple(token_ids[index]),
                seed=index,
            )


def features_of(engine: Engine, text: Text, projection: FeatureProjection) -> bytes:
    """Projected rows of all tokens but the last."""
    token_ids = text.token_ids[:-1]
    table = engine.block_pool.allocate(-(-len(token_ids) // engine.limits.block_size))
    tap = engine.runner.make_tap(projection)
    _prefill(engine, token_ids, table, tap)
    rows = tap.store.rows_of(table, 0, len(token_ids))
    engine.block_pool.release(table)
    return rows.tobytes()


def _prefill(
    engine: Engine,
    token_ids: Sequence[int],
    table: Sequence[int],
    tap: FeatureTap | None = None,
) -> NDArray[np.float32]:
    """The logits behind the last token."""
    step = engine.limits.max_step_rows
    logits = np.empty((0, engine.model_config.vocab_size), dtype=np.float32)
    for start in range(0, len(token_ids), step):
        rows = SequenceRows(
            token_ids=token_ids[start : start + step],
            start=start,
            block_table=table,
            num_logits=int(start + step >= len(token_ids)),
        )
        logits = engine.runner.forward([rows], tap)
    return logits[-1]


def read_texts(path: Path) -> list[Text]:
    """What `save_texts` wrote."""
    return [
        Text(**{**entry, "token_ids": tuple(entry["token_ids"])})
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Texts into a JSON file."""
    path.write_text(json.dumps([asdict(text) for text in texts]), encoding="utf-8")

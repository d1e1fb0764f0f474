"""Acceptance of drafters on a target's own answers, by category, draft length and temperature.

    python -m bench.acceptance PROMPTS.jsonl [--head DIR] [--drafts ngram eagle3 hybrid]
        [--draft-lengths 3 5 7] [--temperatures 0 1] [--count 240] [--texts DIR]

The drafters are the draft service's own, given tokens and features as over the link. Acceptance
length is 1 + accepted / drafts; tokens/step counts the steps without a draft too. `greedy` at a
temperature above 0: the same drafter proposing its most likely tokens instead of those of the
shared noise. The texts are kept in --texts, and read from there if they are there.
"""

import argparse
import json
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.target_text import (
    Text,
    encoded_prompts,
    features_of,
    read_texts,
    save_texts,
    write_answers,
)
from draft_service.config import DraftConfig
from draft_service.drafters.drafter import Drafter, FeatureRows, Wish
from draft_service.drafters.hybrid import HybridDrafter
from draft_service.drafters.ngram_drafter import NgramDrafter
from outrider.engine import boot as engine_boot
from outrider.engine.boot import Engine
from outrider.engine.config import EngineConfig
from outrider.engine.feature_projection import FeatureProjection, load_projection
from outrider.engine.sampling import Sampling
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model

# Sequences that draft together.
BATCH = 16
PREPARE_SECONDS = 1.0


class Quiet:
    """A boot report that nobody reads."""

    def enter(self, stage: str) -> None: ...

    def skip(self, stage: str, reason: str) -> None: ...

    def note(self, detail: str) -> None: ...


@dataclass(slots=True)
class Tally:
    """Drafts of one kind of text."""

    steps: int = 0
    drafts: int = 0
    tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    # [first half of the answers, second half]: drafts, accepted tokens.
    halves: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])

    def count(self, drafted: int, accepted: int, emitted: int, half: int) -> None:
        self.steps += 1
        self.tokens += emitted
        if not drafted:
            return
        self.drafts += 1
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(accepted):
            self.accepted_per_position[position] += 1
        self.halves[half][0] += 1
        self.halves[half][1] += accepted

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_per_position) / max(self.drafts, 1)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    def half(self, index: int) -> float:
        drafts, accepted = self.halves[index]
        return 1 + accepted / max(drafts, 1)


def simulate(
    drafter: Drafter[Any],
    texts: Sequence[Text],
    features: Sequence[bytes] | None,
    draft_length: int,
    sampling_of: Callable[[Text], Sampling],
) -> dict[str, Tally]:
    """Drafts every text as a target would have it drafted; tallies by category and of "all"."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for first in range(0, len(texts), BATCH):
        group = range(first, min(first + BATCH, len(texts)))
        # The prompt's own forward gives the first token: drafts begin behind it.
        committed = {
            index: array("i", texts[index].token_ids[: texts[index].prompt_length + 1])
            for index in group
        }
        states = {
            index: drafter.open(committed[index], sampling_of(texts[index])) for index in group
        }
        for index in group:
            assert drafter.reserve(states[index], len(committed[index]) + draft_length)
            _tell(drafter, states[index], features, index, 0, texts[index].prompt_length)
        live = list(group)
        while live := [
            index for index in live if len(committed[index]) < len(texts[index].token_ids)
        ]:
            wishes = {}
            for index in live:
                room = len(texts[index].token_ids) - len(committed[index])
                # As the draft service does between steps.
                while drafter.backlog(states[index]) > drafter.max_backlog // 2:
                    drafter.prepare([states[index]], PREPARE_SECONDS)
                length = min(draft_length, room - 1)
                if length > 0:
                    wishes[index] = Wish(states[index], length, float("inf"))
            proposals = dict(
                zip(wishes, drafter.propose(list(wishes.values())), strict=True) if wishes else ()
            )
            for index in live:
                text, tokens = texts[index], committed[index]
                base = len(tokens)
                draft = proposals[index].token_ids if index in proposals else []
                accepted = 0
                while accepted < len(draft) and draft[accepted] == text.token_ids[base + accepted]:
                    accepted += 1
                emitted = accepted + 1
                half = int(
                    base - text.prompt_length > (len(text.token_ids) - text.prompt_length) / 2
                )
                for name in (text.category, "all"):
                    tallies[name].count(len(draft), accepted, emitted, half)
                tokens.extend(text.token_ids[base : base + emitted])
                assert drafter.reserve(states[index], len(tokens) + draft_length)
                _tell(drafter, states[index], features, index, base - 1, base - 1 + emitted)
        for index in group:
            drafter.close(states[index])
    return tallies


def _tell(
    drafter: Drafter[Any],
    state: Any,
    features: Sequence[bytes] | None,
    index: int,
    start: int,
    end: int,
) -> None:
    """Gives a drafter that needs them the features of positions start .. end - 1."""
    needs = drafter.offer.feature_needs
    if needs is not None:
        assert features is not None
        rows = features[index][start * needs.row_bytes : end * needs.row_bytes]
        assert drafter.add_features(state, FeatureRows(first_position=start, rows=rows))


def texts_at(arguments: argparse.Namespace, engine: Engine, temperature: float) -> list[Text]:
    """The target's answers, from the file if they were written before."""
    path = arguments.texts / f"texts-{temperature:g}.json"
    if not path.exists():
        prompts = encoded_prompts(arguments.prompts, arguments.model, arguments.count)
        answers = list(
            write_answers(engine, prompts, temperature=temperature, max_tokens=arguments.max_tokens)
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save_texts(path, answers)
    return read_texts(path)


def all_features(
    arguments: argparse.Namespace,
    engine: Engine,
    temperature: float,
    texts: Sequence[Text],
    projection: FeatureProjection,
) -> list[bytes]:
    """Every text's features, from the file if this head's were computed before."""
    path = arguments.texts / f"features-{temperature:g}-{projection.sha256[:16]}.bin"
    if not path.exists():
        path.write_bytes(b"".join(features_of(engine, text, projection) for text in texts))
    whole = path.read_bytes()
    features, start = [], 0
    for text in texts:
        end = start + (len(text.token_ids) - 1) * projection.width * 2
        features.append(whole[start:end])
        start = end
    return features


def drafter_named(name: str, head: Drafter[Any] | None) -> Drafter[Any]:
    """A drafter as the draft service would make it; a fresh one, knowing no text."""
    if name == "ngram":
        return NgramDrafter()
    assert head is not None, f"{name} needs --head"
    return HybridDrafter(NgramDrafter(), head) if name == "hybrid" else head


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", default="", help="directory; empty = the one that ships")
    parser.add_argument("--drafts", nargs="+", default=["ngram", "eagle3", "hybrid"])
    parser.add_argument("--draft-lengths", nargs="+", type=int, default=[3, 5, 7])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--count", type=int, help="prompts, evenly spread; default all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--texts", type=Path, required=True, help="folder that keeps the answers")
    parser.add_argument("--json", type=Path, help="file for the table")
    arguments = parser.parse_args()
    engine = engine_boot.boot(
        EngineConfig(model_path=resolve_model(arguments.model).path, dtype=arguments.dtype),
        Quiet(),
    )
    head: Drafter[Any] | None = None
    projection = None
    if set(arguments.drafts) & {"eagle3", "hybrid"}:
        from draft_service.drafters.eagle3_boot import boot_eagle3_drafter

        config = DraftConfig(
            draft="eagle3",
            draft_model=arguments.head,
            model=arguments.model,
            dtype=arguments.dtype,
        )
        head = boot_eagle3_drafter(config, Quiet()).drafter
        needs = head.offer.feature_needs
        assert needs is not None
        projection = load_projection(
            needs.projection,
            hidden_size=engine.model_config.hidden_size,
            dtype=engine.runner.decoder.weights.embedding.weight.dtype,
        )
    table = []
    for temperature in arguments.temperatures:
        texts = texts_at(arguments, engine, temperature)
        features = projection and all_features(arguments, engine, temperature, texts, projection)
        variants: list[tuple[str, float]] = [("", temperature)]
        if temperature:
            variants.append((" greedy", 0.0))
        for name in arguments.drafts:
            for suffix, draft_temperature in variants if name == "eagle3" else variants[:1]:
                for draft_length in arguments.draft_lengths:
                    tallies = simulate(
                        drafter_named(name, head),
                        texts,
                        features,
                        draft_length,
                        lambda text, heat=draft_temperature: Sampling(  # type: ignore[misc]
                            temperature=heat, seed=text.seed
                        ),
                    )
                    table.append(_row(name + suffix, temperature, draft_length, tallies))
                    print(table[-1]["line"], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return 0


def _row(
    name: str, temperature: float, draft_length: int, tallies: dict[str, Tally]
) -> dict[str, Any]:
    whole = tallies["all"]
    categories = {
        category: round(tally.acceptance_length, 3)
        for category, tally in sorted(tallies.items())
        if category != "all"
    }
    positions = [round(count / max(whole.drafts, 1), 3) for count in whole.accepted_per_position]
    line = (
        f"{name}, temperature {temperature:g}, draft length {draft_length}: acceptance length "
        f"{whole.acceptance_length:.3f}, {whole.tokens_per_step:.3f} tokens/step "
        f"({whole.drafts} drafts in {whole.steps} steps); halves {whole.half(0):.3f} "
        f"{whole.half(1):.3f}; by position {positions}; "
        + ", ".join(f"{category} {value:.2f}" for category, value in categories.items())
    )
    return {
        "drafter": name,
        "temperature": temperature,
        "draft_length": draft_length,
        "acceptance_length": whole.acceptance_length,
        "tokens_per_step": whole.tokens_per_step,
        "halves": [whole.half(0), whole.half(1)],
        "positions": positions,
        "categories": categories,
        "line": line,
    }


if __name__ == "__main__":
    sys.exit(main())

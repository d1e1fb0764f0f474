"""Prompts for a benchmark: the small set that ships, or a JSON Lines file."""

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

SHIPPED = "prompts.jsonl"


class PromptError(Exception):
    """A file has no prompts that can be used; the text says where and why."""


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, one JSON object a line with `turns` (the first is taken, as in
    Spec-Bench and MT-bench), `prompt` or `question`; the shipped ones without a file. Raises
    PromptError.
    """
    name = SHIPPED if path is None else str(path)
    try:
        text = (
            (files("outrider.bench") / SHIPPED).read_text(encoding="utf-8")
            if path is None
            else path.read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{name}: {error}") from error
    prompts = [
        _prompt(line, f"{name}, line {number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{name}: has no prompts")
    return prompts


def in_order(prompts: Sequence[str], count: int, seed: int) -> list[str]:
    """So many prompts in an order that depends on the seed alone; each once before any comes again,
    so that every run of a benchmark is asked the same.
    """
    generator = random.Random(seed)
    chosen: list[str] = []
    while len(chosen) < count:
        chosen.extend(generator.sample(prompts, len(prompts)))
    return chosen[:count]


def _prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: is no JSON ({error})") from error
    prompt: Any = value
    if isinstance(value, dict):
        turns = value.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        prompt = first or value.get("prompt") or value.get("question")
    if not isinstance(prompt, str) or not prompt:
        raise PromptError(f"{where}: must have a text as turns, prompt or question")
    return prompt

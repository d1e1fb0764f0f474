"""Prompts: the shipped set, files in several forms, and an order that a seed decides."""

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.bench.prompts import PromptError, in_order, read_prompts


def test_the_shipped_prompts_are_many_and_different() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == len(set(prompts)) >= 30
    assert max(map(len, prompts)) > 4 * min(map(len, prompts))


def test_lines_may_have_turns_a_prompt_or_a_question(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["a", "b"]}, {"prompt": "c"}, {"question": "d"}]
    path.write_text("\n".join(["", *map(json.dumps, lines), json.dumps("e")]))
    assert read_prompts(path) == ["a", "c", "d", "e"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1: is no JSON"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2: must have a text as turns"),
        ('{"turns": []}', "line 1: must have a text"),
        ('{"turns": [3]}', "line 1: must have a text"),
        ("\n\n", "has no prompts"),
    ],
)
def test_a_file_without_prompts_is_refused_with_its_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=words):
        read_prompts(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="No such file"):
        read_prompts(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="bytes"):
        read_prompts(tmp_path / "bytes")


def test_every_prompt_comes_before_any_comes_again() -> None:
    prompts = [str(index) for index in range(7)]
    order = in_order(prompts, 17, seed=3)
    assert order == in_order(prompts, 17, seed=3) != in_order(prompts, 17, seed=4)
    assert sorted(order[:7]) == sorted(order[7:14]) == prompts
    assert max(Counter(order).values()) == 3

"""Templates, filters and files of prompts: what is filled, what is kept, what is refused."""

import random
from pathlib import Path

import pytest

from training.author import SHORT_KINDS
from training.documents import InputError, cut, passages, read_documents, read_prompts
from training.openers import Openers, TemplateError, read_openers
from training.text_filters import is_loop, is_prompt, whole_sentences


def test_every_template_can_be_filled_and_every_kind_has_some() -> None:
    openers = read_openers()
    rng = random.Random(1)
    given = {"document": "d", "passages": "p", "question": "q"}
    for kind, templates in openers.templates.items():
        for template in templates:
            assert "{" not in openers.fill(template, rng, given), f"{kind}: {template}"
    for values in openers.slots.values():
        for value in values:
            assert "{" not in openers.fill(value, rng)
    own = {"followups", "summaries", "questions", "asked"}
    assert own | set(SHORT_KINDS) - {"free"} == openers.templates.keys()
    assert all("{document}" in line for line in openers.templates["summaries"])
    assert all(
        "{passages}" in line and "{question}" in line for line in openers.templates["questions"]
    )


def test_a_slot_is_one_value_in_a_line_and_its_numbered_form_another() -> None:
    openers = Openers(templates={}, slots={"city": ("Ulm", "Bonn")})
    for seed in range(20):
        filled = openers.fill("{city} {city} {city2} {n:3-3}", random.Random(seed))
        assert filled in ("Ulm Ulm Bonn 3", "Bonn Bonn Ulm 3")


def test_an_open_template_loses_its_dots() -> None:
    openers = Openers(templates={"a": ("Tell me:\\nwhy ...",)}, slots={})
    opener = openers.draw("a", random.Random(0))
    assert (opener.text, opener.is_open) == ("Tell me:\nwhy", True)


def test_an_unknown_slot_is_named() -> None:
    with pytest.raises(TemplateError, match=r"slot \{town\}: must be a section"):
        Openers(templates={}, slots={}).fill("in {town}", random.Random(0))


def test_repetition_is_a_loop_and_prose_is_not() -> None:
    assert is_loop([1, 2, 3, 4, 5] * 20)
    assert not is_loop(list(range(100)))
    assert not is_loop([1, 2, 3] * 10)


def test_prompts_must_look_written() -> None:
    assert is_prompt("What is rain?")
    assert not is_prompt("What")
    assert not is_prompt("1234567 8901 23")
    assert not is_prompt("Hello there <|im_start|> you")
    assert whole_sentences("One. Two is cut") == "One."
    assert whole_sentences("One. A heading:") == "One."
    assert whole_sentences("nothing ends") == ""


def test_pieces_are_whole_sentences_of_about_the_asked_size() -> None:
    text = " ".join(f"Sentence number {number} stands here." for number in range(200))
    for seed in range(20):
        piece = cut(text, 500, random.Random(seed))
        assert 200 < len(piece) <= 500
        assert piece.startswith("Sentence") and piece.endswith(".")
    joined = passages([text, text, text], 900, random.Random(0))
    assert joined.count("Sentence") > 9 and len(joined) < 1000


def test_documents_and_prompts_are_read_from_files(tmp_path: Path) -> None:
    lines = tmp_path / "texts.txt"
    lines.write_text("one text\n\nanother\n", encoding="utf-8")
    assert read_documents(lines) == ["one text", "another"]
    objects = tmp_path / "texts.jsonl"
    objects.write_text('{"text": "one"}\n', encoding="utf-8")
    assert read_documents(objects) == ["one"]
    prompts = tmp_path / "prompts.jsonl"
    chat = '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}'
    prompts.write_text('{"prompt": "why?"}\n' + chat, encoding="utf-8")
    assert read_prompts(prompts) == [
        [{"role": "user", "content": "why?"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: must be an object"),
        ('{"text": 3}', "line 1: a message needs a role"),
        ('{"messages": []}', "line 1: messages must be a non-empty list"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "line 1: the last message must be the user's",
        ),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_prompts(path)


def test_a_document_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": " "}', encoding="utf-8")
    with pytest.raises(InputError, match="line 1: text must be a non-empty string"):
        read_documents(path)

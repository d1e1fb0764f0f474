"""Conversations are put together as the gateway would send them, and become rows."""

import random

import pytest

from outrider.serving.tokenizer import Vocabulary
from tests.engine.engine_support import default_model_path
from training.author import Author, Job, Phase, read_author

IM_END = 2
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def author() -> Author:
    return read_author(default_model_path(), row_length=640)


def ids(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.encode(text, parse_special=True, add_bos=False)


def text_of(author: Author, token_ids: list[int]) -> str:
    return author.vocabulary.decode(token_ids, skip_special=False)


def answer_job(author: Author, text: str, seed: int = 0) -> Job:
    (job,) = author.given_jobs([[{"role": "user", "content": text}]], random.Random(seed))
    return job


def test_jobs_of_every_kind_are_prompts_of_the_models_template(author: Author) -> None:
    jobs = author.short_jobs(300, random.Random(3))
    texts = [["The sky is blue. " * 90, "Trees grow. " * 90]] * 40
    jobs += author.long_jobs(texts, random.Random(4))
    assert {job.phase for job in jobs} == set(Phase)
    for job in jobs:
        text = text_of(author, job.prompt_ids)
        if job.phase == Phase.REPORT:
            assert "<|im_start|>" not in text
            continue
        assert text.startswith("<|im_start|>system\n"), text
        assert text.count("<|im_start|>user\n") == 1
        assert text.endswith(ASSISTANT) == (job.phase == Phase.ANSWER)
        if job.phase == Phase.ANSWER:
            assert job.answer_start == len(job.prompt_ids)
    greedy = [job.temperature == 0 for job in jobs if job.phase == Phase.ANSWER]
    assert 0.3 < sum(greedy) / len(greedy) < 0.7


def test_a_completed_turn_becomes_the_chat_that_a_client_would_send(author: Author) -> None:
    job = author._turn("trivia", (), "Where is", random.Random(0))
    assert text_of(author, job.prompt_ids).endswith("<|im_start|>user\nWhere is")
    added = [*ids(author.vocabulary, " the river Elbe?"), IM_END]
    digest = author.digest([(job, added, True)], random.Random(0))
    (answer,) = digest.jobs
    assert answer.prompt_ids == answer_job(author, "Where is the river Elbe?").prompt_ids


def test_a_turn_cut_off_by_its_limit_keeps_its_whole_sentences(author: Author) -> None:
    job = author._turn("math", (), "Ann has", random.Random(0))
    added = ids(author.vocabulary, " 5 pears. Then she bu")
    (answer,) = author.digest([(job, added, False)], random.Random(0)).jobs
    assert answer.messages[-1]["content"] == "Ann has 5 pears."


def test_a_question_is_asked_after_its_passages_and_put_where_the_template_has_it(
    author: Author,
) -> None:
    frame = ("Long passages.\n\n", "Question: ", "\n\nContext: Long passages.")
    job = author._turn("questions", (), "Who", random.Random(0), frame)
    asked = text_of(author, job.prompt_ids)
    assert asked.endswith("user\nLong passages.\n\nQuestion: Who")
    added = [*ids(author.vocabulary, " wrote them?\n\nPassage 3: more"), IM_END]
    (answer,) = author.digest([(job, added, True)], random.Random(0)).jobs
    wanted = "Question: Who wrote them?\n\nContext: Long passages."
    assert answer.messages[-1]["content"] == wanted


def test_an_answer_is_a_row_or_the_beginning_of_a_second_turn(author: Author) -> None:
    job = answer_job(author, "Where is the river Elbe?")
    added = [*ids(author.vocabulary, "It is in Germany."), IM_END]
    rows, second = [], []
    for seed in range(60):
        digest = author.digest([(job, added, True)], random.Random(seed))
        rows += digest.rows
        second += [new for new in digest.jobs if new.phase == Phase.ANSWER]
    assert rows and second and len(rows) > len(second)
    assert rows[0].tokens.tolist() == job.prompt_ids + added
    assert rows[0].answer_start == len(job.prompt_ids)
    for new in second:
        assert new.answer_start == len(job.prompt_ids)
        assert new.prompt_ids[: len(job.prompt_ids) + len(added)] == job.prompt_ids + added
        assert text_of(author, new.prompt_ids).endswith(ASSISTANT)


def test_answers_given_in_a_chat_are_not_taken_for_the_targets(author: Author) -> None:
    chat = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now?"},
    ]
    (job,) = author.given_jobs([chat], random.Random(0))
    assert job.answer_start == len(job.prompt_ids)


def test_empty_and_short_unfinished_answers_are_dropped_and_most_loops(author: Author) -> None:
    job = answer_job(author, "Where is the river Elbe?")
    words = ids(author.vocabulary, " one two")
    dropped = [(job, [IM_END], True), (job, words, False)]
    digest = author.digest(dropped, random.Random(0))
    assert not digest.rows and digest.counts["answers empty"] == 2
    loops = [(job, words * 50, False)] * 200
    digest = author.digest(loops, random.Random(0))
    assert digest.counts["answers looping"] == 200
    assert 20 < len(digest.rows) < 80


def test_about_one_prompt_in_fifty_is_held_out_whatever_its_answer(author: Author) -> None:
    held_out = []
    for number in range(400):
        job = answer_job(author, f"What is {number} plus one?", seed=number)
        found = {
            row.is_held_out
            for seed in range(3)
            for row in author.digest([(job, [*range(300, 340)], False)], random.Random(seed)).rows
        }
        assert len(found) == 1
        held_out.append(found.pop())
    assert 1 <= sum(held_out) <= 20

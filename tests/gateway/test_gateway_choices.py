"""Several answers to one request, over OpenAI's own package and plain HTTP."""

import json
from collections import defaultdict

import httpx
import pytest

from outrider.serving.choice_seed import choice_seed

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "seed": 41}


@pytest.fixture(autouse=True)
def patient_model(ready):
    """Whatever a test told the fake model is forgotten."""
    yield
    ready.model.cached_prompt_tokens = 0
    ready.model.step_seconds = 0.0


def alone(client, seed: int) -> str:
    answer = client.chat.completions.create(**{**CHAT, "seed": seed})
    return answer.choices[0].message.content


def test_each_choice_is_the_answer_to_its_own_seed(ready, client):
    answer = client.chat.completions.create(**CHAT, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    expected = [alone(client, choice_seed(41, choice)) for choice in range(3)]
    assert [choice.message.content for choice in answer.choices] == expected
    assert len(set(expected)) == 3
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.model_extra["seed"] == 41


def test_a_prompt_counts_once_and_every_answer_does(ready, client):
    one = client.chat.completions.create(**CHAT).usage
    ready.model.cached_prompt_tokens = 5
    three = client.chat.completions.create(**CHAT, n=3).usage
    assert three.prompt_tokens == one.prompt_tokens
    assert three.prompt_tokens_details.cached_tokens == 5
    assert three.completion_tokens == 27
    assert three.total_tokens == one.prompt_tokens + 27


def test_the_first_answer_goes_ahead_so_that_the_others_find_its_prompt(ready, client):
    before = len(ready.model.admitted)
    client.chat.completions.create(**CHAT, n=4)
    batches = [
        [sequence.sampling.seed for sequence in batch.sequences]
        for batch in ready.model.admitted[before:]
        if batch.sequences
    ]
    assert batches == [[41], [choice_seed(41, choice) for choice in (1, 2, 3)]]


def test_streamed_answers_come_side_by_side(ready, client):
    texts = defaultdict(str)
    reasons = {}
    order = []
    stream = client.chat.completions.create(
        **CHAT, n=3, stream=True, stream_options={"include_usage": True}
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            order.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [texts[index] for index in range(3)] == [
        alone(client, choice_seed(41, choice)) for choice in range(3)
    ]
    assert reasons == dict.fromkeys(range(3), "length")
    assert usage is not None and usage.completion_tokens == 27
    assert order[:3] == [0, 1, 2]  # each begins with its role
    # Not one answer behind the other.
    assert order.index(2, 3) < len(order) - 1 - order[::-1].index(1)


def test_texts_and_choices_are_numbered_prompt_by_prompt(ready, client):
    settings = {"model": MODEL, "max_tokens": 5, "seed": 7}
    answer = client.completions.create(**settings, prompt=["One", "Two"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [
        client.completions.create(**{**settings, "seed": choice_seed(7, choice)}, prompt=prompt)
        .choices[0]
        .text
        for prompt in ("One", "Two")
        for choice in (0, 1)
    ]
    assert [choice.text for choice in answer.choices] == expected
    lists = client.completions.create(**settings, prompt=[[1, 2, 3], [4, 5]])
    assert len(lists.choices) == 2 and lists.usage.prompt_tokens == 5
    assert lists.usage.completion_tokens == 10


def test_prompts_without_a_seed_share_the_one_that_is_told(ready, client):
    settings = {"model": MODEL, "max_tokens": 5}
    answer = client.completions.create(**settings, prompt=["Same", "Same"])
    first, second = (choice.text for choice in answer.choices)
    assert first == second
    again = client.completions.create(**settings, prompt="Same", seed=answer.model_extra["seed"])
    assert again.choices[0].text == first


def test_best_of_all_is_all(ready, client):
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=2, n=2, best_of=2)
    assert len(answer.choices) == 2


def test_a_client_that_leaves_ends_all_its_answers(ready):
    ready.model.step_seconds = 0.02
    before = len(ready.model.cancelled)
    body = {**CHAT, "n": 3, "stream": True, "max_tokens": 200, "ignore_eos": True}
    url = f"{ready.url}/v1/chat/completions"
    with httpx.Client(trust_env=False) as plain, plain.stream("POST", url, json=body) as response:
        indices = set()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                indices.add(event["choices"][0]["index"])
            if indices == {0, 1, 2}:
                break
    ready.until(lambda: len(ready.model.cancelled) >= before + 3)

"""OpenAI's own package, and plain HTTP, against a whole gateway with fake peers."""

import json

import openai
import pytest

MODEL = "smollm2-135m-instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}


@pytest.fixture(autouse=True)
def plain_model(request):
    """Whatever a test told the fake model is forgotten."""
    yield
    if "ready" in request.fixturenames:
        model = request.getfixturevalue("ready").model
        model.script = None
        model.eos_after = None
        model.step_seconds = 0.0
        model.is_stalled = False


def script(ready, text: str) -> None:
    """From now on the fake model says this, again and again."""
    ready.model.script = ready_ids(ready, text)


def ready_ids(ready, text: str) -> list[int]:
    vocabulary = ready.lifecycle.ready().text_model.vocabulary
    return vocabulary.encode(text, parse_special=False, add_bos=False)


def test_penalties_and_biases_reach_the_target(ready, client):
    client.chat.completions.create(
        **CHAT,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=-1.5,
        logit_bias={"7": -100, "3": 2.5},
        extra_body={"repetition_penalty": 1.25},
    )
    (sequence,) = ready.model.admitted[-1].sequences
    sampling = sequence.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.5)
    assert sampling.repetition_penalty == 1.25
    assert [(one.token_id, one.bias) for one in sampling.logit_bias] == [(3, 2.5), (7, -100.0)]


def test_prompt_tokens_that_were_cached_are_told_as_openai_does(ready, client):
    ready.model.cached_prompt_tokens = 16
    try:
        usage = client.chat.completions.create(**CHAT, seed=5).usage
        *_, last = client.chat.completions.create(
            **CHAT, seed=5, stream=True, stream_options={"include_usage": True}
        )
    finally:
        ready.model.cached_prompt_tokens = 0
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert last.usage.prompt_tokens_details.cached_tokens == 16
    usage = client.chat.completions.create(**CHAT, seed=5).usage
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_chat_completion_has_the_shape_that_the_openai_package_reads(client):
    completion = client.chat.completions.create(**CHAT, seed=5)
    choice = completion.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert completion.object == "chat.completion"
    assert completion.model == MODEL
    assert completion.system_fingerprint == "fp_0123456789ab"
    usage = completion.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    details = usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens <= 12
    assert details.rejected_prediction_tokens >= 0
    assert completion.model_extra["seed"] == 5


def test_a_streamed_chat_has_the_same_text_and_the_usage_at_its_end(client):
    whole = client.chat.completions.create(**CHAT, seed=5)
    chunks = list(
        client.chat.completions.create(
            **CHAT, seed=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_has_usage(client):
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_text_completions_stream_or_not(client):
    arguments = {"model": MODEL, "prompt": "Once upon", "max_tokens": 8, "seed": 1}
    whole = client.completions.create(**arguments)
    assert whole.object == "text_completion"
    assert whole.usage.completion_tokens == 8
    chunks = list(client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_text_completion_has_16_tokens_by_default(client):
    completion = client.completions.create(model=MODEL, prompt="x")
    assert completion.usage.completion_tokens == 16


def test_a_chat_goes_to_the_end_of_the_context_by_default(client):
    completion = client.chat.completions.create(model=MODEL, messages=CHAT["messages"])
    assert completion.usage.total_tokens == 512
    assert completion.choices[0].finish_reason == "length"


def test_prompts_may_be_a_list_of_one_text_or_token_ids(ready, client):
    ids = ready_ids(ready, "Once upon")
    answers = {
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, seed=1).choices[0].text
        for prompt in ("Once upon", ["Once upon"], ids, [ids])
    }
    assert len(answers) == 1


def test_text_parts_and_the_developer_role_are_read(client):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    completion = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert completion.usage.prompt_tokens > 5


def test_the_same_seed_gives_the_same_tokens_and_a_drawn_seed_is_reported(ready):
    def answer(**options):
        body = {**CHAT, "return_token_ids": True, **options}
        return ready.client.post("/v1/chat/completions", json=body).json()

    drawn = answer()
    assert 0 <= drawn["seed"] < 2**53
    again = answer(seed=drawn["seed"])
    assert again["choices"][0]["token_ids"] == drawn["choices"][0]["token_ids"]
    assert answer()["seed"] != drawn["seed"]
    assert answer(seed=2**64 - 1)["seed"] == 2**64 - 1


def test_token_ids_come_with_every_piece_when_asked_for(ready):
    body = {**CHAT, "seed": 3, "return_token_ids": True}
    whole = ready.client.post("/v1/chat/completions", json=body).json()
    pieces = stream_of(ready, {**body, "stream": True})
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    streamed = [one for delta in deltas for one in delta.get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == 12
    text = {"model": MODEL, "prompt": "x", "seed": 3, "return_token_ids": True, "max_tokens": 5}
    assert (
        len(ready.client.post("/v1/completions", json=text).json()["choices"][0]["token_ids"]) == 5
    )
    pieces = stream_of(ready, {**text, "stream": True}, "/v1/completions")
    assert sum(len(piece["choices"][0]["token_ids"]) for piece in pieces) == 5


def test_an_end_token_ends_the_text_with_stop(ready, client):
    script(ready, "fine")
    ready.model.eos_after = 6
    completion = client.chat.completions.create(**CHAT)
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].message.content == "fine" * 6
    assert completion.usage.completion_tokens == 7


def test_the_least_length_reaches_the_target(ready, client):
    client.chat.completions.create(**CHAT, extra_body={"min_tokens": 7})
    (sequence,) = ready.model.admitted[-1].sequences
    assert sequence.min_tokens == 7


def test_ignore_eos_goes_on(ready, client):
    script(ready, "fine")
    ready.model.eos_after = 3
    completion = client.chat.completions.create(**CHAT, extra_body={"ignore_eos": True})
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_cuts_the_text_and_cancels_at_the_target(ready, client, is_streamed):
    script(ready, " one two three four")
    cancelled = len(ready.model.cancelled)
    ready.model.step_seconds = 0.01
    arguments = {**CHAT, "max_tokens": 400, "stop": ["three", "never"]}
    if is_streamed:
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        completion = client.chat.completions.create(**arguments)
        text, reason = completion.choices[0].message.content, completion.choices[0].finish_reason
        usage = completion.usage
        assert usage.completion_tokens == 3
        assert usage.completion_tokens_details.accepted_prediction_tokens <= 3
    assert (text, reason) == (" one two ", "stop")
    ready.until(lambda: len(ready.model.cancelled) == cancelled + 1)


def test_stop_token_ids_end_with_stop(ready, client):
    script(ready, " one two three four")
    three = ready_ids(ready, " three")[0]
    completion = client.chat.completions.create(**CHAT, extra_body={"stop_token_ids": [three]})
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].message.content == " one two"


def test_a_request_can_switch_speculation_off_for_itself(ready, client):
    completion = client.chat.completions.create(
        **CHAT, extra_body={"speculation": {"draft_length": 0}}
    )
    assert ready.model.admitted[-1].sequences[0].speculation.draft_length == 0
    details = completion.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_sampling_parameters_reach_the_target_as_they_are(ready, client):
    client.chat.completions.create(
        **CHAT, temperature=0.3, top_p=0.5, seed=9, extra_body={"top_k": 7, "min_p": 0.01}
    )
    sampling = ready.model.admitted[-1].sequences[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.5, 7)
    assert (sampling.min_p, sampling.seed) == (0.01, 9)
    client.chat.completions.create(**CHAT)
    sampling = ready.model.admitted[-1].sequences[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_an_unknown_model_is_a_bad_request_that_names_both(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="gpt", messages=CHAT["messages"])
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"
    assert "gpt" in str(caught.value) and MODEL in str(caught.value)


def stream_of(ready, body: dict, path: str = "/v1/chat/completions") -> list[dict]:
    """The events of a stream, which must end with [DONE]."""
    lines = ready.client.post(path, json=body).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_pages_of_named_origins_alone_may_call_from_a_browser(cluster):
    cluster.start_gateway(cors_origins="https://a.example, http://localhost:3000")
    cluster.wait_ready()
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-any"}
    for origin, is_allowed in (("http://localhost:3000", True), ("https://b.example", False)):
        preflight = cluster.client.options(
            "/v1/chat/completions", headers={"origin": origin, **asked}
        )
        assert (preflight.status_code == 200) == is_allowed
        answer = cluster.client.get("/v1/models", headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers.get("access-control-allow-origin") == (origin if is_allowed else None)


def test_without_origins_no_page_may(ready):
    answer = ready.client.get("/v1/models", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers

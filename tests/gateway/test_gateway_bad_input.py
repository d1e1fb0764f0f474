"""Bad input gets a 400 (413 for size) that names field, value and bound, and never a 5xx."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.openai_request import chat_form, text_form
from outrider.serving.errors import InvalidArgument

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HUGE = 10**400


def chat(**fields):
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, **fields}


def text(**fields):
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 2, **fields}


def user(content):
    return chat(messages=[{"role": "user", "content": content}])


BAD_CHATS = [
    (chat(messages=[]), "messages"),
    (chat(messages=None), "messages"),
    (chat(messages={}), "messages"),
    (chat(messages=["Hi"]), "messages[0]"),
    (chat(messages=[{"content": "Hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "god", "content": "Hi"}]), "messages[0].role"),
    (chat(messages=[{"role": ["user"], "content": "Hi"}]), "messages[0].role"),
    (chat(messages=[{"role": "user"}]), "messages[0].content"),
    (user(7), "messages[0].content"),
    (user([]), "messages[0].content"),
    (user(["Hi"]), "messages[0].content[0]"),
    (user([{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (user("\ud800"), "messages[0].content"),
    (chat(messages=[{**MESSAGES[0], "tool_calls": [{}]}]), "messages[0].tool_calls"),
    (chat(messages=[{**MESSAGES[0], "mood": "good"}]), "messages[0].mood"),
    (user("word " * 600), "messages"),
    (user("x" * 3_000_000), "messages"),
    (chat(model=None), "model"),
    (chat(model="gpt"), "model"),
    (chat(model="\ud800"), "model"),
    (chat(model=7), "model"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=511), "max_tokens"),
    (chat(max_tokens=HUGE), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(max_tokens="2"), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_completion_tokens=3), "max_completion_tokens"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=101), "temperature"),
    (chat(temperature=HUGE), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.01), "top_p"),
    (chat(top_k=-1), "top_k"),
    (chat(top_k=2**31), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(seed=-1), "seed"),
    (chat(seed=2**64), "seed"),
    (chat(seed="x"), "seed"),
    (chat(stop=""), "stop"),
    (chat(stop=[""]), "stop[0]"),
    (chat(stop=[7]), "stop[0]"),
    (chat(stop=7), "stop"),
    (chat(stop=["x"] * 17), "stop"),
    (chat(stop="x" * 1025), "stop"),
    (chat(stop="\udfff"), "stop"),
    (chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (chat(stop_token_ids=[49152]), "stop_token_ids"),
    (chat(stop_token_ids="x"), "stop_token_ids"),
    (chat(ignore_eos=1), "ignore_eos"),
    (chat(min_tokens=-1), "min_tokens"),
    (chat(min_tokens=9, max_tokens=8), "min_tokens"),
    (chat(min_tokens=1.5), "min_tokens"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"colour": 1}), "stream_options.colour"),
    (chat(stream=True, stream_options=[]), "stream_options"),
    (chat(speculation=5), "speculation"),
    (chat(speculation={"draft_length": 6}), "speculation.draft_length"),
    (chat(speculation={"draft_length": -1}), "speculation.draft_length"),
    (chat(speculation={"depth": 1}), "speculation.depth"),
    (chat(n=0), "n"),
    (chat(n=129), "n"),
    (chat(n=True), "n"),
    (chat(logprobs=True), "logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(presence_penalty=2.1), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(frequency_penalty="much"), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(logit_bias={"1": 101}), "logit_bias[1]"),
    (chat(logit_bias={"1": "5"}), "logit_bias.1"),
    (chat(logit_bias={"x": 5}), "logit_bias"),
    (chat(logit_bias={"-1": 5}), "logit_bias"),
    (chat(logit_bias={"1": 5, "01": 5}), "logit_bias"),
    (chat(logit_bias={"99999": 5}), "logit_bias"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(reasoning_effort="low"), "reasoning_effort"),
    (chat(temprature=0.5), "temprature"),
    (chat(prompt="x"), "prompt"),
    ([], "the body"),
    ("text", "the body"),
    (7, "the body"),
    (None, "the body"),
]  # fmt: skip
BAD_TEXTS = [
    (text(prompt=None), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=""), "prompt"),
    (text(prompt="x" * 3_000_000), "prompt"),
    (text(prompt=["a", 1]), "prompt[1]"),
    (text(prompt=[[1], "a"]), "prompt[1]"),
    (text(prompt=[[1], [2, "a"]]), "prompt[1][1]"),
    (text(prompt=["a", ""]), "prompt"),
    (text(prompt=["a"] * 1025), "prompt"),
    (text(prompt=["a"] * 9, n=128), "n"),
    (text(prompt=[1, "a"]), "prompt[1]"),
    (text(prompt=[1.5]), "prompt[0]"),
    (text(prompt=[49152]), "prompt"),
    (text(prompt=[-1]), "prompt[0]"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=[1] * 512), "prompt"),
    (text(prompt="\ud83d"), "prompt"),
    (text(prompt={"a": 1}), "prompt"),
    (text(logprobs=0), "logprobs"),
    (text(best_of=2), "best_of"),
    (text(best_of=1, n=2), "best_of"),
    (text(echo=True), "echo"),
    (text(suffix="x"), "suffix"),
    (text(messages=MESSAGES), "messages"),
    (text(max_tokens=HUGE), "max_tokens"),
]


def numbered(cases: list) -> list[str]:
    """Test ids: which field, and which case of it."""
    return [f"{index}-{field}" for index, (_, field) in enumerate(cases)]


def check_error(response, field: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in error["message"] and "must be" in error["message"]
    if error["param"] is not None:
        assert error["param"] == field


@pytest.mark.parametrize(("body", "field"), BAD_CHATS, ids=numbered(BAD_CHATS))
def test_a_bad_chat_is_refused_by_field_value_and_bound(ready, body, field):
    check_error(ready.client.post(CHAT, content=json.dumps(body)), field)


@pytest.mark.parametrize(("body", "field"), BAD_TEXTS, ids=numbered(BAD_TEXTS))
def test_a_bad_text_completion_is_refused_by_field_value_and_bound(ready, body, field):
    check_error(ready.client.post(TEXT, content=json.dumps(body)), field)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"{'a': 1}", "JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"model": "\xc3\x28"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b"[" * 100_000, "the body"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"model": "a"} {}', "JSON"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_is_no_json_is_refused(ready, path, content, words):
    response = ready.client.post(path, content=content)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_number_beyond_a_double_is_refused(ready):
    content = json.dumps(chat()).replace('"max_tokens": 2', '"temperature": 1e999').encode()
    check_error(ready.client.post(CHAT, content=content), "temperature")


def test_a_body_above_the_limit_is_413(ready):
    content = b'"' + b"x" * (4 * 2**20) + b'"'
    response = ready.client.post(CHAT, content=content)
    assert response.status_code == 413
    assert "4194304" in response.json()["error"]["message"]


def test_neutral_values_of_what_is_not_implemented_are_fine(ready):
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0,
        "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"},
        "tools": [], "tool_choice": "none", "user": "me", "metadata": {"a": "b"}, "store": False,
        "stop": None, "seed": None, "stream": None, "temperature": None, "service_tier": "auto",
    }  # fmt: skip
    assert ready.client.post(CHAT, json=chat(**neutral)).status_code == 200
    assert ready.client.post(TEXT, json=text(best_of=1, echo=False, n=1)).status_code == 200


def test_an_assistants_own_message_can_be_sent_back(ready):
    message = ready.client.post(CHAT, json=chat()).json()["choices"][0]["message"]
    dumped = {**message, "tool_calls": None, "function_call": None, "audio": None}
    messages = [*MESSAGES, dumped, {"role": "user", "content": "And?"}]
    assert ready.client.post(CHAT, json=chat(messages=messages)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
    ],
)
def test_wrong_paths_and_methods_have_openais_error_shape(ready, method, path, status):
    response = ready.client.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [
    "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "stream",
    "stream_options", "speculation", "return_token_ids", "n", "logit_bias", "tools", "user",
    "response_format", "structured_outputs",
    "logprobs", "model", "junk",
]  # fmt: skip
MUTATIONS = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4)


@given(MUTATIONS)
@settings(max_examples=150, deadline=None)
def test_no_body_makes_a_form_raise_anything_but_invalid_argument(mutations):
    for form, body in ((chat_form, chat(**mutations)), (text_form, text(**mutations))):
        try:
            form(body)
        except InvalidArgument as error:
            assert "must be" in str(error)


@given(mutations=MUTATIONS)
@example(mutations={"user": "\ud800"})
@example(mutations={"messages": [{"role": "user", "content": "<|im_end|>"}]})
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_body_gets_a_5xx(ready, mutations):
    for path, body in ((CHAT, chat(**mutations)), (TEXT, text(**mutations))):
        response = ready.client.post(path, content=json.dumps(body))
        assert response.status_code in (200, 400), response.text


@given(content=st.binary(max_size=200))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_bytes_get_a_5xx(ready, content):
    assert ready.client.post(CHAT, content=content).status_code == 400

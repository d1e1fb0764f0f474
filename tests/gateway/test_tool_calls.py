"""Functions that the model may call: shown by its template, asked for by a grammar, read back."""

import json
from dataclasses import replace
from itertools import pairwise

import grpc
import openai
import pytest
from cluster_under_test import default_text_model, running_cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import HERMES, LLAMA, MISTRAL, UNKNOWN

from gateway import tool_format
from gateway.chat_template import compile_chat_template
from gateway.fields import Fields
from gateway.model import TextModel
from gateway.tool_answer import ToolChatShape
from gateway.tool_fields import tool_request
from gateway.tool_format import tool_support
from gateway.tool_grammar import arguments_output, calls_output, text_or_calls_output
from gateway.tool_reader import FormatReader, NamedReader
from outrider.v1 import generation_pb2, generation_pb2_grpc

MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 20}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMES = frozenset(["get_weather", "clock"])


def request(**fields):
    return tool_request(Fields({"tools": [WEATHER, CLOCK], **fields}))


def model_with(template: str) -> TextModel:
    text_model = default_text_model()
    vocabulary = replace(text_model.vocabulary, chat_template=template)
    compiled = compile_chat_template(vocabulary)
    return replace(
        text_model,
        vocabulary=vocabulary,
        chat_template=compiled,
        tool_support=tool_support(compiled, template),
    )


# What templates show.


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, tool_format.HERMES),
        (MISTRAL, tool_format.MISTRAL),
        (LLAMA, tool_format.LLAMA),
        (UNKNOWN, None),
    ],
)
def test_a_template_tells_how_its_model_calls(template, expected):
    support = model_with(template).tool_support
    assert support.shows_tools and support.shows_calls and support.format == expected


def test_the_default_models_template_shows_neither_tools_nor_calls():
    support = default_text_model().tool_support
    assert not support.shows_tools and not support.shows_calls and support.format is None


def test_the_result_of_a_call_is_named_for_the_template():
    template = model_with("{% for m in messages %}{{ m.role }}={{ m.name }};{% endfor %}")
    calls = [
        {"id": one, "type": "function", "function": {"name": name}}
        for one, name in (("a", "clock"), ("b", "get_weather"))
    ]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "b"},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_call_id": "a", "name": "given"},
        {"role": "tool", "content": "4", "tool_call_id": "unknown"},
    ]
    assert template.chat_template is not None
    assert template.chat_template.render(messages).text == (
        "assistant=;tool=get_weather;tool=clock;tool=given;tool=;"
    )


# What calls are read out of.


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


CITY = '{"name": "get_weather", "arguments": {"city": "Köln </tool_call>", "days": 2}}'
TIME = '{"name": "clock", "arguments": {}}'
COLOGNE = ("get_weather", {"city": "Köln </tool_call>", "days": 2})
ANSWERS = [
    (tool_format.HERMES, "Just text.", "Just text.", []),
    (tool_format.HERMES, "a < b <tool \n", "a < b <tool \n", []),
    (tool_format.HERMES, hermes(CITY), None, [COLOGNE]),
    (tool_format.HERMES, f"Let me see. \n{hermes(CITY, TIME)}\n", "Let me see.",
     [COLOGNE, ("clock", {})]),
    (tool_format.HERMES, hermes(CITY).removesuffix("\n</tool_call>"), None, [COLOGNE]),
    (tool_format.HERMES, hermes('{"name": "other", "arguments": {}}'),
     hermes('{"name": "other", "arguments": {}}'), []),
    (tool_format.HERMES, hermes('{"name": "clock"'), hermes('{"name": "clock"'), []),
    (tool_format.HERMES, hermes('{"name": "clock", "arguments": "{}"}'), None, [("clock", {})]),
    (tool_format.HERMES, f"{hermes(TIME)} and then", " and then", [("clock", {})]),
    (tool_format.MISTRAL, f"[TOOL_CALLS] [{CITY}, {TIME}]", None, [COLOGNE, ("clock", {})]),
    (tool_format.MISTRAL, "No [TOOL", "No [TOOL", []),
    (tool_format.LLAMA, '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": '
     '{"a": 1}}', None, [("clock", {}), ("clock", {"a": 1})]),
    (tool_format.LLAMA, ' {"name": "Anna"}', ' {"name": "Anna"}', []),
    (tool_format.LLAMA, "It is {late}.", "It is {late}.", []),
    (tool_format.PLAIN, TIME, None, [("clock", {})]),
    (tool_format.PLAIN, '{"name": "clo', '{"name": "clo', []),
]  # fmt: skip


def whole(reader, text: str) -> tuple[str | None, list[tuple[str, object]]]:
    message = ToolChatShape(reader).whole(text)["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    return message["content"] or None, calls


def streamed(reader, texts: list[str]) -> tuple[str | None, list[tuple[str, object]], str | None]:
    """Put together as OpenAI's clients do."""
    shape = ToolChatShape(reader)
    content = ""
    calls: dict[int, list[str]] = {}
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        delta = shape.piece(text, None, is_last=is_last)["delta"]
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if call.get("id"):
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    parsed = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return content or None, parsed, shape.finish_reason("stop")


@pytest.mark.parametrize(("given_format", "text", "content", "calls"), ANSWERS)
def test_calls_and_text_are_told_apart(given_format, text, content, calls):
    assert whole(FormatReader(given_format, NAMES), text) == (content, calls)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streamed_in_any_pieces_an_answer_is_the_same(data):
    given_format, text, content, calls = data.draw(st.sampled_from(ANSWERS))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    texts = [text[begin:end] for begin, end in pairwise(cuts)] + [""]
    reason = "tool_calls" if calls else "stop"
    assert streamed(FormatReader(given_format, NAMES), texts) == (content, calls, reason)


def test_the_arguments_of_a_named_function_come_as_they_are_written():
    assert whole(NamedReader("clock"), '{"a": 1}') == (None, [("clock", {"a": 1})])
    pieces = ['{"a"', ": 1", "}", ""]
    assert streamed(NamedReader("clock"), pieces) == (None, [("clock", {"a": 1})], "tool_calls")
    assert ToolChatShape(NamedReader("clock")).finish_reason("length") == "length"


def test_text_before_a_call_is_not_held_back_for_long():
    reader = FormatReader(tool_format.HERMES, NAMES)
    assert [part.text for part in reader.push("Hello there <")] == ["Hello there"]
    assert [part.text for part in reader.push("b>")] == [" <b>"]


# What the model is held to.


def allowed(output, text: str) -> bool:
    text_model = default_text_model()
    matcher = text_model.grammar_compiler.compile("tools", output).start()
    vocabulary = text_model.vocabulary
    token_ids = [
        *vocabulary.encode(text, parse_special=False, add_bos=False), vocabulary.eos_token_ids[0]
    ]  # fmt: skip
    return all(matcher.allowed(token_ids[:at])[one] for at, one in enumerate(token_ids))


BERLIN = '{"name": "get_weather", "arguments": {"city": "Berlin"}}'


@pytest.mark.parametrize(
    ("given_format", "right", "wrong"),
    [
        (
            tool_format.HERMES,
            [hermes(BERLIN), hermes(TIME), hermes(BERLIN, TIME)],
            [BERLIN, hermes("{}"), hermes('{"name": "clock", "arguments": {"a": 1}}'), ""],
        ),
        (
            tool_format.MISTRAL,
            [f"[TOOL_CALLS][{BERLIN}]", f"[TOOL_CALLS][{BERLIN},{TIME}]"],
            [f"[TOOL_CALLS]{TIME}", "[TOOL_CALLS][]"],
        ),
        (
            tool_format.LLAMA,
            [BERLIN.replace("arguments", "parameters")],
            [BERLIN, "Hello"],
        ),
        (
            tool_format.PLAIN,
            [BERLIN, TIME],
            ['{"name": "other", "arguments": {}}', '{"name": "get_weather", "arguments": {}}'],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_answer_that_must_call_can_be_nothing_else(given_format, right, wrong):
    special = default_text_model().vocabulary.special
    asked = request(tool_choice="required")
    output = calls_output(asked.tools, given_format, special, is_parallel=True).output
    for text in right:
        assert allowed(output, text), text
        assert whole(FormatReader(given_format, NAMES), text)[1], text
    for text in wrong:
        assert not allowed(output, text), text
    if given_format in (tool_format.HERMES, tool_format.MISTRAL):
        single = calls_output(asked.tools, given_format, special, is_parallel=False).output
        assert allowed(single, right[0]) and not allowed(single, right[-1])


@pytest.mark.parametrize(
    ("given_format", "right", "wrong"),
    [
        (
            tool_format.HERMES,
            ["Just <text>.", "", f"Look: {hermes(BERLIN)}", f"{hermes(TIME, BERLIN)} Done."],
            [hermes('{"name": "clock", "arguments": {"a": 1}}'), "a <tool_call>b"],
        ),
        (
            tool_format.MISTRAL,
            ["Just [text].", f"Look: [TOOL_CALLS][{TIME},{BERLIN}]"],
            ["[TOOL_CALLS]", f"[TOOL_CALLS][{TIME}] Done."],
        ),
        (
            tool_format.LLAMA,
            ["Just {text}.", BERLIN.replace("arguments", "parameters")],
            ['{"a": 1}', " {", BERLIN],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_model_that_decides_writes_text_or_calls_that_keep_to_their_functions(
    given_format, right, wrong
):
    special = default_text_model().vocabulary.special
    asked = request(parallel_tool_calls=False)
    output = text_or_calls_output(asked.tools, given_format, special, is_parallel=True).output
    for text in right:
        assert allowed(output, text), text
    for text in wrong:
        assert not allowed(output, text), text
    single = text_or_calls_output(asked.tools, given_format, special, is_parallel=False).output
    assert allowed(single, right[0])
    if given_format != tool_format.LLAMA:
        assert not allowed(single, right[-1])


def test_the_arguments_of_a_named_function_keep_to_its_parameters():
    asked = request(tool_choice={"type": "function", "function": {"name": "get_weather"}})
    (tool,) = asked.tools
    output = arguments_output(tool).output
    assert allowed(output, '{"city": "Berlin", "days": 3}')
    assert not allowed(output, '{"days": 3}')


# Through the gateway.


@pytest.fixture(scope="module")
def hermes_cluster(loop):
    with running_cluster(loop, model_with(HERMES)) as cluster:
        cluster.start_gateway()
        cluster.wait_ready()
        yield cluster


def chat(**fields):
    messages = [{"role": "user", "content": "How warm is it in Berlin?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 60, **fields}


def says(cluster, text: str) -> None:
    """The fake model's next answers."""
    vocabulary = default_text_model().vocabulary
    cluster.model.script = vocabulary.encode(text, parse_special=False, add_bos=False)
    cluster.model.eos_after = len(cluster.model.script)
    cluster.model.eos_token_id = vocabulary.eos_token_ids[0]


def prompt_of(cluster) -> str:
    (admitted,) = cluster.model.admitted[-1].sequences
    token_ids = memoryview(admitted.prompt_token_ids).cast("i").tolist()
    return default_text_model().vocabulary.decode(token_ids, skip_special=False)


def test_openais_client_gets_the_calls_that_a_model_makes(hermes_cluster):
    says(hermes_cluster, f"I will look. {hermes(BERLIN, TIME)}")
    with openai.OpenAI(
        base_url=f"{hermes_cluster.url}/v1", api_key="none", max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:  # fmt: skip
        fields = chat(tools=[WEATHER, CLOCK])
        (choice,) = client.chat.completions.create(**fields).choices
        assert '"get_weather"' in prompt_of(hermes_cluster)
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I will look."
        first, second = choice.message.tool_calls
        assert (first.function.name, second.function.name) == ("get_weather", "clock")
        assert json.loads(first.function.arguments) == {"city": "Berlin"}
        assert first.id != second.id
        with client.chat.completions.stream(**fields) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in events
        assert [call.function.name for call in final.message.tool_calls] == [
            "get_weather",
            "clock",
        ]
        assert final.finish_reason == "tool_calls"
        # The conversation goes on with the result.
        says(hermes_cluster, "It is warm.")
        messages = [
            *fields["messages"],
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": first.id, "content": "31 degrees"},
        ]
        answer = client.chat.completions.create(**{**fields, "messages": messages}).choices[0]
        assert answer.message.content == "It is warm." and not answer.message.tool_calls
        prompt = prompt_of(hermes_cluster)
        assert "31 degrees" in prompt and '"city": "Berlin"' in prompt


def test_a_call_that_is_required_is_asked_for_by_a_grammar(hermes_cluster):
    says(hermes_cluster, hermes(TIME))
    body = chat(tools=[WEATHER, CLOCK], tool_choice="required")
    response = hermes_cluster.client.post(CHAT, json=body)
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    (admitted,) = hermes_cluster.model.admitted[-1].sequences
    assert "get_weather" in admitted.structured_output.grammar


def test_a_model_that_decides_is_held_to_a_strict_functions_parameters(hermes_cluster):
    says(hermes_cluster, "It is warm.")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for fields, is_held in (
        ({"tools": [WEATHER, CLOCK]}, False),
        ({"tools": [strict, CLOCK]}, True),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, True),
    ):
        (choice,) = hermes_cluster.client.post(CHAT, json=chat(**fields)).json()["choices"]
        assert choice["message"]["content"] == "It is warm." and choice["finish_reason"] == "stop"
        (admitted,) = hermes_cluster.model.admitted[-1].sequences
        assert admitted.HasField("structured_output") == is_held


def test_without_a_call_wanted_the_model_is_not_shown_the_tools(hermes_cluster):
    says(hermes_cluster, hermes(TIME))
    body = chat(tools=[WEATHER, CLOCK], tool_choice="none")
    message = hermes_cluster.client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["content"] == hermes(TIME) and "tool_calls" not in message
    assert "get_weather" not in prompt_of(hermes_cluster)


def test_a_model_that_is_not_shown_tools_can_be_made_to_call_but_not_left_to_decide(ready):
    error = ready.client.post(CHAT, json=chat(tools=[CLOCK])).json()["error"]
    assert error["param"] == "tool_choice" and "chat template" in error["message"]
    says(ready, '{"city": "Berlin"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = chat(tools=[WEATHER, CLOCK], tool_choice=named)
    (choice,) = ready.client.post(CHAT, json=body).json()["choices"]
    function = choice["message"]["tool_calls"][0]["function"]
    assert function == {"name": "get_weather", "arguments": '{"city": "Berlin"}'}
    assert choice["finish_reason"] == "tool_calls"
    (admitted,) = ready.model.admitted[-1].sequences
    assert '"$defs"' in admitted.structured_output.json_schema
    says(ready, TIME)
    body = chat(tools=[WEATHER, CLOCK], tool_choice="required")
    (choice,) = ready.client.post(CHAT, json=body).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"


def test_calls_that_the_template_leaves_out_are_refused(ready):
    function = {"name": "clock", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
    ]  # fmt: skip
    response = ready.client.post(CHAT, json=chat(messages=messages))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls"


def test_over_grpc_functions_are_typed_and_mean_the_same(hermes_cluster):
    says(hermes_cluster, f"I will look. {hermes(BERLIN, TIME)}")
    function = WEATHER["function"]
    weather = generation_pb2.Tool(
        name="get_weather",
        description=function["description"],
        parameters=json.dumps(function["parameters"]),
    )
    clock = generation_pb2.Tool(name="clock")
    call = generation_pb2.ToolCall(id="a", name="clock", arguments="{}")
    messages = [
        generation_pb2.ChatMessage(role="user", content="When?"),
        generation_pb2.ChatMessage(role="assistant", tool_calls=[call]),
        generation_pb2.ChatMessage(role="tool", content="12:00", tool_call_id="a"),
    ]
    chat = generation_pb2.ChatMessages(messages=messages, tools=[weather, clock])
    with grpc.insecure_channel(f"127.0.0.1:{hermes_cluster.grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def ask(chat):
            request = generation_pb2.GenerateRequest(chat=chat, max_tokens=60)
            responses = list(stub.Generate(request, timeout=20))
            calls = [one for response in responses for one in response.tool_calls]
            return "".join(response.text for response in responses), calls

        text, (first, second) = ask(chat)
        assert text == "I will look."
        assert (first.index, first.name, second.index, second.name) == (
            0, "get_weather", 1, "clock",
        )  # fmt: skip
        assert json.loads(first.arguments) == {"city": "Berlin"} and first.id != second.id
        prompt = prompt_of(hermes_cluster)
        assert '"name": "clock", "arguments": {}' in prompt and '"maxLength": 20' in prompt

        assert not hermes_cluster.model.admitted[-1].sequences[0].HasField("structured_output")
        chat.tools[1].strict = True
        assert ask(chat)[0] == "I will look."
        assert hermes_cluster.model.admitted[-1].sequences[0].HasField("structured_output")

        says(hermes_cluster, '{"city": "Berlin"}')
        chat.tool_choice.function = "get_weather"
        text, pieces = ask(chat)
        assert text == "" and pieces[0].name == "get_weather"
        assert "".join(piece.arguments for piece in pieces) == '{"city": "Berlin"}'

        for change, words in (
            (generation_pb2.ToolChoice(function="nothing"), "tool_choice.function.name"),
            (generation_pb2.ToolChoice(required=False), "tool_choice.required"),
        ):
            chat.tool_choice.CopyFrom(change)
            with pytest.raises(grpc.RpcError, match=words) as error_info:
                ask(chat)
            assert error_info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        chat.ClearField("tool_choice")
        chat.tools[0].parameters = "{"
        with pytest.raises(grpc.RpcError, match="parameters"):
            ask(chat)


BAD = [
    ({"tools": {}}, "tools"),
    ({"tools": [CLOCK] * 129}, "tools"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "mood": 1}}]},
     "tools[0].function.mood"),
    ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "b"}}},
     "tool_choice.function.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}},
     "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "frob"}}}],
      "tool_choice": "required"}, "tools"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"type": "x"}]}]},
     "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
     "messages[0].tool_calls[0].function.name"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), BAD, ids=[field for _, field in BAD])
def test_what_cannot_be_is_refused_by_field(ready, fields, field):
    response = ready.client.post(CHAT, json=chat(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field and "must be" in error["message"]

"""Structured output compiled for a vocabulary, and the automaton that follows an output."""

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jsonschema
import numpy as np
import pytest
from tokenizer_corpus import byte_level_tokenizer, save, sentencepiece_like_tokenizer

from outrider.serving.errors import InvalidArgument
from outrider.serving.grammar_compiler import (
    KEPT_GRAMMARS,
    GrammarCompiler,
    GrammarRefused,
    make_grammar_compiler,
)  # fmt: skip
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from outrider.serving.structured_output import (
    JSON_OBJECT,
    MAX_CHARACTERS,
    StructuredOutput,
    choice,
    grammar,
    json_schema,
    regex,
    structured_output_from,
)  # fmt: skip
from outrider.serving.tokenizer import Vocabulary, load_tokenizer
from outrider.v1 import structured_output_pb2
from tests import toy_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_tokenizer(resolve_model(DEFAULT_MODEL).path)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return make_grammar_compiler(vocabulary)


def accepts(vocabulary: Vocabulary, compiler: GrammarCompiler, wanted: StructuredOutput, text: str):
    """Whether the whole text, in the tokens that a model would write, may be said."""
    matcher = compiler.compile("s", wanted).start()
    token_ids = [
        *vocabulary.encode(text, parse_special=False, add_bos=False),
        vocabulary.eos_token_ids[0],
    ]
    return all(
        matcher.allowed(token_ids[:index])[token_id] for index, token_id in enumerate(token_ids)
    )


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (
            json_schema("s", PERSON),
            ['{"name": "Al", "age": 3, "tags": ["x"]}', '{"name":"","age":-1,"tags":[]}'],
            ['{"age": 3}', '{"name": "Al"}', '{"name": "Al", "age": 3.5, "tags": []}', "null"],
        ),
        (JSON_OBJECT, ["{}", '{"a": [1, {"b": null}]}'], ["[]", '"a"', "{", "{} "]),
        (
            regex("s", r"\d{4}-[a-c]+"),
            ["2024-abc", "0000-a"],
            ["204-abc", "2024-", "2024-abd", " 2024-a"],
        ),
        (regex("s", "^(yes|no)$"), ["yes", "no"], ["", "maybe", "yess"]),
        (choice("s", ["a", "a.b", "ä😀\n"]), ["a", "a.b", "ä😀\n"], ["axb", "a.", "A", ""]),
        (grammar("s", 'start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", "xx", "()"]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_texts_are_allowed_as_they_satisfy_what_is_wanted(
    vocabulary: Vocabulary,
    compiler: GrammarCompiler,
    wanted: StructuredOutput,
    right: list[str],
    wrong: list[str],
) -> None:
    for text in right:
        assert accepts(vocabulary, compiler, wanted, text), text
    for text in wrong:
        assert not accepts(vocabulary, compiler, wanted, text), text


def test_white_space_between_the_parts_of_json_is_bounded(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    for space in ("", " ", "\n", "\n    "):
        text = f'{{{space}"a":{space}1{space}}}'
        assert accepts(vocabulary, compiler, JSON_OBJECT, text), text
    matcher = compiler.compile("s", JSON_OBJECT).start()
    newline, opening = (
        vocabulary.encode(text, parse_special=False, add_bos=False)[0] for text in ("\n", "{")
    )
    assert matcher.allowed([opening])[newline]
    assert not matcher.allowed([opening, newline])[newline]


def test_special_tokens_are_never_text(vocabulary: Vocabulary, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("s", regex("s", "(?s:.*)")).start()
    allowed = matcher.allowed([])
    # "Anything" may end at once, but holds no special token besides the end.
    special = {int(token_id) for token_id in np.flatnonzero(allowed)} & vocabulary.special_token_ids
    assert special == set(vocabulary.eos_token_ids)


def test_what_is_allowed_depends_on_the_output_alone_not_on_the_way_there(
    compiler: GrammarCompiler,
) -> None:
    """Back and forth as drafts are tried and given up, with an automaton of its own as oracle."""
    chance = random.Random(3)
    for wanted in (json_schema("s", PERSON), regex("s", "(ab|[12]{2}-)+c?"),
                   grammar("s", 'start: e\ne: e "+" e | /[0-9]+/ | "(" e ")"')):  # fmt: skip
        given = compiler.compile("s", wanted)
        for _ in range(4):
            matcher = given.start()
            output: list[int] = []
            for _ in range(25):
                allowed = matcher.allowed(output)
                assert np.array_equal(allowed, given.start().allowed(output))
                legal = np.flatnonzero(allowed)
                token_id = int(chance.choice(legal))
                aside = [*output, int(chance.choice(legal))]
                for _ in range(chance.randrange(3)):
                    forced = list(matcher.forced(aside))
                    aside.append(int(chance.choice(np.flatnonzero(matcher.allowed(aside)))))
                    # What is forced is all that is allowed.
                    assert not forced or forced[0] == aside[-1]
                if token_id == 2:
                    break
                output.append(token_id)
            assert matcher.failure is None


@pytest.mark.parametrize(
    "build",
    [byte_level_tokenizer, *(partial(sentencepiece_like_tokenizer, space)
                             for space in ("prepend", "first", "never"))],
    ids=["byte level", "prepend", "first", "never"],
)  # fmt: skip
def test_what_a_client_reads_satisfies_the_schema_with_every_kind_of_tokenizer(
    build, tmp_path
) -> None:
    """Walks at random; the text is that of an output that follows a prompt."""
    vocabulary = load_tokenizer(save(tmp_path, build(), bos_token="<s>", eos_token="</s>"))
    schema = {
        "type": "object",
        "properties": {
            "naïve 😀": {"type": "string", "maxLength": 4},
            "b": {"enum": ["Grüße aus Köln", "x", 12]},
        },
        "required": ["naïve 😀", "b"],
        "additionalProperties": False,
    }
    given = make_grammar_compiler(vocabulary).compile("s", json_schema("s", schema))
    chance = random.Random(2)
    for _ in range(12):
        matcher = given.start()
        output: list[int] = []
        while not output or output[-1] not in vocabulary.eos_token_ids:
            legal = np.flatnonzero(matcher.allowed(output))
            assert matcher.failure is None and len(output) < 300
            output.append(int(chance.choice(legal)))
        text = vocabulary.decode(output, skip_special=True, continues_text=True)
        jsonschema.validate(json.loads(text), schema)


def test_behind_an_end_token_there_is_only_another(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    (end,) = vocabulary.eos_token_ids
    matcher = compiler.compile("s", choice("s", ["a"])).start()
    (a,) = vocabulary.encode("a", parse_special=False, add_bos=False)
    for output in ([a], [a, end], [a, end, end, a], [end], [a]):
        assert np.flatnonzero(matcher.allowed(output)).tolist() == [end], output
    assert np.flatnonzero(matcher.allowed([])).tolist() == [a]
    assert matcher.failure is None


def test_an_output_that_breaks_the_grammar_is_a_failure_with_a_reason(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiler.compile("s", JSON_OBJECT).start()
    assert matcher.allowed([5, 6]).sum() == 1
    assert matcher.failure is not None and "\n" not in matcher.failure


def test_ids_without_a_token_are_never_allowed(tmp_path) -> None:
    compiler = make_grammar_compiler(toy_vocabulary.toy_vocabulary(tmp_path))
    allowed = compiler.compile("s", regex("s", "(?s:.)*")).start().allowed([])
    assert len(allowed) == toy_vocabulary.VOCAB_SIZE
    assert not allowed[toy_vocabulary.VOCAB_SIZE - 1]
    assert allowed[toy_vocabulary.EOS_TOKEN_ID] and allowed[0]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (json_schema("s", {"type": "nosuch"}), "nosuch"),
        (json_schema("s", {"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_schema("s", {"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (json_schema("s", {"$ref": "#/$defs/none"}), "none"),
        (json_schema("s", {"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
        (regex("s", "(a"), "unclosed|regex"),
        (regex("s", "(?=a)b"), "regex|look"),
        (grammar("s", "start: foo"), "foo"),
        (grammar("s", "no grammar"), "Expected"),
        (grammar("s", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (json_schema("s", {"type": "object", "properties": {
            f"p{index}": {"type": "string"} for index in range(1500)}}), "costly"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    compiler: GrammarCompiler, wanted: StructuredOutput, words: str
) -> None:
    with pytest.raises(GrammarRefused, match=words) as error_info:
        compiler.compile("response_format.json_schema", wanted)
    assert str(error_info.value).startswith("response_format.json_schema is ")
    assert len(str(error_info.value)) < 500


@pytest.mark.parametrize("kind", ["rules", "terminals", "references"])
def test_the_deepest_recursion_that_fits_the_bounds_is_survived(
    compiler: GrammarCompiler, kind: str
) -> None:
    if kind == "references":
        names = [f"{index:x}" for index in range(2250)]
        links = {
            name: {"$ref": f"#/$defs/{behind}"}
            for name, behind in zip(names, [*names[1:], "end"], strict=True)
        }
        wanted = json_schema(
            "s", {"$ref": "#/$defs/0", "$defs": {**links, "end": {"type": "integer"}}}
        )
        assert len(wanted.text) > MAX_CHARACTERS * 0.9
    else:
        # Upper case makes a terminal, lower case a rule.
        names = [f"R{index:X}" if kind == "terminals" else f"r{index:x}" for index in range(6000)]
        chain = [f"{name}:{behind}" for name, behind in pairwise(names)]
        text = "\n".join([*chain, f'{names[-1]}:"b"', f"start:{names[0]}"])
        wanted = grammar("s", text)
        assert len(text) > MAX_CHARACTERS * 0.9
    given = asyncio.run(compiler.compiled("s", wanted))
    # Used and dropped on a thread with a usual stack.
    with ThreadPoolExecutor(1) as usual:
        assert usual.submit(lambda: given.start().allowed([]).any()).result(60)


def test_no_step_of_a_costly_grammar_takes_long(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    """Exponential automata and ambiguity come to their bounds, and the automaton says so."""
    chance = random.Random(1)
    letters = "".join(chance.choice("abcdxyz ") for _ in range(600))
    for wanted, text in (
        (regex("s", "(.*a.{30}b.{30}c)|(.*b.{28}c.{20}d)|(.*x.{12}y.{40}z)"), letters),
        (regex("s", "[ab]*a[ab]{18}"), letters.translate(str.maketrans("cdxyz ", "ababab"))),
        (grammar("s", 'start: e\ne: e e | "a" |'), "a" * 600),
    ):
        matcher = compiler.compile("s", wanted).start()
        output: list[int] = []
        longest = 0.0
        for token_id in vocabulary.encode(text, parse_special=False, add_bos=False):
            started = time.perf_counter()
            allowed = matcher.allowed(output)
            longest = max(longest, time.perf_counter() - started)
            if matcher.failure is not None:
                break
            output.append(token_id if allowed[token_id] else int(allowed.argmax()))
        assert longest < 1.0, (wanted, longest)  # 0.02 s where nothing else runs


def test_compiled_grammars_are_kept_and_the_oldest_go(vocabulary: Vocabulary, tmp_path) -> None:
    compiler = make_grammar_compiler(toy_vocabulary.toy_vocabulary(tmp_path))
    first = compiler.compile("s", regex("s", "a"))
    assert compiler.compile("s", regex("s", "a")) is first
    for index in range(KEPT_GRAMMARS):
        compiler.compile("s", regex("s", f"a{{{index}}}b"))
    assert compiler.kept(regex("s", "a")) is None


@pytest.mark.parametrize(
    "wanted", [json_schema("s", PERSON), JSON_OBJECT, regex("s", "a|b"), choice("s", ["x", "y"]),
               grammar("s", 'start: "a"')],
)  # fmt: skip
def test_a_message_carries_what_is_wanted(wanted: StructuredOutput) -> None:
    data = wanted.to_message().SerializeToString()
    message = structured_output_pb2.StructuredOutput.FromString(data)
    assert structured_output_from("s", message) == wanted


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "s is None"),
        ({"json_object": False}, "s is None"),
        ({"regex": ""}, "s.regex"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "s.regex.*at most"),
        ({"grammar": ""}, "s.grammar"),
        ({"json_schema": "{"}, "s.json_schema.*JSON"),
        ({"json_schema": "[]"}, "s.json_schema.*object"),
        ({"json_schema": "[" * 60_000}, "s.json_schema.*JSON"),
        ({"json_schema": json.dumps({"a": "b" * MAX_CHARACTERS})}, "at most"),
        ({"choice": {"texts": []}}, "s.choice"),
        ({"choice": {"texts": ["a", ""]}}, r"s.choice\[1\]"),
        ({"choice": {"texts": ["a"] * 1025}}, "1 to 1024"),
    ],
)
def test_a_message_that_wants_nothing_possible_is_refused_by_field(
    fields: dict[str, object], words: str
) -> None:
    message = structured_output_pb2.StructuredOutput(**fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=words):
        structured_output_from("s", message)


@pytest.mark.parametrize("text", ["z", "ab7", "aaaz"])
def test_a_text_that_the_vocabulary_cannot_write_is_a_failure_not_an_empty_mask(
    tmp_path, text: str
) -> None:
    compiler = make_grammar_compiler(toy_vocabulary.toy_vocabulary(tmp_path))
    try:
        matcher = compiler.compile("s", choice("s", [text])).start()
    except GrammarRefused:
        return
    output: list[int] = []
    while matcher.failure is None:
        allowed = matcher.allowed(output)
        assert allowed.any() and len(output) < len(text)
        output.append(int(allowed.argmax()))


def test_a_model_that_never_ends_has_no_grammars(vocabulary: Vocabulary) -> None:
    compiler = make_grammar_compiler(replace(vocabulary, eos_token_ids=()))
    with pytest.raises(GrammarRefused, match="no end-of-sequence token"):
        compiler.compile("s", JSON_OBJECT)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="surrogates"):
        json_schema("s", {"title": "\ud800"})

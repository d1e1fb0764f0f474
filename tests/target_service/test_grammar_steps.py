"""Grammars in the step loop: whatever is drafted, tokens are those of one after another."""

import json
import random
from collections.abc import Callable, Sequence

import pytest
from fake_drafts import Propose
from fake_engine import VOCAB_SIZE, oracle
from test_step_loop import Harness, no_draft

from outrider.engine.logit_rules import LogitRules
from outrider.engine.sampling import Sampling
from outrider.serving.grammar_compiler import GrammarCompiler, make_grammar_compiler
from outrider.serving.structured_output import (
    StructuredOutput,
    choice,
    grammar,
    json_schema,
    regex,
)  # fmt: skip
from outrider.serving.tokenizer import Vocabulary
from outrider.v1 import generation_pb2, target_pb2
from target_service.sequence import Sequence as TokenSequence
from tests import toy_vocabulary
from tests.toy_vocabulary import EOS_TOKEN_ID

STOPS = frozenset([EOS_TOKEN_ID])
ARRAY = json_schema(
    "s", {"type": "array", "items": {"enum": ["a", "ab", 12, -1]}, "minItems": 2, "maxItems": 6}
)
OBJECT = json_schema(
    "s",
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
OUTPUTS: tuple[StructuredOutput, ...] = (
    ARRAY,
    OBJECT,
    regex("r", "(ab|[12]{2}-)+c?"),
    choice("c", ["a", "ab", "abc", "12"]),
    grammar("g", 'start: e\ne: e "-" e | /[12]+/ | "[" e "]"'),
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    assert toy_vocabulary.VOCAB_SIZE == VOCAB_SIZE
    return toy_vocabulary.toy_vocabulary(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return make_grammar_compiler(vocabulary)


def right(sequence: TokenSequence, draft_length: int) -> list[int]:
    request = sequence.request
    emitted = sequence.committed_length - len(request.prompt_token_ids)
    output = oracle(
        request.prompt_token_ids,
        request.sampling,
        emitted + draft_length,
        rules=request.rules,
        grammar=request.grammar,
    )
    return output[emitted:]


def perfect(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    return right(sequence, draft_length)


def mixed(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    return [
        token if random.random() < 0.8 else random.randrange(VOCAB_SIZE)
        for token in right(sequence, random.randrange(draft_length + 1))
    ]


def illegal(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    """Right up to a token that the grammar forbids, or only such tokens."""
    if sequence.request.grammar is None:
        return [random.randrange(VOCAB_SIZE) for _ in range(draft_length)]
    output = sequence.token_ids[len(sequence.request.prompt_token_ids) :]
    draft: list[int] = []
    for token in right(sequence, random.randrange(draft_length)):
        draft.append(token)
    allowed = sequence.request.grammar.start().allowed([*output, *draft])
    forbidden = [token for token in range(VOCAB_SIZE) if not allowed[token]]
    return [*draft, random.choice(forbidden), 0, 1][:draft_length]


def end_tokens(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    """The end of the sequence, again and again, behind what is right."""
    length = random.randrange(draft_length)
    return [*right(sequence, length), *[EOS_TOKEN_ID] * (draft_length - length)]


PROPOSALS: dict[str, Propose] = {
    "no": no_draft,
    "perfect": perfect,
    "mixed": mixed,
    "illegal": illegal,
    "end": end_tokens,
}


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["enough blocks", "preemption"])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("name", PROPOSALS)
def test_tokens_are_the_oracles_whatever_is_drafted(
    compiler: GrammarCompiler, vocabulary: Vocabulary, name: str, num_blocks: int, runs_ahead: bool
) -> None:
    """Beside requests without a grammar, and under penalties; temperature 0 and 1."""
    random.seed(5)
    harness = Harness(PROPOSALS[name], num_blocks=num_blocks, runs_ahead=runs_ahead)
    expected = {}
    for sequence_id in range(30):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(8, 24))]
        sampling = Sampling(
            temperature=random.choice([0.0, 1.0]), top_k=random.choice([0, 5]), seed=sequence_id
        )
        wanted = random.choice([None, *OUTPUTS])
        given = None if wanted is None else compiler.compile("s", wanted)
        rules = random.choice([None, LogitRules(presence_penalty=1.0)])
        max_tokens = random.randrange(1, 36)
        whole = oracle(prompt, sampling, max_tokens, STOPS, rules=rules, grammar=given)
        resumed = whole[: random.choice([0, 0, len(whole) // 2])]
        expected[sequence_id] = whole[len(resumed) :]
        harness.admit(
            sequence_id, prompt, max_tokens, sampling, STOPS,
            resumed=resumed, rules=rules, grammar=given,
        )  # fmt: skip
        for _ in range(random.randrange(3)):
            if harness.scheduler.has_work:
                harness.loop.step()
    harness.run()
    assert {key: harness.sink.tokens(key) for key in expected} == expected
    assert not harness.sink.rejected
    assert (harness.scheduler.preemptions > 0) == (num_blocks == 9)
    if name in ("perfect", "mixed"):
        assert harness.statistics.accepted_tokens > 30


def test_what_the_grammar_forces_is_drafted_where_drafts_may_be(compiler: GrammarCompiler) -> None:
    """By the target itself: the draft service has nothing to say here, or is wrong."""
    given = compiler.compile("s", choice("c", ["[12-12-12-ab]", "[12-12-12-c]"]))
    sampling = Sampling(temperature=1.0, seed=4)
    whole = oracle([1], sampling, 30, STOPS, grammar=given)

    def run(propose: Propose, **options: object) -> Harness:
        harness = Harness(propose)
        harness.admit(1, [1], 30, sampling, STOPS, grammar=given, **options)  # type: ignore[arg-type]
        harness.run()
        assert harness.sink.tokens(1) == whole
        return harness

    for propose in (no_draft, lambda sequence, length: [0] * length):
        harness = run(propose)
        assert harness.statistics.accepted_tokens > len(whole) // 2
        assert len(harness.sink.outcomes[1]) < len(whole) // 2
    assert run(no_draft, override=0).statistics.drafts == 0
    harness = Harness(no_draft)
    harness.set_policy(rules=((9, 0),))
    harness.admit(1, [1], 30, sampling, STOPS, grammar=given)
    harness.run()
    assert harness.sink.tokens(1) == whole and harness.statistics.drafts == 0


def test_an_output_that_ends_by_itself_satisfies_its_grammar(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    harness = Harness(mixed)
    for sequence_id in range(20):
        for number, wanted in enumerate((ARRAY, OBJECT)):
            harness.admit(
                2 * sequence_id + number, [sequence_id], 120,
                Sampling(temperature=1.0, seed=sequence_id), STOPS,
                grammar=compiler.compile("s", wanted),
            )  # fmt: skip
    harness.run()
    num_complete = 0
    for sequence_id, outcomes in harness.sink.outcomes.items():
        if outcomes[-1].finish_reason != generation_pb2.FINISH_REASON_STOP:
            continue
        num_complete += 1
        text = vocabulary.decode(harness.sink.tokens(sequence_id), skip_special=True)
        value = json.loads(text)
        if sequence_id % 2:
            assert set(value) == {"a", "b"} and isinstance(value["b"], int), text
        else:
            assert 2 <= len(value) <= 6 and set(value) <= {"a", "ab", 12, -1}, text
    assert num_complete > 20


def test_the_grammars_that_are_complete_leave_only_the_end(compiler: GrammarCompiler) -> None:
    given = compiler.compile("c", choice("c", ["12"]))
    harness = Harness(end_tokens)
    harness.admit(1, [3], 30, Sampling(temperature=1.0, seed=1), STOPS, grammar=given)
    harness.run()
    assert harness.sink.tokens(1) == [given_id("12"), EOS_TOKEN_ID]
    assert harness.sink.finish_reason(1) == generation_pb2.FINISH_REASON_STOP


def given_id(token: str) -> int:
    tokens: list[str] = [*toy_vocabulary.SIGNS, *map("".join, toy_vocabulary.PAIRS)]
    return tokens.index(token)


class Failing:
    """A constraint that gives up behind so many tokens."""

    def __init__(self, limit: int, allowed: Callable[[Sequence[int]], object]) -> None:
        self._limit = limit
        self._allowed = allowed
        self.failure: str | None = None

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()

    def allowed(self, output: Sequence[int]) -> object:
        if len(output) >= self._limit:
            self.failure = "it is too costly"
        return self._allowed(output)


@pytest.mark.parametrize("propose", [no_draft, perfect])
def test_a_grammar_that_cannot_be_followed_ends_its_sequence_alone(
    compiler: GrammarCompiler, propose: Propose
) -> None:
    given = compiler.compile("s", ARRAY)
    sampling = Sampling(temperature=0.0)
    harness = Harness(propose)
    harness.admit(1, [1], 12, sampling, STOPS, grammar=given)
    harness.admit(2, [2], 12, sampling, STOPS)
    harness.loop.step()
    (sequence,) = (one for one in harness.scheduler.running if one.request.sequence_id == 1)
    sequence.constraint = Failing(4, given.start().allowed)  # type: ignore[assignment]
    harness.run()
    assert harness.sink.rejected == {1: target_pb2.REJECT_REASON_INVALID}
    assert "too costly" in harness.sink.words[1]
    whole = oracle([1], sampling, 12, STOPS, grammar=given)
    emitted = harness.sink.tokens(1)
    assert emitted == whole[: len(emitted)] and len(emitted) <= 4
    assert harness.sink.tokens(2) == oracle([2], sampling, 12, STOPS)


def test_a_resumed_output_that_breaks_the_grammar_is_refused(compiler: GrammarCompiler) -> None:
    harness = Harness(no_draft)
    given = compiler.compile("s", ARRAY)
    harness.admit(
        1, [1], 12, Sampling(temperature=0.0), STOPS, resumed=[given_id("c")], grammar=given
    )
    harness.run()
    assert harness.sink.rejected == {1: target_pb2.REJECT_REASON_INVALID}

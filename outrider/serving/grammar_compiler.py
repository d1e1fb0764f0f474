"""Compiles what an answer's text must look like for one vocabulary (llguidance).

What a grammar may cost is bounded by counts, not by time, so that gateway and target, fast and slow
machines agree on what is too costly.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from outrider.serving.errors import InvalidArgument
from outrider.serving.structured_output import StructuredOutput
from outrider.serving.token_matcher import TokenMatcher, first_words
from outrider.serving.tokenizer import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between the parts of a JSON text: nothing, a space, or a line feed with an indentation. Without a
# bound, a model can write white space for ever.
WHITE_SPACE: Final = r" |\n {0,32}"
# How schemas are compiled; whatever a schema says of this itself comes second.
JSON_OPTIONS: Final["JsonCompileOptions"] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "lenient": False,
    "coerce_one_of": False,
}

# Grammars kept compiled; a request with one of them starts at once.
KEPT_GRAMMARS = 64

# A chain of rules is compiled by recursion, some 2 KiB a rule.
COMPILER_STACK_BYTES = 64 * 2**20

# So that a step's mask takes some 20 ms at most on a slow core, and compiling a few hundred. Only
# free grammars can be so ambiguous that the time for a row grows with the square of its items.
_STEP_LEXER_FUEL = 50_000
_STEP_MAX_ITEMS = 10_000
_MAX_GRAMMAR_SIZE = 100_000
_MAX_LEXER_STATES = 50_000  # of a kilobyte or two
_MAX_ROW_ITEMS = 1000
_MAX_ROW_ITEMS_OF_GRAMMARS = 400
# Tokens that are tried when a grammar is compiled: most of what is too costly is so from the start.
_TRIED_TOKENS = 3


class GrammarRefused(InvalidArgument):
    """What an answer should look like cannot be compiled, or costs too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Compiled, with nothing consumed. Safe to share by threads."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    _pristine: LLMatcher = field(repr=False)

    def start(self) -> TokenMatcher:
        """An automaton before its first token."""
        return TokenMatcher(
            self._pristine.deep_copy(),
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )


class GrammarCompiler:
    """One model's. Safe to share by threads. Made by `make_grammar_compiler`."""

    def __init__(
        self, vocabulary: Vocabulary, tokenizer: LLTokenizer | None, executor: Executor
    ) -> None:
        """`tokenizer` is None for a model without an end-of-sequence token."""
        self._vocab_size = vocabulary.vocab_size
        self._eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self._tokenizer = tokenizer
        self._executor = executor
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    async def compiled(self, field: str, wanted: StructuredOutput) -> Grammar:
        """Compiles beside the event loop. Raises GrammarRefused with the field and the reason."""
        grammar = self.kept(wanted)
        if grammar is None:
            grammar = await asyncio.get_running_loop().run_in_executor(
                self._executor, self.compile, field, wanted
            )
        return grammar

    def kept(self, wanted: StructuredOutput) -> Grammar | None:
        """The grammar if it is compiled already."""
        with self._lock:
            grammar = self._kept.get(wanted)
            if grammar is not None:
                self._kept.move_to_end(wanted)
            return grammar

    def compile(self, field: str, wanted: StructuredOutput) -> Grammar:
        """Compiles on this thread. Raises GrammarRefused with the field and the reason."""
        grammar = self.kept(wanted)
        if grammar is None:
            grammar = self._compiled(field, wanted)
            with self._lock:
                self._kept[wanted] = grammar
                if len(self._kept) > KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
        return grammar

    def _compiled(self, field: str, wanted: StructuredOutput) -> Grammar:
        if self._tokenizer is None:
            bound = "absent: the model has no end-of-sequence token"
            raise GrammarRefused(field, wanted.choices or wanted.text, bound)
        matcher = LLMatcher(
            self._tokenizer, _ll_grammar(wanted), log_level=0, limits=_limits(wanted)
        )
        if matcher.is_error():
            raise _refused(field, wanted, first_words(matcher.get_error()))
        grammar = Grammar(
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            _pristine=matcher,
        )
        trial = grammar.start()
        output: list[int] = []
        for _ in range(_TRIED_TOKENS):
            token_id = int(trial.allowed(output).argmax())
            if trial.failure is not None:
                raise _refused(field, wanted, trial.failure)
            output.append(token_id)
        return grammar


def _refused(field: str, wanted: StructuredOutput, reason: str) -> GrammarRefused:
    bound = f"a {_WORDS[wanted.kind]} that works and is not too costly: {reason}"
    return GrammarRefused(field, wanted.choices or wanted.text, bound)


_WORDS: Final = {
    "json_schema": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "Lark grammar",
}


def make_grammar_compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    """Takes a tenth of a second and more, for the vocabulary's tree of bytes."""
    tokenizer = _ll_tokenizer(vocabulary) if vocabulary.eos_token_ids else None
    return GrammarCompiler(vocabulary, tokenizer, _compiler_thread())


def _compiler_thread() -> ThreadPoolExecutor:
    """One grammar after the other, with room for their recursion: what compiles must not take the
    processors from what generates.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
    usual = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(usual)
    return executor


def _limits(wanted: StructuredOutput) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=(
            _MAX_ROW_ITEMS_OF_GRAMMARS if wanted.kind == "grammar" else _MAX_ROW_ITEMS
        ),
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        max_lexer_states=_MAX_LEXER_STATES,
        verbose_errors=False,
    )


def _ll_grammar(wanted: StructuredOutput) -> str:
    if wanted.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(wanted.text))
    if wanted.kind == "regex":
        return str(LLMatcher.grammar_from_regex(wanted.text))
    if wanted.kind == "choice":
        return str(LLMatcher.grammar_from_regex(_any_of(wanted.choices)))
    schema = '{"type":"object"}' if wanted.kind == "json_object" else wanted.text
    return str(
        LLMatcher.grammar_from_json_schema(
            schema,
            overrides=JSON_OPTIONS,
        )
    )


def _any_of(texts: Sequence[str]) -> str:
    return "|".join("".join(f"\\x{{{ord(sign):x}}}" for sign in text) for text in texts)


class _Tokens:
    """A vocabulary as llguidance wants it: the bytes of all tokens, and how texts are cut."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = vocabulary.bos_token_id
        self.tokens = list(vocabulary.token_bytes.by_id[: vocabulary.vocab_size])
        self.special_token_ids = sorted(vocabulary.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode_continuation(text)


def _ll_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary)),
        n_vocab=vocabulary.vocab_size,
        eos_token=list(vocabulary.eos_token_ids),
    )

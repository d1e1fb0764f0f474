"""Sequences whose grammars are being compiled: nobody else waits, and none comes back to life."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from outrider.serving.errors import InvalidArgument
from outrider.serving.grammar_compiler import Grammar, GrammarCompiler, make_grammar_compiler
from outrider.serving.structured_output import StructuredOutput
from outrider.v1 import structured_output_pb2, target_pb2
from target_service.grammar_admission import GrammarAdmission
from tests.toy_vocabulary import toy_vocabulary


class SlowCompiler:
    """Compiles, once it is let."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.is_let = threading.Event()

    async def compiled(self, field: str, wanted: StructuredOutput) -> Grammar:
        def compile_when_let() -> Grammar:
            assert self.is_let.wait(20)
            return self._compiler.compile(field, wanted)

        return await asyncio.to_thread(compile_when_let)


class Stream:
    """What comes of one stream's sequences."""

    def __init__(self, compiler: SlowCompiler) -> None:
        self.admitted: list[int] = []
        self.refused: dict[int, str] = {}
        self.ended: list[BaseException | None] = []
        self.admission = GrammarAdmission(
            compiler=compiler,  # type: ignore[arg-type]
            admit=self._admit,
            refuse=self._refuse,
            on_task_end=lambda task: self.ended.append(
                None if task.cancelled() else task.exception()
            ),
        )

    def _admit(self, message: target_pb2.Admit, grammar: Grammar) -> None:
        assert grammar.start().allowed([]).any()
        self.admitted.append(message.sequence_id)

    def _refuse(self, sequence_id: int, error: InvalidArgument) -> None:
        self.refused[sequence_id] = str(error)


def admit(sequence_id: int, regex: str) -> target_pb2.Admit:
    return target_pb2.Admit(
        sequence_id=sequence_id,
        structured_output=structured_output_pb2.StructuredOutput(regex=regex),
    )


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
def slow(tmp_path: Path) -> SlowCompiler:
    return SlowCompiler(make_grammar_compiler(toy_vocabulary(tmp_path)))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_sequences_are_admitted_or_refused_once_their_grammar_is_compiled(
    slow: SlowCompiler,
) -> None:
    async def test() -> None:
        stream = Stream(slow)
        for sequence_id, regex in ((1, "ab"), (2, "(a"), (3, "")):
            stream.admission.begin(admit(sequence_id, regex))
        await until(lambda: 3 in stream.refused)
        assert not stream.admitted and list(stream.refused) == [3]
        slow.is_let.set()
        await until(lambda: len(stream.ended) == 3)
        assert stream.admitted == [1]
        assert stream.refused[2].startswith("structured_output is '(a', must be")
        assert stream.ended == [None] * 3

    run(test)


def test_a_sequence_that_is_cancelled_meanwhile_is_not_admitted(slow: SlowCompiler) -> None:
    async def test() -> None:
        stream = Stream(slow)
        for sequence_id in (1, 2, 3):
            stream.admission.begin(admit(sequence_id, f"a{{{sequence_id}}}"))
        await asyncio.sleep(0.02)
        stream.admission.cancel([2, 77])
        slow.is_let.set()
        await until(lambda: len(stream.ended) == 3)
        assert sorted(stream.admitted) == [1, 3] and not stream.refused

    run(test)


def test_the_end_of_a_stream_forgets_all_that_wait(slow: SlowCompiler) -> None:
    async def test() -> None:
        stream = Stream(slow)
        for sequence_id in (1, 2):
            stream.admission.begin(admit(sequence_id, "ab"))
        await asyncio.sleep(0.02)
        stream.admission.cancel()
        slow.is_let.set()
        await until(lambda: len(stream.ended) == 2)
        assert not stream.admitted and not stream.refused

    run(test)


def test_an_error_that_nobody_expects_is_told(slow: SlowCompiler) -> None:
    async def test() -> None:
        stream = Stream(slow)
        slow._compiler = None  # type: ignore[assignment]
        slow.is_let.set()
        stream.admission.begin(admit(1, "ab"))
        await until(lambda: bool(stream.ended))
        assert isinstance(stream.ended[0], AttributeError)

    run(test)

"""Sequences that wait for their grammars: compiled beside the step loop and the event loop."""

import asyncio
from collections.abc import Callable, Iterable

from outrider.serving.errors import InvalidArgument
from outrider.serving.grammar_compiler import Grammar, GrammarCompiler
from outrider.serving.structured_output import structured_output_from
from outrider.v1 import target_pb2

FIELD = "structured_output"

Admit = Callable[[target_pb2.Admit, Grammar], None]
Refuse = Callable[[int, InvalidArgument], None]


class GrammarAdmission:
    """One stream's. Belongs to the event loop. A sequence that is cancelled meanwhile is not
    admitted any more.
    """

    def __init__(
        self,
        *,
        compiler: GrammarCompiler,
        admit: Admit,
        refuse: Refuse,
        on_task_end: Callable[["asyncio.Task[None]"], None],
    ) -> None:
        """`on_task_end` is told of every task: nothing but InvalidArgument is expected there."""
        self._compiler = compiler
        self._admit = admit
        self._refuse = refuse
        self._on_task_end = on_task_end
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, message: target_pb2.Admit) -> None:
        """Admits or refuses a sequence with a structured output, now or a little later."""
        sequence_id = message.sequence_id
        task = asyncio.create_task(self._compile(message), name=f"grammar of {sequence_id}")
        self._tasks[sequence_id] = task
        task.add_done_callback(lambda ended: self._ended(sequence_id, ended))

    def cancel(self, sequence_ids: Iterable[int] | None = None) -> None:
        """Forgets those of these, or of all, that still wait."""
        for sequence_id in list(self._tasks) if sequence_ids is None else sequence_ids:
            task = self._tasks.get(sequence_id)
            if task is not None:
                task.cancel()

    async def _compile(self, message: target_pb2.Admit) -> None:
        try:
            wanted = structured_output_from(FIELD, message.structured_output)
            self._admit(message, await self._compiler.compiled(FIELD, wanted))
        except InvalidArgument as error:
            self._refuse(message.sequence_id, error)

    def _ended(self, sequence_id: int, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(sequence_id) is task:
            del self._tasks[sequence_id]
        self._on_task_end(task)

"""Several answers to one request, side by side: `n` of each prompt, each with its own seed.

The first answer to a prompt goes ahead: once it has begun the prompt is in the target's cache, and
the others find it there.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace

from gateway.generation import Generation
from gateway.request import GenerationRequest
from gateway.sequence_text import Piece, Usage
from outrider.serving.choice_seed import choice_seed

Generate = Callable[[GenerationRequest], AbstractAsyncContextManager[Generation]]


class Choices:
    """The answers that are being generated, numbered prompt by prompt."""

    def __init__(
        self, prompts: Sequence[GenerationRequest], num_each: int, generate: Generate
    ) -> None:
        """`prompts`: one request a prompt, with the seed of its first answer."""
        self._prompts = prompts
        self._num_each = num_each
        self._generate = generate
        self._begun: dict[int, Generation] = {}
        self._waiting: dict[asyncio.Task[Piece], int] = {}
        self._iterators: dict[int, AsyncIterator[Piece]] = {}

    @property
    def usage(self) -> Usage:
        """The counts so far. A prompt counts once, as it was found by its first answer."""
        firsts = [self._begun[index] for index in self._begun if index % self._num_each == 0]
        usages = [generation.usage for generation in self._begun.values()]
        return Usage(
            prompt_tokens=sum(len(prompt.prompt_token_ids) for prompt in self._prompts),
            cached_prompt_tokens=sum(first.usage.cached_prompt_tokens for first in firsts),
            completion_tokens=sum(one.completion_tokens for one in usages),
            accepted_prediction_tokens=sum(one.accepted_prediction_tokens for one in usages),
            rejected_prediction_tokens=sum(one.rejected_prediction_tokens for one in usages),
            drafts=sum(one.drafts for one in usages),
        )

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(answer, piece) as they come; the last piece of each answer has a finish reason.

        Raises ServiceError if one of them cannot be completed; leaving early cancels all.
        """
        async with AsyncExitStack() as running:
            try:
                for prompt in range(len(self._prompts)):
                    await self._begin(running, prompt, 0)
                while self._waiting:
                    done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=self._waiting.__getitem__):
                        index = self._waiting.pop(task)
                        piece = task.result()
                        prompt, choice = divmod(index, self._num_each)
                        if choice == 0 and index + 1 not in self._begun:
                            # Before anything is sent: there may be no room for them.
                            for other in range(1, self._num_each):
                                await self._begin(running, prompt, other)
                        if not piece.finish_reason:
                            self._wait_for(index)
                        yield index, piece
            finally:
                await _ended(self._waiting)

    async def _begin(self, running: AsyncExitStack, prompt: int, choice: int) -> None:
        request = self._prompts[prompt]
        if choice:
            seed = choice_seed(request.seed, choice)
            request = replace(request, seed=seed, sampling=replace(request.sampling, seed=seed))
        index = prompt * self._num_each + choice
        generation = await running.enter_async_context(self._generate(request))
        self._begun[index] = generation
        self._iterators[index] = aiter(generation.pieces())
        self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        self._waiting[asyncio.ensure_future(anext(self._iterators[index]))] = index


async def _ended(tasks: dict[asyncio.Task[Piece], int]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # of interest to nobody any more

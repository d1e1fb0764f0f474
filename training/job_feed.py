"""Keeps a decoder in work: jobs made ahead by workers, and what comes of finished ones."""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from training import author_worker
from training.author import Digest, Job, NewRow

Make = Callable[[int], "Future[list[Job]]"]


class InlineExecutor(Executor):
    """Runs everything at once in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class JobFeed:
    """Jobs in, finished jobs out. Jobs that continue a conversation go before new ones.

    `make` asks for that many new jobs; `ahead` of them are kept ready. One thread.
    """

    def __init__(
        self, executor: Executor, make: Make, *, ahead: int, batch: int, rng: random.Random
    ) -> None:
        self.rows: list[NewRow] = []
        self.documents: list[str] = []
        self.counts: Counter[str] = Counter()
        self._executor = executor
        self._make = make
        self._ahead = ahead
        self._batch = batch
        self._rng = rng
        self._seen: set[int] = set()
        self._continued: deque[Job] = deque()
        self._fresh: deque[Job] = deque()
        self._making: deque[Future[list[Job]]] = deque()
        self._digesting: deque[Future[Digest]] = deque()

    def top_up(self) -> None:
        """Ask for as many jobs as are missing; does not wait for them."""
        while len(self._fresh) + self._batch * len(self._making) < self._ahead:
            self._making.append(self._make(self._batch))

    def take(self, count: int, fits: Callable[[Job], bool]) -> list[Job]:
        """Up to `count` jobs that fit, none of them an answer to a chat that was had before."""
        taken: list[Job] = []
        misses = 0
        while len(taken) < count and misses < count + self._ahead:
            self.top_up()
            self._collect()
            if self._continued:
                job = self._continued.popleft()
            else:
                if not self._fresh:
                    self._fresh.extend(self._making.popleft().result())
                job = self._fresh.popleft()
            if not fits(job):
                self.counts["jobs too long"] += 1
                misses += 1
            elif job.key and job.key in self._seen:
                self.counts["prompts seen before"] += 1
                misses += 1
            else:
                self._seen.add(job.key)
                taken.append(job)
        return taken

    def finish(self, written: Sequence[tuple[Job, list[int], bool]]) -> None:
        """Hand finished jobs to the workers."""
        for start in range(0, len(written), self._batch):
            part = written[start : start + self._batch]
            seed = self._rng.getrandbits(63)
            self._digesting.append(self._executor.submit(author_worker.digest, list(part), seed))

    def drain(self) -> None:
        """Wait for everything that was handed over."""
        while self._digesting:
            self._add(self._digesting.popleft().result())

    def take_rows(self) -> list[NewRow]:
        """The rows since the last call."""
        self._collect()
        rows, self.rows = self.rows, []
        return rows

    def _collect(self) -> None:
        while self._digesting and self._digesting[0].done():
            self._add(self._digesting.popleft().result())
        while self._making and self._making[0].done():
            self._fresh.extend(self._making.popleft().result())

    def _add(self, digest: Digest) -> None:
        self.rows.extend(digest.rows)
        self.documents.extend(digest.documents)
        self._continued.extend(digest.jobs)
        self.counts.update(digest.counts)

"""The author in a worker process: module functions over the process's one author."""

import random
from collections.abc import Sequence
from pathlib import Path

from training.author import Author, Digest, Job, read_author
from training.documents import Message

_authors: list[Author] = []


def start(model_path: Path, row_length: int) -> None:
    """Load the process's author; runs once, before any of the functions below."""
    _authors[:] = [read_author(model_path, row_length)]


def short_jobs(count: int, seed: int) -> list[Job]:
    return _authors[0].short_jobs(count, random.Random(seed))


def given_jobs(chats: Sequence[list[Message]], seed: int) -> list[Job]:
    return _authors[0].given_jobs(chats, random.Random(seed))


def long_jobs(texts: Sequence[Sequence[str]], seed: int) -> list[Job]:
    return _authors[0].long_jobs(texts, random.Random(seed))


def digest(written: Sequence[tuple[Job, list[int], bool]], seed: int) -> Digest:
    return _authors[0].digest(written, random.Random(seed))

"""Decides what the target writes next: prompts, then answers, then perhaps a second turn.

Jobs go to the decoder and come back with the target's tokens; digesting one gives training rows,
documents and further jobs. It knows texts and tokens, no model: worker processes run it.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway.chat_template import ChatTemplate, compile_chat_template
from outrider.serving.tokenizer import Vocabulary, load_tokenizer
from training.documents import Message, cut, passages
from training.openers import Openers, read_openers
from training.text_filters import is_loop, is_prompt, whole_sentences

FREE: Final = "free"
GIVEN: Final = "given"
SUMMARY: Final = "summaries"
QUESTION: Final = "questions"
ARTICLE: Final = "articles"
REPORT: Final = "reports"

# Shares of the rows of short conversations. Most kinds are names of files in prompts/.
SHORT_KINDS: Final = {
    FREE: 0.10, "trivia": 0.17, "math": 0.18, "translation": 0.17, "writing": 0.06,
    "roleplay": 0.03, "reasoning": 0.04, "coding": 0.05, "extraction": 0.03, "stem": 0.04,
    "humanities": 0.03, "everyday": 0.06, ARTICLE: 0.03, REPORT: 0.03,
}  # fmt: skip
LONG_KINDS: Final = {SUMMARY: 0.5, QUESTION: 0.5}

_CUT_SHARE: Final = 0.25  # of whole prompts that the target completes from their first half
_GREEDY_SHARE: Final = 0.5
_SECOND_TURN_SHARE: Final = 0.2
_SECOND_TURN_ROOM: Final = 350  # tokens
_KEPT_LOOPS: Final = 0.25
_KEPT_ARTICLES: Final = 0.3
_MIN_ANSWER: Final = 32  # tokens of an answer that did not end
_MIN_DOCUMENT: Final = 700  # characters
_HELD_OUT_ONE_IN: Final = 50
_DOCUMENT_CHARACTERS: Final = (1200, 3800)
_PASSAGE_CHARACTERS: Final = (1500, 3800)
_LONG_TURN_KINDS: Final = (FREE, "coding", "extraction", "math")


class Phase(StrEnum):
    """What the target is writing."""

    TURN = "turn"  # the rest of a user's turn
    ANSWER = "answer"
    REPORT = "report"  # plain text, outside any chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Tokens for the decoder to continue, and what they are part of."""

    kind: str
    phase: Phase
    messages: tuple[Message, ...]  # the chat before the text that is being written
    prompt_ids: list[int] = field(repr=False)
    max_new_tokens: int
    temperature: float
    min_p: float
    answer_start: int = 0  # of the chat's first answer, in tokens
    before: str = ""  # a turn is `before`, `opener`, what the target adds, then `after`
    opener: str = ""
    after: str = ""
    key: int = 0  # of an answer's chat, to know the same one again


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A whole conversation as tokens."""

    kind: str
    tokens: npt.NDArray[np.int32] = field(repr=False)
    answer_start: int
    is_held_out: bool


@dataclass(slots=True)
class Digest:
    """What a batch of finished jobs gave."""

    rows: list[NewRow] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """One worker's view: tokenizer, template, openers. `row_length` bounds second turns."""

    vocabulary: Vocabulary
    template: ChatTemplate
    openers: Openers
    row_length: int

    # Starting conversations

    def short_jobs(self, count: int, rng: random.Random) -> list[Job]:
        """The beginnings of `count` short conversations, kinds drawn by their shares."""
        kinds = rng.choices(tuple(SHORT_KINDS), tuple(SHORT_KINDS.values()), k=count)
        return [self._short_job(kind, rng) for kind in kinds]

    def given_jobs(self, chats: Sequence[list[Message]], rng: random.Random) -> list[Job]:
        """Answers to prompts that were given. Answers inside them are not the target's own."""
        jobs = [self._answer(GIVEN, tuple(chat), rng) for chat in chats]
        return [replace(job, answer_start=len(job.prompt_ids)) for job in jobs]

    def long_jobs(self, texts: Sequence[Sequence[str]], rng: random.Random) -> list[Job]:
        """A summary of the first, or a question about all, of each group of texts."""
        kinds = rng.choices(tuple(LONG_KINDS), tuple(LONG_KINDS.values()), k=len(texts))
        return [
            self._summary(group[0], rng) if kind == SUMMARY else self._question(group, rng)
            for kind, group in zip(kinds, texts, strict=True)
        ]

    def _short_job(self, kind: str, rng: random.Random) -> Job:
        if kind == FREE:
            return self._turn(FREE, (), "", rng)
        opener = self.openers.draw(kind, rng)
        if kind == REPORT:
            ids = self.vocabulary.encode(opener.text, parse_special=False, add_bos=True)
            return Job(
                kind=kind, phase=Phase.REPORT, messages=(), prompt_ids=ids, max_new_tokens=520,
                temperature=rng.uniform(0.7, 0.95), min_p=0.05, opener=opener.text,
            )  # fmt: skip
        if opener.is_open:
            return self._turn(kind, (), opener.text, rng)
        if kind != ARTICLE and rng.random() < _CUT_SHARE:
            words = opener.text.split(" ")
            kept = rng.randint(max(1, len(words) // 3), max(1, len(words) - 1))
            return self._turn(kind, (), " ".join(words[:kept]), rng)
        return self._answer(kind, _user_turn((), opener.text), rng)

    def _summary(self, text: str, rng: random.Random) -> Job:
        document = cut(text, rng.randint(*_DOCUMENT_CHARACTERS), rng)
        opener = self.openers.draw(SUMMARY, rng, {"document": document})
        return self._answer(SUMMARY, _user_turn((), opener.text), rng)

    def _question(self, texts: Sequence[str], rng: random.Random) -> Job:
        found = passages(texts, rng.randint(*_PASSAGE_CHARACTERS), rng)
        asked = self.openers.draw("asked", rng)
        whole = self.openers.draw(QUESTION, rng, {"passages": found, "question": "\0"})
        before, after = whole.text.split("\0")
        if not asked.is_open:
            text = before + asked.text + after
            return self._answer(QUESTION, _user_turn((), text), rng)
        # The target has read the passages when it asks, wherever the question is put then.
        context = "" if found in before else found + "\n\n"
        return self._turn(QUESTION, (), asked.text, rng, (context, before, after))

    def _turn(
        self,
        kind: str,
        messages: tuple[Message, ...],
        opener: str,
        rng: random.Random,
        frame: tuple[str, str, str] = ("", "", ""),
    ) -> Job:
        """The target goes on with a user's turn; the chat goes on from the turn that results."""
        context, before, after = frame
        # A text that the template cannot change marks where the user's turn stands.
        mark = "\u2060turn\u2060"
        chat = self.template.render(
            [*messages, {"role": "user", "content": mark}], add_generation_prompt=False
        )
        written = chat.text[: chat.text.rindex(mark)] + context + before + opener
        ids = self.vocabulary.encode(
            written, parse_special=True, add_bos=False, protected=chat.protected
        )
        limit = 40 if kind == QUESTION else 110 if kind in _LONG_TURN_KINDS else 60
        return Job(
            kind=kind, phase=Phase.TURN, messages=messages, prompt_ids=ids, max_new_tokens=limit,
            temperature=rng.uniform(0.8, 1.0), min_p=rng.choice((0.03, 0.08)), before=before,
            opener=opener, after=after,
        )  # fmt: skip

    def _answer(self, kind: str, messages: tuple[Message, ...], rng: random.Random) -> Job:
        ids = self._prompt_ids(messages)
        if kind == ARTICLE:
            limit, temperature = 520, rng.uniform(0.6, 0.9)
        else:
            limit = rng.randint(160, 220) if kind in LONG_KINDS else rng.randint(256, 320)
            temperature = 0.0 if rng.random() < _GREEDY_SHARE else rng.uniform(0.6, 1.0)
        text = "\0".join(message["content"] for message in messages)
        key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        first = next((i for i, item in enumerate(messages) if item["role"] == "assistant"), None)
        start = len(ids) if first is None else len(self._prompt_ids(messages[:first]))
        return Job(
            kind=kind, phase=Phase.ANSWER, messages=messages, prompt_ids=ids,
            max_new_tokens=limit, temperature=temperature, min_p=0.0, answer_start=start, key=key,
        )  # fmt: skip

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        chat = self.template.render(messages)
        return self.vocabulary.encode(
            chat.text, parse_special=True, add_bos=False, protected=chat.protected
        )

    # Going on from what the target wrote

    def digest(self, written: Sequence[tuple[Job, list[int], bool]], rng: random.Random) -> Digest:
        """Rows, documents and jobs from (job, new tokens, whether they ended by themselves)."""
        digest = Digest()
        for job, token_ids, ended in written:
            if job.phase == Phase.TURN:
                self._digest_turn(job, token_ids, ended, rng, digest)
            elif job.phase == Phase.REPORT:
                self._digest_document(job.opener, token_ids, digest)
            else:
                self._digest_answer(job, token_ids, ended, rng, digest)
        return digest

    def _digest_turn(
        self, job: Job, token_ids: list[int], ended: bool, rng: random.Random, digest: Digest
    ) -> None:
        turn = (job.opener + self._text(token_ids)).strip()
        if job.kind == QUESTION:
            # The target likes to go on with passages of its own.
            turn = turn.partition("\n")[0].strip()
        elif not ended:
            # What was cut off by the limit counts up to its last sentence.
            turn = whole_sentences(turn)
        if not is_prompt(turn) or is_loop(token_ids):
            digest.counts["turns dropped"] += 1
            return
        messages = _user_turn(job.messages, job.before + turn + job.after)
        digest.jobs.append(self._answer(job.kind, messages, rng))

    def _digest_answer(
        self, job: Job, token_ids: list[int], ended: bool, rng: random.Random, digest: Digest
    ) -> None:
        text = self._text(token_ids)
        if not text.strip() or not (ended or len(token_ids) >= _MIN_ANSWER):
            digest.counts["answers empty"] += 1
            return
        if is_loop(token_ids):
            digest.counts["answers looping"] += 1
            if rng.random() >= _KEPT_LOOPS:
                digest.counts["answers dropped for looping"] += 1
                return
        elif job.kind == ARTICLE:
            self._digest_document("", token_ids, digest)
        if job.kind == ARTICLE and rng.random() >= _KEPT_ARTICLES:
            return
        if self._goes_on(job, token_ids, ended) and rng.random() < _SECOND_TURN_SHARE:
            messages = (*job.messages, {"role": "assistant", "content": text.strip()})
            opener = self.openers.draw("followups", rng)
            if opener.is_open:
                digest.jobs.append(self._turn(job.kind, messages, opener.text, rng))
            else:
                turns = _user_turn(messages, opener.text)
                digest.jobs.append(self._answer(job.kind, turns, rng))
            return
        tokens = np.asarray(job.prompt_ids + token_ids, dtype=np.int32)
        digest.rows.append(
            NewRow(
                kind=job.kind,
                tokens=tokens,
                answer_start=job.answer_start,
                is_held_out=job.key % _HELD_OUT_ONE_IN == 0,
            )
        )

    def _digest_document(self, opener: str, token_ids: list[int], digest: Digest) -> None:
        text = whole_sentences(opener + self._text(token_ids))
        if len(text) < _MIN_DOCUMENT or "\ufffd" in text or is_loop(token_ids):
            digest.counts["documents dropped"] += 1
            return
        digest.documents.append(text)

    def _goes_on(self, job: Job, token_ids: list[int], ended: bool) -> bool:
        is_first = all(message["role"] != "assistant" for message in job.messages)
        room = self.row_length - len(job.prompt_ids) - len(token_ids)
        return is_first and ended and room >= _SECOND_TURN_ROOM and job.kind not in LONG_KINDS

    def _text(self, token_ids: list[int]) -> str:
        return self.vocabulary.decode(token_ids, skip_special=True, continues_text=True)


def read_author(model_path: Path, row_length: int) -> Author:
    """An author for a target's files; raises what reading its tokenizer and template raises."""
    vocabulary = load_tokenizer(model_path)
    return Author(
        vocabulary=vocabulary,
        template=compile_chat_template(vocabulary),
        openers=read_openers(),
        row_length=row_length,
    )


def _user_turn(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    return (*messages, {"role": "user", "content": text})

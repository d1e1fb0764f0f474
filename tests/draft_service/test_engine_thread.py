"""The engine thread's turns, run on the test's own thread."""

from collections.abc import Callable

from link_client import Row, drafts_in, hello, open_of
from proposer_client import Driver

from draft_service.drafters.ngram_drafter import NgramDrafter, NgramSequence
from draft_service.engine_thread import EngineLoop, Mailbox
from draft_service.link_sessions import terms_of
from outrider.v1 import draft_pb2

TEXT = [10, 11, 12, 13] * 4


class Recorder:
    """A stream that keeps what it gets."""

    def __init__(self, on_answer: Callable[[], None] = lambda: None) -> None:
        self.answers: list[draft_pb2.LinkResponse] = []
        self.handled = 0
        self._on_answer = on_answer

    def deliver(self, responses: list[draft_pb2.LinkResponse]) -> None:
        self.answers.extend(responses)
        self._on_answer()

    def mark_handled(self, size: int) -> None:
        self.handled += 1


def test_answers_go_to_the_stream_they_belong_to_and_none_after_its_end() -> None:
    driver = Driver(NgramDrafter())
    mailbox = Mailbox()
    recorders = [Recorder(), Recorder(), Recorder(mailbox.stop)]
    terms = []
    for boot_id, recorder in enumerate(recorders, start=1):
        driver.client.hello = hello(boot_id)
        terms.append(terms_of(driver.client.hello))
        text = TEXT[:-boot_id]
        opening = draft_pb2.OpenBatch(**driver.client.stamps(), sequences=[open_of(0, text)])
        mailbox.attach(terms[-1], recorder)
        mailbox.receive(terms[-1], draft_pb2.LinkRequest(open=opening))
        step = driver.client.step_of(Row(0, text, 0, draft_length=1))
        mailbox.receive(terms[-1], draft_pb2.LinkRequest(step=step))
    mailbox.detach(terms[0])
    EngineLoop(proposer=driver.proposer, mailbox=mailbox).run()
    assert [recorder.handled for recorder in recorders] == [2, 2, 2]
    assert [[drafts_in(answer.draft) for answer in recorder.answers] for recorder in recorders] == [
        [],
        [{0: [12]}],
        [{0: [11]}],
    ]
    assert driver.proposer.session_count == 2


class Endless(NgramDrafter):
    """A drafter whose every piece of preparation is followed by another Step."""

    def __init__(self, send_step: Callable[[], None]) -> None:
        super().__init__()
        self._send_step = send_step

    def prepare(self, states: list[NgramSequence], budget_seconds: float) -> None:
        super().prepare(states, budget_seconds)
        self._send_step()


def test_preparation_and_steps_take_turns() -> None:
    mailbox = Mailbox()
    pieces = []

    def send_step() -> None:
        pieces.append(len(recorder.answers))
        mailbox.receive(terms, draft_pb2.LinkRequest(step=step))
        if len(pieces) == 10:
            mailbox.stop()

    driver = Driver(Endless(send_step))
    recorder = Recorder()
    terms = driver.terms
    step = driver.client.step_of(Row(0, TEXT, 0))
    opening = draft_pb2.OpenBatch(
        **driver.client.stamps(), sequences=[open_of(0, TEXT), open_of(1, list(range(900)) * 4)]
    )
    driver.proposer.detach(terms)
    mailbox.attach(terms, recorder)
    mailbox.receive(terms, draft_pb2.LinkRequest(open=opening))
    EngineLoop(proposer=driver.proposer, mailbox=mailbox).run()
    # Between any two pieces one Step is answered.
    assert pieces == list(range(10))
    assert [drafts_in(answer.draft) for answer in recorder.answers] == [{0: [10, 11, 12, 13]}] * 9

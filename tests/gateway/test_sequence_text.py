import pytest
from cluster_under_test import default_text_model

from gateway.request import GenerationRequest
from gateway.sequence_text import SequenceText
from gateway.step import SequenceStep
from outrider.serving.sampling_parameters import SamplingParameters
from outrider.v1 import generation_pb2

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module")
def vocabulary():
    return default_text_model().vocabulary


def text_for(vocabulary, *stop: str, min_tokens: int = 0) -> SequenceText:
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        max_tokens=100,
        sampling=SamplingParameters(seed=1),
        seed=1,
        stop=stop,
        min_tokens=min_tokens,
    )
    return SequenceText(request, vocabulary)


def ids(vocabulary, text: str) -> list[int]:
    return vocabulary.encode(text, parse_special=False, add_bos=False)


def step(token_ids, *, drafted=0, accepted=0, finish=0) -> SequenceStep:
    return SequenceStep(
        token_ids=token_ids, drafted_length=drafted, accepted_length=accepted, finish_reason=finish
    )


def test_a_character_of_several_tokens_is_never_shown_in_halves(vocabulary):
    text = "héllo 🦜🦜 wörld"
    assembled = text_for(vocabulary)
    pieces = [assembled.push(step([one])).text for one in ids(vocabulary, text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces


def test_half_a_character_at_the_end_is_shown_as_a_replacement(vocabulary):
    half = ids(vocabulary, "🦜")[:-1]
    assert text_for(vocabulary).push(step(half, finish=LENGTH)).text == "\ufffd"


def test_the_end_token_is_counted_but_is_no_text(vocabulary):
    assembled = text_for(vocabulary)
    piece = assembled.push(step([*ids(vocabulary, "bye"), 2], finish=STOP))
    assert piece.text == "bye"
    assert piece.token_ids[-1] == 2
    assert assembled.usage.completion_tokens == len(piece.token_ids)
    assert piece.finish_reason == STOP


def test_a_stop_token_with_a_text_is_no_text_either(vocabulary):
    token_ids = ids(vocabulary, "one two")
    piece = text_for(vocabulary).push(step(token_ids, finish=STOP))
    assert piece.text == vocabulary.decode(token_ids[:-1], skip_special=True, continues_text=True)


def test_a_stop_string_inside_an_accepted_run_cuts_text_tokens_and_counts(vocabulary):
    run = ids(vocabulary, " alpha beta gamma delta")
    # " gamma" may take several tokens; the one that completes "gamma" is the last that counts.
    used = next(
        count
        for count in range(1, len(run) + 1)
        if "gamma" in vocabulary.decode(run[:count], skip_special=True)
    )
    assert used < len(run)
    assembled = text_for(vocabulary, "gamma")
    piece = assembled.push(step(run, drafted=len(run), accepted=len(run) - 1))
    assert piece.text == " alpha beta "
    assert piece.finish_reason == STOP
    assert piece.token_ids == run[:used]
    usage = assembled.usage
    assert usage.completion_tokens == used
    assert usage.accepted_prediction_tokens == used <= usage.completion_tokens
    assert usage.rejected_prediction_tokens == len(run) - used
    assert usage.drafts == 1


def test_what_could_become_a_stop_string_is_held_back_and_released(vocabulary):
    assembled = text_for(vocabulary, "END OF ALL")
    first = assembled.push(step(ids(vocabulary, "the END")))
    assert first.text == "the "
    second = assembled.push(step(ids(vocabulary, " of"), finish=LENGTH))
    assert second.text == "END of"
    assert second.finish_reason == LENGTH


def test_a_stop_string_across_steps_is_found(vocabulary):
    assembled = text_for(vocabulary, "ab cd")
    texts = []
    for token_id in ids(vocabulary, "xx ab cd yy"):
        piece = assembled.push(step([token_id]))
        texts.append(piece.text)
        if piece.finish_reason:
            break
    assert "".join(texts) == "xx "
    assert piece.finish_reason == STOP


def test_counts_add_up_over_steps(vocabulary):
    assembled = text_for(vocabulary)
    run = ids(vocabulary, "a b c d e f")
    assembled.push(step(run[:3], drafted=4, accepted=2))
    assembled.push(step(run[3:4], drafted=0))
    assembled.push(step(run[4:5], drafted=4, accepted=0, finish=LENGTH))
    usage = assembled.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 5)
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (2, 6)
    assert usage.drafts == 2


@pytest.mark.parametrize("run", [1, 3, 100])
def test_a_stop_string_within_the_least_tokens_is_text_and_a_later_one_stops(vocabulary, run):
    token_ids = ids(vocabulary, "one stop two stop three stop")
    (stop,) = ids(vocabulary, " stop")
    at = [index for index, one in enumerate(token_ids) if one == stop]
    assert len(at) == 3
    for least, expected in ((0, "one "), (at[0] + 1, "one "), (at[0] + 2, "one stop two "),
                            (at[1] + 2, "one stop two stop three ")):  # fmt: skip
        assembled = text_for(vocabulary, "stop", min_tokens=least)
        text, finish = "", 0
        for first in range(0, len(token_ids), run):
            piece = assembled.push(step(token_ids[first : first + run]))
            text += piece.text
            finish = piece.finish_reason
            if finish:
                break
        assert (text, finish) == (expected, STOP)
        assert assembled.usage.completion_tokens >= least

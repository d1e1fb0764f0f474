"""Reports of a target that does not keep to the format."""

import pytest

from gateway.step import SequenceStep, unpack_report
from outrider.serving.columns import MalformedColumn, pack
from outrider.v1 import target_pb2

VOCAB_SIZE = 100


def report(**changes: bytes) -> target_pb2.StepReport:
    columns = {
        "sequence_ids": pack([7, 9], "<u8"),
        "emitted_counts": pack([2, 1], "<u2"),
        "token_ids": pack([5, 6, 99], "<i4"),
        "drafted_counts": pack([3, 0], "<u1"),
        "accepted_counts": pack([1, 0], "<u1"),
        "finish_reasons": pack([0, 2], "<u1"),
    }
    return target_pb2.StepReport(**{**columns, **changes})


def test_a_report_is_cut_into_its_sequences():
    assert unpack_report(report(), VOCAB_SIZE) == [
        (7, SequenceStep(token_ids=[5, 6], drafted_length=3, accepted_length=1, finish_reason=0)),
        (9, SequenceStep(token_ids=[99], drafted_length=0, accepted_length=0, finish_reason=2)),
    ]


def test_cached_prompt_tokens_come_with_the_rows_that_have_any():
    found = unpack_report(report(cached_prompt_counts=pack([0, 64], "<u4")), VOCAB_SIZE)
    assert [step.cached_prompt_length for _, step in found] == [0, 64]
    assert [step.cached_prompt_length for _, step in unpack_report(report(), VOCAB_SIZE)] == [0, 0]


def test_an_empty_report_is_fine():
    assert unpack_report(target_pb2.StepReport(), VOCAB_SIZE) == []


@pytest.mark.parametrize(
    ("column", "data"),
    [
        ("sequence_ids", b"123"),
        ("emitted_counts", pack([2], "<u2")),
        ("emitted_counts", pack([2, 2], "<u2")),
        ("token_ids", pack([5, 6, 100], "<i4")),
        ("token_ids", pack([5, 6, -1], "<i4")),
        ("token_ids", b"1"),
        ("drafted_counts", pack([3], "<u1")),
        ("accepted_counts", b""),
        ("finish_reasons", pack([0, 5], "<u1")),
        ("cached_prompt_counts", pack([1], "<u4")),
        ("cached_prompt_counts", b"123"),
    ],
)
def test_a_malformed_column_is_named(column, data):
    with pytest.raises(MalformedColumn):
        unpack_report(report(**{column: data}), VOCAB_SIZE)

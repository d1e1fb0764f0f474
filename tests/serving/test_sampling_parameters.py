import math

import pytest

from outrider.serving.errors import InvalidArgument
from outrider.serving.sampling_parameters import SamplingParameters, sampling_parameters_from
from outrider.v1 import sampling_pb2


def test_unset_fields_are_the_defaults_and_a_round_trip_changes_nothing() -> None:
    assert sampling_parameters_from(sampling_pb2.SamplingParameters()) == SamplingParameters()
    parameters = SamplingParameters(
        temperature=0.0,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=-2.0,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias=((3, -100.0), (7, 0.5)),
    )
    assert sampling_parameters_from(parameters.to_message()) == parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", 1e-250),
        ("temperature", 5e-324),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -1.0),
        ("min_p", math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10.5),
    ],
)
def test_a_parameter_out_of_its_bounds_is_refused_by_name(field: str, value: float) -> None:
    message = sampling_pb2.SamplingParameters(**{field: value})
    with pytest.raises(InvalidArgument, match=field) as error_info:
        sampling_parameters_from(message)
    assert repr(value) in str(error_info.value)


@pytest.mark.parametrize(
    ("biases", "words"),
    [
        ([(1, 100.5)], r"logit_bias\[1\] is 100.5"),
        ([(1, math.nan)], r"logit_bias\[1\]"),
        ([(5, 1.0), (5, 2.0)], "each token once"),
        ([(token_id, 1.0) for token_id in range(1025)], "1025 tokens"),
    ],
)
def test_biases_out_of_their_bounds_are_refused(
    biases: list[tuple[int, float]], words: str
) -> None:
    message = sampling_pb2.SamplingParameters(
        logit_bias=[
            sampling_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in biases
        ]
    )
    with pytest.raises(InvalidArgument, match=words):
        sampling_parameters_from(message)


def test_biases_are_in_the_order_of_their_tokens() -> None:
    message = sampling_pb2.SamplingParameters(
        logit_bias=[
            sampling_pb2.LogitBias(token_id=9, bias=1.0),
            sampling_pb2.LogitBias(token_id=2, bias=-1.0),
        ]
    )
    assert sampling_parameters_from(message).logit_bias == ((2, -1.0), (9, 1.0))

import math

import pytest

from outrider.serving.errors import InvalidArgument
from outrider.serving.sampling_parameters import SamplingParameters, sampling_parameters_from
from outrider.v1 import sampling_pb2


def test_unset_fields_are_the_defaults_and_a_round_trip_changes_nothing() -> None:
    assert sampling_parameters_from(sampling_pb2.SamplingParameters()) == SamplingParameters()
    parameters = SamplingParameters(temperature=0.0, top_k=4, top_p=0.5, min_p=0.1, seed=2**64 - 1)
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
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.2),
    ],
)
def test_a_parameter_out_of_its_bounds_is_refused_by_name(field: str, value: float) -> None:
    message = sampling_pb2.SamplingParameters(**{field: value})
    with pytest.raises(InvalidArgument, match=field) as error_info:
        sampling_parameters_from(message)
    assert repr(value) in str(error_info.value)


def test_neutral_values_of_what_is_not_implemented_are_accepted_and_others_refused() -> None:
    sampling_parameters_from(
        sampling_pb2.SamplingParameters(presence_penalty=0.0, repetition_penalty=1.0)
    )
    with pytest.raises(InvalidArgument, match="logit_bias"):
        sampling_parameters_from(
            sampling_pb2.SamplingParameters(
                logit_bias=[sampling_pb2.LogitBias(token_id=1, bias=1.0)]
            )
        )

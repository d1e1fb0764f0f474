"""How a target chooses tokens, as far as a draft follows it."""

from outrider.engine.sampling import Sampling
from outrider.serving.sampling_parameters import SamplingParameters
from outrider.v1 import sampling_pb2


def sampling_of(message: sampling_pb2.SamplingParameters) -> Sampling:
    """Temperature, truncations and seed. Raises InvalidArgument for one out of its bounds.

    Penalties and bias are left out, not refused: a draft without them is right less often, and
    never changes a token.
    """
    given = {
        field: getattr(message, field)
        for field in ("temperature", "top_k", "top_p", "min_p", "seed")
        if message.HasField(field)
    }
    parameters = SamplingParameters(**given)
    return Sampling(
        temperature=parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        seed=parameters.seed or 0,
    )

"""The names of the stages and activities that each service has, and the state that each belongs
to.
"""

from collections.abc import Mapping

from outrider.v1 import status_pb2

ENGINE_STAGES = ("config", "weights", "kv_cache", "attention", "graphs", "first_decode")
NGRAM_STAGES = ("config", "first_decode")
GATEWAY_STAGES = ("config", "tokenizer", "connect", "handshake", "canary")

TARGET_ACTIVITIES = ("step", "verify")
DRAFT_ACTIVITIES = ("propose",)

# Everything that OUTRIDER_INJECT_FAULT may name, by service.
FAULT_POINTS: Mapping[str, tuple[str, ...]] = {
    "target": ENGINE_STAGES + TARGET_ACTIVITIES,
    "draft": ENGINE_STAGES + DRAFT_ACTIVITIES,
    "gateway": GATEWAY_STAGES,
}

_STATE_OF_STAGE = {
    "graphs": status_pb2.SERVICE_STATE_CAPTURING,
    "first_decode": status_pb2.SERVICE_STATE_WARMING,
    "canary": status_pb2.SERVICE_STATE_WARMING,
}


def state_of_stage(stage: str) -> status_pb2.ServiceState:
    """The service state in which a start-up stage runs."""
    return _STATE_OF_STAGE.get(stage, status_pb2.SERVICE_STATE_LOADING)


def state_name(state: int) -> str:
    """SERVING for SERVICE_STATE_SERVING, and so on."""
    return status_pb2.ServiceState.Name(state).removeprefix("SERVICE_STATE_")

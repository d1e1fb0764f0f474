"""The edge: a GenerateRequest message into checked options, or InvalidArgument."""

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from gateway.openai_request import MAX_STOP_TOKEN_IDS, MAX_STOPS, check_stop
from gateway.request import Options, RequestedOutput
from outrider.serving.errors import InvalidArgument
from outrider.serving.sampling_parameters import sampling_parameters_from
from outrider.serving.structured_output import structured_output_from
from outrider.v1 import generation_pb2


def parse_request(data: bytes) -> generation_pb2.GenerateRequest:
    """Raises InvalidArgument for bytes that are no GenerateRequest, text that is no UTF-8, and
    fields that this version does not have: none is ignored.
    """
    try:
        message = generation_pb2.GenerateRequest.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            "the message", f"{len(data)} bytes", f"an outrider.v1.GenerateRequest: {error}"
        ) from error
    for name, part in (
        ("the message", message),
        ("sampling", message.sampling),
        ("speculation", message.speculation),
        ("structured_output", message.structured_output),
        ("chat", message.chat),
        ("chat.tool_choice", message.chat.tool_choice),
        *((f"chat.messages[{at}]", one) for at, one in enumerate(message.chat.messages)),
        *((f"chat.tools[{at}]", one) for at, one in enumerate(message.chat.tools)),
    ):
        _refuse_unknown(name, part)
    return message


def options_from(message: generation_pb2.GenerateRequest, deadline_seconds: float) -> Options:
    """Raises InvalidArgument naming field, value and bound."""
    if len(message.stop) > MAX_STOPS:
        raise InvalidArgument("stop", f"a list of {len(message.stop)}", f"at most {MAX_STOPS}")
    for index, stop in enumerate(message.stop):
        check_stop(f"stop[{index}]", stop)
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            "stop_token_ids",
            f"a list of {len(message.stop_token_ids)}",
            f"at most {MAX_STOP_TOKEN_IDS}",
        )
    if message.speculation.HasField("patience_seconds"):
        raise InvalidArgument(
            "speculation.patience_seconds", message.speculation.patience_seconds, "unset by clients"
        )
    has_draft_length = message.speculation.HasField("draft_length")
    return Options(
        sampling=sampling_parameters_from(message.sampling),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        draft_length=message.speculation.draft_length if has_draft_length else None,
        structured_output=_requested_output(message),
        deadline_seconds=deadline_seconds,
    )


def _requested_output(message: generation_pb2.GenerateRequest) -> RequestedOutput | None:
    if not message.HasField("structured_output"):
        return None
    field = "structured_output"
    return RequestedOutput(
        field=field, output=structured_output_from(field, message.structured_output)
    )


def _refuse_unknown(name: str, message: Message) -> None:
    unknown = UnknownFieldSet(message)
    numbers = [unknown[index].field_number for index in range(len(unknown))]
    if numbers:
        raise InvalidArgument(name, f"with field numbers {numbers}", "without unknown fields")

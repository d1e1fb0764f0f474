from outrider.v1 import sampling_pb2 as _sampling_pb2
from outrider.v1 import structured_output_pb2 as _structured_output_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_OVERLOADED: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]

class StepMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_MODE_UNSPECIFIED: _ClassVar[StepMode]
    STEP_MODE_PLAIN: _ClassVar[StepMode]
    STEP_MODE_SPECULATIVE: _ClassVar[StepMode]
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_OVERLOADED: RejectReason
REJECT_REASON_DRAINING: RejectReason
STEP_MODE_UNSPECIFIED: StepMode
STEP_MODE_PLAIN: StepMode
STEP_MODE_SPECULATIVE: StepMode

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("vocab_size", "tokenizer_sha256", "eos_token_ids", "max_sequence_length", "fingerprint", "hidden_size")
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    tokenizer_sha256: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_sequence_length: int
    fingerprint: str
    hidden_size: int
    def __init__(self, vocab_size: _Optional[int] = ..., tokenizer_sha256: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_sequence_length: _Optional[int] = ..., fingerprint: _Optional[str] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "identity", "dtype", "device", "max_running_sequences", "step_costs", "max_draft_length", "rounding_depends_on_rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_DEPENDS_ON_ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: ModelIdentity
    dtype: str
    device: str
    max_running_sequences: int
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    max_draft_length: int
    rounding_depends_on_rows: bool
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., max_running_sequences: _Optional[int] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., max_draft_length: _Optional[int] = ..., rounding_depends_on_rows: bool = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("rows", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("attach", "admit", "cancel", "policy")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    admit: AdmitBatch
    cancel: Cancel
    policy: SpeculationPolicy
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., admit: _Optional[_Union[AdmitBatch, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., policy: _Optional[_Union[SpeculationPolicy, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("gateway_boot_id",)
    GATEWAY_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_boot_id: int
    def __init__(self, gateway_boot_id: _Optional[int] = ...) -> None: ...

class AdmitBatch(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Admit]
    def __init__(self, sequences: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("sequence_id", "prompt_token_ids", "resumed_output_token_ids", "max_tokens", "sampling", "stop_token_ids", "ignore_eos", "min_tokens", "deadline_seconds", "priority", "speculation", "structured_output")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prompt_token_ids: bytes
    resumed_output_token_ids: bytes
    max_tokens: int
    sampling: _sampling_pb2.SamplingParameters
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    deadline_seconds: float
    priority: int
    speculation: _sampling_pb2.SpeculationOverride
    structured_output: _structured_output_pb2.StructuredOutput
    def __init__(self, sequence_id: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., resumed_output_token_ids: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParameters, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., priority: _Optional[int] = ..., speculation: _Optional[_Union[_sampling_pb2.SpeculationOverride, _Mapping]] = ..., structured_output: _Optional[_Union[_structured_output_pb2.StructuredOutput, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationPolicy(_message.Message):
    __slots__ = ("rules", "max_decode_rows")
    RULES_FIELD_NUMBER: _ClassVar[int]
    MAX_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[DraftLengthRule]
    max_decode_rows: int
    def __init__(self, rules: _Optional[_Iterable[_Union[DraftLengthRule, _Mapping]]] = ..., max_decode_rows: _Optional[int] = ...) -> None: ...

class DraftLengthRule(_message.Message):
    __slots__ = ("max_decode_rows", "draft_length")
    MAX_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    max_decode_rows: int
    draft_length: int
    def __init__(self, max_decode_rows: _Optional[int] = ..., draft_length: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("attached", "step", "rejected")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    step: StepReport
    rejected: Rejected
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., step: _Optional[_Union[StepReport, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("target_boot_id",)
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    target_boot_id: int
    def __init__(self, target_boot_id: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("sequence_id", "reason", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    reason: RejectReason
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step_id", "mode", "sequence_ids", "emitted_counts", "token_ids", "drafted_counts", "accepted_counts", "finish_reasons", "decode_rows", "prefill_tokens", "running_sequences", "waiting_sequences", "forward_seconds", "draft_wait_seconds", "step_seconds", "draft_length", "cached_prompt_counts")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    mode: StepMode
    sequence_ids: bytes
    emitted_counts: bytes
    token_ids: bytes
    drafted_counts: bytes
    accepted_counts: bytes
    finish_reasons: bytes
    decode_rows: int
    prefill_tokens: int
    running_sequences: int
    waiting_sequences: int
    forward_seconds: float
    draft_wait_seconds: float
    step_seconds: float
    draft_length: int
    cached_prompt_counts: bytes
    def __init__(self, step_id: _Optional[int] = ..., mode: _Optional[_Union[StepMode, str]] = ..., sequence_ids: _Optional[bytes] = ..., emitted_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., drafted_counts: _Optional[bytes] = ..., accepted_counts: _Optional[bytes] = ..., finish_reasons: _Optional[bytes] = ..., decode_rows: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., forward_seconds: _Optional[float] = ..., draft_wait_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., draft_length: _Optional[int] = ..., cached_prompt_counts: _Optional[bytes] = ...) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LabelledCount(_message.Message):
    __slots__ = ("label", "count")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    label: str
    count: int
    def __init__(self, label: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class LabelledSeconds(_message.Message):
    __slots__ = ("label", "seconds")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    label: str
    seconds: float
    def __init__(self, label: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class LinkMessageCount(_message.Message):
    __slots__ = ("direction", "kind", "count")
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    direction: str
    kind: str
    count: int
    def __init__(self, direction: _Optional[str] = ..., kind: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("upper_bounds", "counts", "sum")
    UPPER_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    upper_bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, upper_bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class TargetStatistics(_message.Message):
    __slots__ = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_position", "speculative_steps", "plain_steps", "bypass_steps", "link_messages", "draft_rows_dropped", "running_sequences", "waiting_sequences", "kv_blocks_free", "kv_blocks_used", "link_round_trip_seconds", "plain_step_seconds", "speculative_step_seconds", "preemptions", "emitted_tokens", "feature_rows", "feature_bytes", "step_message_bytes", "speculative_seconds", "kv_blocks_cached", "prompt_tokens", "cached_prompt_tokens")
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_STEPS_FIELD_NUMBER: _ClassVar[int]
    LINK_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    LINK_ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_tokens_per_position: _containers.RepeatedScalarFieldContainer[int]
    speculative_steps: int
    plain_steps: int
    bypass_steps: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    link_messages: _containers.RepeatedCompositeFieldContainer[LinkMessageCount]
    draft_rows_dropped: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    running_sequences: int
    waiting_sequences: int
    kv_blocks_free: int
    kv_blocks_used: int
    link_round_trip_seconds: Histogram
    plain_step_seconds: Histogram
    speculative_step_seconds: Histogram
    preemptions: int
    emitted_tokens: int
    feature_rows: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    feature_bytes: _containers.RepeatedCompositeFieldContainer[LabelledCount]
    step_message_bytes: int
    speculative_seconds: _containers.RepeatedCompositeFieldContainer[LabelledSeconds]
    kv_blocks_cached: int
    prompt_tokens: int
    cached_prompt_tokens: int
    def __init__(self, drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_tokens_per_position: _Optional[_Iterable[int]] = ..., speculative_steps: _Optional[int] = ..., plain_steps: _Optional[int] = ..., bypass_steps: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., link_messages: _Optional[_Iterable[_Union[LinkMessageCount, _Mapping]]] = ..., draft_rows_dropped: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., link_round_trip_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., plain_step_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., speculative_step_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., preemptions: _Optional[int] = ..., emitted_tokens: _Optional[int] = ..., feature_rows: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., feature_bytes: _Optional[_Iterable[_Union[LabelledCount, _Mapping]]] = ..., step_message_bytes: _Optional[int] = ..., speculative_seconds: _Optional[_Iterable[_Union[LabelledSeconds, _Mapping]]] = ..., kv_blocks_cached: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

from outrider.v1 import sampling_pb2 as _sampling_pb2
from outrider.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefuseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSE_REASON_UNSPECIFIED: _ClassVar[RefuseReason]
    REFUSE_REASON_CAPACITY: _ClassVar[RefuseReason]
    REFUSE_REASON_TOO_LONG: _ClassVar[RefuseReason]
    REFUSE_REASON_INVALID: _ClassVar[RefuseReason]
REFUSE_REASON_UNSPECIFIED: RefuseReason
REFUSE_REASON_CAPACITY: RefuseReason
REFUSE_REASON_TOO_LONG: RefuseReason
REFUSE_REASON_INVALID: RefuseReason

class LinkRequest(_message.Message):
    __slots__ = ("hello", "open", "step", "close", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: OpenBatch
    step: Step
    close: CloseBatch
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[OpenBatch, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., close: _Optional[_Union[CloseBatch, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "prefix_hash_algorithm", "target_boot_id", "stream_epoch", "identity", "features", "max_sequences", "max_draft_length")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    prefix_hash_algorithm: str
    target_boot_id: int
    stream_epoch: int
    identity: _target_pb2.ModelIdentity
    features: FeatureOffer
    max_sequences: int
    max_draft_length: int
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., prefix_hash_algorithm: _Optional[str] = ..., target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., identity: _Optional[_Union[_target_pb2.ModelIdentity, _Mapping]] = ..., features: _Optional[_Union[FeatureOffer, _Mapping]] = ..., max_sequences: _Optional[int] = ..., max_draft_length: _Optional[int] = ...) -> None: ...

class FeatureOffer(_message.Message):
    __slots__ = ("layer_ids", "dtypes", "host_id")
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, layer_ids: _Optional[_Iterable[int]] = ..., dtypes: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class OpenBatch(_message.Message):
    __slots__ = ("target_boot_id", "stream_epoch", "sequences")
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    target_boot_id: int
    stream_epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[Open]
    def __init__(self, target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[Open, _Mapping]]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("slot", "generation", "token_ids", "prefix_hash", "sampling", "features")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    token_ids: bytes
    prefix_hash: int
    sampling: _sampling_pb2.SamplingParameters
    features: Features
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., prefix_hash: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParameters, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("first_position", "inline_rows", "shared_memory_offset", "row_count")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    INLINE_ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    inline_rows: bytes
    shared_memory_offset: int
    row_count: int
    def __init__(self, first_position: _Optional[int] = ..., inline_rows: _Optional[bytes] = ..., shared_memory_offset: _Optional[int] = ..., row_count: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("target_boot_id", "stream_epoch", "step_id", "deadline_us", "slots", "generations", "base_lengths", "prefix_hashes", "commit_counts", "commit_token_ids", "draft_lengths", "inline_features", "shared_memory_offsets", "feature_first_positions", "feature_counts")
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    INLINE_FEATURES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    target_boot_id: int
    stream_epoch: int
    step_id: int
    deadline_us: int
    slots: bytes
    generations: bytes
    base_lengths: bytes
    prefix_hashes: bytes
    commit_counts: bytes
    commit_token_ids: bytes
    draft_lengths: bytes
    inline_features: bytes
    shared_memory_offsets: bytes
    feature_first_positions: bytes
    feature_counts: bytes
    def __init__(self, target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., deadline_us: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., base_lengths: _Optional[bytes] = ..., prefix_hashes: _Optional[bytes] = ..., commit_counts: _Optional[bytes] = ..., commit_token_ids: _Optional[bytes] = ..., draft_lengths: _Optional[bytes] = ..., inline_features: _Optional[bytes] = ..., shared_memory_offsets: _Optional[bytes] = ..., feature_first_positions: _Optional[bytes] = ..., feature_counts: _Optional[bytes] = ...) -> None: ...

class CloseBatch(_message.Message):
    __slots__ = ("target_boot_id", "stream_epoch", "slots", "generations")
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    target_boot_id: int
    stream_epoch: int
    slots: bytes
    generations: bytes
    def __init__(self, target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("ping_id",)
    PING_ID_FIELD_NUMBER: _ClassVar[int]
    ping_id: int
    def __init__(self, ping_id: _Optional[int] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("hello", "draft", "resync", "refuse", "pong", "go_away", "feature_projection")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    GO_AWAY_FIELD_NUMBER: _ClassVar[int]
    FEATURE_PROJECTION_FIELD_NUMBER: _ClassVar[int]
    hello: HelloReply
    draft: Draft
    resync: Resync
    refuse: Refuse
    pong: Pong
    go_away: GoAway
    feature_projection: FeatureProjection
    def __init__(self, hello: _Optional[_Union[HelloReply, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., go_away: _Optional[_Union[GoAway, _Mapping]] = ..., feature_projection: _Optional[_Union[FeatureProjection, _Mapping]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("draft_boot_id", "stream_epoch", "refusal", "drafter", "max_draft_length", "max_sequence_length", "features", "fingerprint")
    DRAFT_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    draft_boot_id: int
    stream_epoch: int
    refusal: Refusal
    drafter: str
    max_draft_length: int
    max_sequence_length: int
    features: FeatureNeeds
    fingerprint: str
    def __init__(self, draft_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., drafter: _Optional[str] = ..., max_draft_length: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., features: _Optional[_Union[FeatureNeeds, _Mapping]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("field", "target_value", "draft_value")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    TARGET_VALUE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VALUE_FIELD_NUMBER: _ClassVar[int]
    field: str
    target_value: str
    draft_value: str
    def __init__(self, field: _Optional[str] = ..., target_value: _Optional[str] = ..., draft_value: _Optional[str] = ...) -> None: ...

class FeatureNeeds(_message.Message):
    __slots__ = ("layer_ids", "width", "dtype", "projection_sha256", "transport", "shared_memory_name")
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_SHA256_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NAME_FIELD_NUMBER: _ClassVar[int]
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    width: int
    dtype: str
    projection_sha256: str
    transport: str
    shared_memory_name: str
    def __init__(self, layer_ids: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., projection_sha256: _Optional[str] = ..., transport: _Optional[str] = ..., shared_memory_name: _Optional[str] = ...) -> None: ...

class FeatureProjection(_message.Message):
    __slots__ = ("chunk", "is_last")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    is_last: bool
    def __init__(self, chunk: _Optional[bytes] = ..., is_last: bool = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("draft_boot_id", "target_boot_id", "stream_epoch", "step_id", "slots", "generations", "base_lengths", "prefix_hashes", "token_counts", "token_ids", "parents", "case_accepted_lengths", "case_next_token_ids", "build_us")
    DRAFT_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CASE_ACCEPTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CASE_NEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BUILD_US_FIELD_NUMBER: _ClassVar[int]
    draft_boot_id: int
    target_boot_id: int
    stream_epoch: int
    step_id: int
    slots: bytes
    generations: bytes
    base_lengths: bytes
    prefix_hashes: bytes
    token_counts: bytes
    token_ids: bytes
    parents: bytes
    case_accepted_lengths: bytes
    case_next_token_ids: bytes
    build_us: int
    def __init__(self, draft_boot_id: _Optional[int] = ..., target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., base_lengths: _Optional[bytes] = ..., prefix_hashes: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., case_accepted_lengths: _Optional[bytes] = ..., case_next_token_ids: _Optional[bytes] = ..., build_us: _Optional[int] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("target_boot_id", "stream_epoch", "slots", "generations", "held_lengths")
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HELD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    target_boot_id: int
    stream_epoch: int
    slots: bytes
    generations: bytes
    held_lengths: bytes
    def __init__(self, target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., held_lengths: _Optional[bytes] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("target_boot_id", "stream_epoch", "slots", "generations", "reasons")
    TARGET_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    target_boot_id: int
    stream_epoch: int
    slots: bytes
    generations: bytes
    reasons: bytes
    def __init__(self, target_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., reasons: _Optional[bytes] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("ping_id",)
    PING_ID_FIELD_NUMBER: _ClassVar[int]
    ping_id: int
    def __init__(self, ping_id: _Optional[int] = ...) -> None: ...

class GoAway(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

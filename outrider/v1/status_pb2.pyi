from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_STATE_UNSPECIFIED: _ClassVar[ServiceState]
    SERVICE_STATE_LOADING: _ClassVar[ServiceState]
    SERVICE_STATE_CAPTURING: _ClassVar[ServiceState]
    SERVICE_STATE_WARMING: _ClassVar[ServiceState]
    SERVICE_STATE_SERVING: _ClassVar[ServiceState]
    SERVICE_STATE_FAILED: _ClassVar[ServiceState]
    SERVICE_STATE_DRAINING: _ClassVar[ServiceState]

class StageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_STATE_UNSPECIFIED: _ClassVar[StageState]
    STAGE_STATE_PENDING: _ClassVar[StageState]
    STAGE_STATE_RUNNING: _ClassVar[StageState]
    STAGE_STATE_DONE: _ClassVar[StageState]
    STAGE_STATE_SKIPPED: _ClassVar[StageState]
    STAGE_STATE_FAILED: _ClassVar[StageState]

class LinkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINK_STATE_UNSPECIFIED: _ClassVar[LinkState]
    LINK_STATE_CONNECTING: _ClassVar[LinkState]
    LINK_STATE_HANDSHAKING: _ClassVar[LinkState]
    LINK_STATE_CLOSED_CIRCUIT: _ClassVar[LinkState]
    LINK_STATE_OPEN_CIRCUIT: _ClassVar[LinkState]
    LINK_STATE_HALF_OPEN_CIRCUIT: _ClassVar[LinkState]
    LINK_STATE_REFUSED: _ClassVar[LinkState]
SERVICE_STATE_UNSPECIFIED: ServiceState
SERVICE_STATE_LOADING: ServiceState
SERVICE_STATE_CAPTURING: ServiceState
SERVICE_STATE_WARMING: ServiceState
SERVICE_STATE_SERVING: ServiceState
SERVICE_STATE_FAILED: ServiceState
SERVICE_STATE_DRAINING: ServiceState
STAGE_STATE_UNSPECIFIED: StageState
STAGE_STATE_PENDING: StageState
STAGE_STATE_RUNNING: StageState
STAGE_STATE_DONE: StageState
STAGE_STATE_SKIPPED: StageState
STAGE_STATE_FAILED: StageState
LINK_STATE_UNSPECIFIED: LinkState
LINK_STATE_CONNECTING: LinkState
LINK_STATE_HANDSHAKING: LinkState
LINK_STATE_CLOSED_CIRCUIT: LinkState
LINK_STATE_OPEN_CIRCUIT: LinkState
LINK_STATE_HALF_OPEN_CIRCUIT: LinkState
LINK_STATE_REFUSED: LinkState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "state", "seconds", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: StageState
    seconds: float
    detail: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[StageState, str]] = ..., seconds: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("stage", "reason")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stage: str
    reason: str
    def __init__(self, stage: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("address", "state", "reason", "draft_boot_id", "stream_epoch", "drafter", "round_trip_p50_seconds", "round_trip_p95_seconds", "feature_transport", "alert", "feature_layer_ids")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_P95_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ALERT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: LinkState
    reason: str
    draft_boot_id: int
    stream_epoch: int
    drafter: str
    round_trip_p50_seconds: float
    round_trip_p95_seconds: float
    feature_transport: str
    alert: str
    feature_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[LinkState, str]] = ..., reason: _Optional[str] = ..., draft_boot_id: _Optional[int] = ..., stream_epoch: _Optional[int] = ..., drafter: _Optional[str] = ..., round_trip_p50_seconds: _Optional[float] = ..., round_trip_p95_seconds: _Optional[float] = ..., feature_transport: _Optional[str] = ..., alert: _Optional[str] = ..., feature_layer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GpuFigures(_message.Message):
    __slots__ = ("name", "driver_version", "memory_used_bytes", "memory_total_bytes", "utilization", "power_watts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    driver_version: str
    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float
    power_watts: float
    def __init__(self, name: _Optional[str] = ..., driver_version: _Optional[str] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., utilization: _Optional[float] = ..., power_watts: _Optional[float] = ...) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("service", "state", "stages", "failure", "version", "source_file", "boot_id", "process_id", "uptime_seconds", "configuration", "model_fingerprint", "device", "limits", "links", "gpu")
    class ConfigurationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FILE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    service: str
    state: ServiceState
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    failure: Failure
    version: str
    source_file: str
    boot_id: int
    process_id: int
    uptime_seconds: float
    configuration: _containers.ScalarMap[str, str]
    model_fingerprint: str
    device: str
    limits: _containers.ScalarMap[str, str]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    gpu: GpuFigures
    def __init__(self, service: _Optional[str] = ..., state: _Optional[_Union[ServiceState, str]] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., version: _Optional[str] = ..., source_file: _Optional[str] = ..., boot_id: _Optional[int] = ..., process_id: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., configuration: _Optional[_Mapping[str, str]] = ..., model_fingerprint: _Optional[str] = ..., device: _Optional[str] = ..., limits: _Optional[_Mapping[str, str]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., gpu: _Optional[_Union[GpuFigures, _Mapping]] = ...) -> None: ...

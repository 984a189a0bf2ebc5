from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("time_ms", "uptime_seconds", "memory", "models", "queue_depth", "queue_bytes", "sensors", "streams", "problems", "queue_depth_peak", "queue_bytes_peak", "idle_power_watts", "board")
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENSORS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_PEAK_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_PEAK_FIELD_NUMBER: _ClassVar[int]
    IDLE_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    time_ms: int
    uptime_seconds: float
    memory: _containers.RepeatedCompositeFieldContainer[MemoryReading]
    models: _containers.RepeatedCompositeFieldContainer[ModelReading]
    queue_depth: int
    queue_bytes: int
    sensors: _containers.RepeatedCompositeFieldContainer[SensorReading]
    streams: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    queue_depth_peak: int
    queue_bytes_peak: int
    idle_power_watts: float
    board: Board
    def __init__(self, time_ms: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., memory: _Optional[_Iterable[_Union[MemoryReading, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelReading, _Mapping]]] = ..., queue_depth: _Optional[int] = ..., queue_bytes: _Optional[int] = ..., sensors: _Optional[_Iterable[_Union[SensorReading, _Mapping]]] = ..., streams: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ..., queue_depth_peak: _Optional[int] = ..., queue_bytes_peak: _Optional[int] = ..., idle_power_watts: _Optional[float] = ..., board: _Optional[_Union[Board, _Mapping]] = ...) -> None: ...

class Board(_message.Message):
    __slots__ = ("model", "soc", "l4t", "jetpack", "power_mode", "super_firmware", "kernel")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOC_FIELD_NUMBER: _ClassVar[int]
    L4T_FIELD_NUMBER: _ClassVar[int]
    JETPACK_FIELD_NUMBER: _ClassVar[int]
    POWER_MODE_FIELD_NUMBER: _ClassVar[int]
    SUPER_FIRMWARE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    soc: str
    l4t: str
    jetpack: str
    power_mode: str
    super_firmware: bool
    kernel: str
    def __init__(self, model: _Optional[str] = ..., soc: _Optional[str] = ..., l4t: _Optional[str] = ..., jetpack: _Optional[str] = ..., power_mode: _Optional[str] = ..., super_firmware: _Optional[bool] = ..., kernel: _Optional[str] = ...) -> None: ...

class SensorReading(_message.Message):
    __slots__ = ("kind", "name", "value", "unit", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    value: float
    unit: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., value: _Optional[float] = ..., unit: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class MemoryReading(_message.Message):
    __slots__ = ("kind", "size_bytes", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    size_bytes: int
    source: str
    def __init__(self, kind: _Optional[str] = ..., size_bytes: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class ModelReading(_message.Message):
    __slots__ = ("name", "version", "state", "platform", "device", "success_count", "failure_count", "stages", "load_memory_bytes", "drops", "tiers", "executions", "nonfinite_count", "tier_latencies", "metrics", "energy")
    class ExecutionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LOAD_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EXECUTIONS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_LATENCIES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    state: str
    platform: str
    device: str
    success_count: int
    failure_count: int
    stages: _containers.RepeatedCompositeFieldContainer[StageReading]
    load_memory_bytes: int
    drops: _containers.RepeatedCompositeFieldContainer[DropReading]
    tiers: _containers.RepeatedCompositeFieldContainer[TierReading]
    executions: _containers.ScalarMap[int, int]
    nonfinite_count: int
    tier_latencies: _containers.RepeatedCompositeFieldContainer[TierLatency]
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    energy: _containers.RepeatedCompositeFieldContainer[EnergyReading]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., platform: _Optional[str] = ..., device: _Optional[str] = ..., success_count: _Optional[int] = ..., failure_count: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageReading, _Mapping]]] = ..., load_memory_bytes: _Optional[int] = ..., drops: _Optional[_Iterable[_Union[DropReading, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierReading, _Mapping]]] = ..., executions: _Optional[_Mapping[int, int]] = ..., nonfinite_count: _Optional[int] = ..., tier_latencies: _Optional[_Iterable[_Union[TierLatency, _Mapping]]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., energy: _Optional[_Iterable[_Union[EnergyReading, _Mapping]]] = ...) -> None: ...

class EnergyReading(_message.Message):
    __slots__ = ("tier", "joules", "requests", "tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    joules: float
    requests: int
    tokens: int
    def __init__(self, tier: _Optional[str] = ..., joules: _Optional[float] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "labels", "value", "unit")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.ScalarMap[str, str]
    value: float
    unit: str
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ..., unit: _Optional[str] = ...) -> None: ...

class TierLatency(_message.Message):
    __slots__ = ("tier", "stages")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    stages: _containers.RepeatedCompositeFieldContainer[StageReading]
    def __init__(self, tier: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageReading, _Mapping]]] = ...) -> None: ...

class DropReading(_message.Message):
    __slots__ = ("reason", "place", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    place: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., place: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class TierReading(_message.Message):
    __slots__ = ("tier", "reason", "count")
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    reason: str
    count: int
    def __init__(self, tier: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StageReading(_message.Message):
    __slots__ = ("stage", "count", "total_ns", "p50_ns", "p95_ns", "p99_ns", "bucket_counts")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    P50_NS_FIELD_NUMBER: _ClassVar[int]
    P95_NS_FIELD_NUMBER: _ClassVar[int]
    P99_NS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNTS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    count: int
    total_ns: int
    p50_ns: int
    p95_ns: int
    p99_ns: int
    bucket_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage: _Optional[str] = ..., count: _Optional[int] = ..., total_ns: _Optional[int] = ..., p50_ns: _Optional[int] = ..., p95_ns: _Optional[int] = ..., p99_ns: _Optional[int] = ..., bucket_counts: _Optional[_Iterable[int]] = ...) -> None: ...

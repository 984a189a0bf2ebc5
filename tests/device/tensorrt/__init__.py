"""A double of NVIDIA's ``tensorrt`` for tests: its engines compute with ONNX Runtime on the software CUDA device.

``SOFTWARE_TENSORRT_VERSION`` chooses the version that it stands for, before it is imported. README.md in the directory
above says what it models and what it cannot show.
"""

# ruff: noqa: F401

from .builder import Builder, IBuilderConfig, IOptimizationProfile, IProgressMonitor, ITimingCache
from .context import IExecutionContext
from .engine import ICudaEngine, Runtime
from .enums import (
    BuilderFlag,
    DataType,
    Dims,
    ErrorCode,
    ExecutionContextAllocationStrategy,
    GatherMode,
    LayerType,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParserFlag,
    ProfilingVerbosity,
    TensorIOMode,
    TensorLocation,
    nptype,
)
from .logger import ILogger
from .memory import IHostMemory
from .network import IGatherLayer, ILayer, INetworkDefinition, ITensor
from .parser import OnnxParser, ParserError
from .versions import VERSION_TEXT as __version__

bool = DataType.BOOL
bfloat16 = DataType.BF16
float16 = DataType.HALF
float32 = DataType.FLOAT
int32 = DataType.INT32
int64 = DataType.INT64
int8 = DataType.INT8
uint8 = DataType.UINT8

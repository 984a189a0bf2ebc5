"""A double of NVIDIA's ``tensorrt`` for tests: its engines compute with ONNX Runtime on the software CUDA device.

``SOFTWARE_TENSORRT_VERSION`` chooses the version that it stands for, before it is imported. README.md in the directory
above says what it models and what it cannot show.
"""

# ruff: noqa: F401

from .builder import Builder, IBuilderConfig, IOptimizationProfile, IProgressMonitor, ITimingCache
from .context import IExecutionContext
from .engine import ICudaEngine, IHostMemory, Runtime
from .native import VERSION_TEXT as __version__
from .native import (
    BuilderFlag,
    DataType,
    Dims,
    ExecutionContextAllocationStrategy,
    GatherMode,
    ILogger,
    LayerType,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    TensorIOMode,
    TensorLocation,
    nptype,
)
from .parser import IGatherLayer, ILayer, INetworkDefinition, ITensor, OnnxParser

"""The seam for runtimes: what one has to be able to do to build, load and serve the models of a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Artifact, Tensors, Tier
from edge.runner import Runner

#: Called during a build with the current phase, its finished steps and all its steps. It must not raise.
Progress = Callable[[str, int, int], None]


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a compiler while it built an engine.

    Attributes:
        builder: the compiler's package.
        version: its version.
        layers: of the network as it was parsed; an engine's own layers can be inspected only on its GPU.
        attention_blocks: how many softmaxes stand between two matrix products.
        attention_fused: whether the engine holds a fused attention kernel; None where there is no attention.
        attention: both, and the reason where it is known, for people.
        seconds: how long it took.
        warnings: the last warnings and errors of the compiler's log.
    """

    builder: str
    version: str
    layers: int
    attention_blocks: int
    attention_fused: bool | None
    attention: str
    seconds: float
    warnings: tuple[str, ...]


class Product(NamedTuple):
    """The result of a build: a file's name and bytes, and the compiler's report where there is one."""

    file: str
    data: bytes
    engine: EngineReport | None = None


class Suitability(NamedTuple):
    """Whether the target ``auto`` takes a runtime on this machine, and why, in one sentence."""

    suitable: bool
    reason: str


@dataclass(frozen=True)
class Source:
    """One tier's ONNX file in a bundle, and all that a runtime has to know to build or load it."""

    bundle: Bundle
    tier: Tier
    artifact: Artifact

    @classmethod
    def of(cls, bundle: Bundle, runtime: Runtime, tier: str | None = None) -> Source:
        """Return the file that a runtime uses of a tier; None is the full tier.

        Raises:
            BundleError: there is no such tier, or it has no file for this runtime.
        """
        return cls(bundle, bundle.tier(tier), bundle.artifact(runtime.artifact_runtime, tier))

    @property
    def subject(self) -> str:
        """The name of the model in errors."""
        return f"model {self.bundle.path / self.artifact.file}"

    @property
    def onnx_sha256(self) -> str:
        """The hash of the file."""
        return self.bundle.manifest.files[self.artifact.file].sha256

    @property
    def tensors(self) -> Tensors:
        """The inputs and outputs that the file must have, and a profile for each input with a dynamic dimension."""
        return self.bundle.manifest.tensors(self.artifact)

    def read(self) -> bytes:
        """Return the bytes of the file, hashed as they are read.

        Raises:
            BundleError: the file has changed since the bundle was opened.
        """
        return self.bundle.read(self.artifact.file)


class Runtime(ABC):
    """A runtime on a device. Each subclass has a file of its own and an entry in :mod:`edge.runtimes.table`.

    Args:
        parameter: the text after the colon of the target; empty for a runtime without a parameter.
        reason: why this runtime was chosen, as sentences.

    Attributes:
        name: the target's name, without the parameter.
        parameter: the name of its parameter in the help of ``--target``; empty for none.
        artifact_runtime: whose files of a bundle it runs, ``onnxruntime`` or ``tensorrt``, as manifests name them.
        build_only: whether it compiles for another machine, so that :meth:`load` refuses and no golden check runs.
        thread_bound: whether only the thread that loaded a runner may call it, as with a GPU's context.
        device: ``CPU``, ``GPU``, or the compute capability that it compiles for, such as ``SM86``.
    """

    name: ClassVar[str]
    parameter: ClassVar[str] = ""
    artifact_runtime: ClassVar[str]
    build_only: ClassVar[bool] = False
    thread_bound: ClassVar[bool] = False
    device: str

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        self.reason = reason

    @classmethod
    def target(cls) -> str:
        """Return how ``--target`` names it, for help."""
        return f"{cls.name}:{cls.parameter}" if cls.parameter else cls.name

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Return its version.

        Raises:
            BackendError: it is not installed, or cannot use its device.
        """

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return whether ``auto`` takes it on this machine; None for a runtime that ``auto`` never considers."""
        return None

    def cache_key(self) -> tuple[str, ...]:
        """Return everything beside the model and the processor that makes a build unusable elsewhere.

        Raises:
            BackendError: as :meth:`version`.
        """
        return (self.name, self.version(), self.device)

    def row_independent(self, artifact: Artifact) -> bool:
        """Return whether a row's outputs do not depend on the other rows of its run, so that requests may share it."""
        return True

    @abstractmethod
    def build(self, source: Source, progress: Progress | None = None) -> Product:
        """Make the file to load. It may take minutes, and may use a process of its own.

        Raises:
            BundleError: the model is broken.
            BackendError: the runtime is not installed, or cannot build the model.
            OSError: the disk is full.
        """

    @abstractmethod
    def load(self, source: Source, built: bytes | None) -> Runner:
        """Load a model on the calling thread.

        Args:
            source: the ONNX file.
            built: the product of :meth:`build`; None where the cache has none, to load the ONNX file itself.

        Raises:
            UsageError: this runtime only builds.
            BundleError: the model is broken.
            BackendError: the runtime is not installed, or cannot load the model.
        """

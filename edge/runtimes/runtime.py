"""Interface of a runtime, which builds and loads the models of bundles, and the types that it shares with callers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Artifact, Tensors, Tier
from edge.runner import Runner

#: The default workspace of a build. TensorRT's own default is the whole memory of the device.
DEFAULT_WORKSPACE_BYTES = 512 * 1024**2


class BuildProgress(msgspec.Struct, frozen=True):
    """The progress of a build: the compiler's name of the current step, and the fraction done, which never falls."""

    phase: str
    fraction: float
    seconds_left: float | None = None  # an estimate; None at first

    def __str__(self) -> str:
        """Return the progress for people, such as ``42 %, 3 min left``."""
        left = self.seconds_left
        if left is None:
            return f"{self.fraction * 100:.0f} %"
        return f"{self.fraction * 100:.0f} %, {f'{left:.0f} s' if left < 90 else f'{left / 60:.0f} min'} left"


#: Called during a build. It must not raise.
Progress = Callable[[BuildProgress], None]


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a build. A runtime ignores those that do not apply to it.

    Attributes:
        workspace_bytes: the scratch memory that one layer of an engine may use.
        require_fused_attention: whether unfused attention is an error.
        ignore_memory: whether to build even if the estimate exceeds the available memory.
        timing_cache: the file of kernel times that builds for the same device share; None keeps none.
    """

    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    require_fused_attention: bool = False
    ignore_memory: bool = False
    timing_cache: Path | None = None


class BuildMemory(NamedTuple):
    """The estimated peak memory of a build."""

    size_bytes: int
    pinned_bytes: int  # the device's part, which swap cannot back


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The compiler's report of a build.

    Attributes:
        builder: the compiler's package, and ``version`` its version.
        layers: of the parsed network; the engine's own layers can be inspected only on its GPU.
        attention_blocks: the number of softmaxes between two matrix products.
        attention_fused: whether the engine has a fused attention kernel; None without attention.
        attention: the blocks, whether they are fused, and the known obstacles, for people.
        warnings: the last warnings and errors of the compiler's log.
        typing: ``strong`` if the datatypes are those of the ONNX file, ``weak`` if the compiler chose them.
        typing_reason: why they are weak; empty otherwise.
        profiles: the optimization profiles, as shapes.
        skipped_tactics: the number of kernels that the compiler skipped for lack of memory.
        timing_cache: ``reused`` if kernel times of earlier builds were, ``new`` if there were none, or ``off``.
        index_limits: the rows of the smallest table that each input indexes.
        notes: reasons why the engine is slower or less exact than it could be, with the way out; logged at each load.
    """

    builder: str
    version: str
    layers: int
    attention_blocks: int
    attention_fused: bool | None
    attention: str
    seconds: float
    warnings: tuple[str, ...]
    typing: str = "strong"
    typing_reason: str = ""
    profiles: tuple[str, ...] = ()
    skipped_tactics: int = 0
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    timing_cache: str = "off"
    index_limits: dict[str, int] = {}
    notes: tuple[str, ...] = ()

    @property
    def all_fused(self) -> bool:
        """Whether every attention block became one kernel; True without attention."""
        return not self.attention_blocks or self.attention.endswith(", fused")


class Product(NamedTuple):
    """The result of a build: a file's name and bytes, and the compiler's report, if it has one."""

    file: str
    data: bytes
    engine: EngineReport | None = None


class Suitability(NamedTuple):
    """Whether the target ``auto`` may choose a runtime on this machine, and the reason in one sentence."""

    suitable: bool
    reason: str


@dataclass(frozen=True)
class Source:
    """One tier's ONNX file in a bundle, and everything that a runtime needs to build or load it."""

    bundle: Bundle
    tier: Tier
    artifact: Artifact

    @classmethod
    def of(cls, bundle: Bundle, runtime: Runtime, tier: str | None = None) -> Source:
        """Return the file of a tier for a runtime; None is the full tier.

        Raises:
            BundleError: there is no such tier, or it has no file for this runtime.
        """
        return cls(bundle, bundle.tier(tier), runtime.artifact(bundle, tier))

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
        """The inputs and outputs that the file must have, and a profile for each dynamic input."""
        return self.bundle.manifest.tensors(self.artifact)

    def read(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            BundleError: its hash has changed since the bundle was opened.
        """
        return self.bundle.read(self.artifact.file)


class Runtime(ABC):
    """A runtime on a device. Each subclass has an entry in :mod:`edge.runtimes.table`.

    Args:
        parameter: the text after the colon of the target; empty if there is none.
        reason: why this runtime was chosen, as sentences.

    Attributes:
        name: the target's name, without the parameter.
        parameter: the name of its parameter in the help of ``--target``; empty if it has none.
        artifact_runtime: the files of a bundle that it runs: ``onnxruntime`` or ``tensorrt``, as in the manifest.
        build_only: whether it compiles for another machine, so that :meth:`load` raises and no golden check runs.
        isolated_build: whether it builds in a child process, whose exit frees all its memory, and loads only builds.
        thread_bound: whether only the thread that loaded a runner may call it, as with a GPU's context.
        few_shapes: whether a run is faster if its shapes have occurred before, as with CUDA graphs.
        device: ``CPU``, ``GPU``, or the compute capability that it compiles for, such as ``SM86``.
    """

    name: ClassVar[str]
    parameter: ClassVar[str] = ""
    artifact_runtime: ClassVar[str]
    build_only: ClassVar[bool] = False
    isolated_build: ClassVar[bool] = False
    thread_bound: ClassVar[bool] = False
    few_shapes: ClassVar[bool] = False
    device: str

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        self.reason = reason
        self.given_parameter = parameter

    @classmethod
    def target(cls) -> str:
        """Return the value of ``--target`` for help."""
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
        """Return whether ``auto`` may choose it on this machine; None if ``auto`` never does."""
        return None

    def cache_key(self) -> dict[str, str]:
        """Return everything beside the model and the processor that a build depends on.

        Raises:
            BackendError: see :meth:`version`.
        """
        return {"runtime": self.name, "version": self.version(), "device": self.device}

    def build_key(self, source: Source) -> dict[str, str]:
        """Return everything else that the build of a model depends on beside its files and :meth:`cache_key`."""
        return {}

    def build_command(self, source: Source) -> str:
        """Return the command that builds a model for this runtime."""
        target = f"{self.name}:{self.given_parameter}" if self.given_parameter else self.name
        tier = "" if source.tier is source.bundle.manifest.tiers[0] else f" --tier {source.tier.name}"
        return f"fewheads build {source.bundle.path} --target {target}{tier}"

    def artifact(self, bundle: Bundle, tier: str | None = None) -> Artifact:
        """Return the file of a tier for this runtime; None is the full tier.

        Raises:
            BundleError: there is no such tier, or it has no file for this runtime.
        """
        return bundle.artifact(self.artifact_runtime, tier)

    def build_memory(self, source: Source, options: BuildOptions) -> BuildMemory | None:
        """Return the estimated peak memory of a build; None if it needs no check."""
        return None

    def row_independent(self, artifact: Artifact) -> bool:
        """Return whether a row's outputs do not depend on the other rows, so that requests may share a run."""
        return True

    @abstractmethod
    def build(self, source: Source, options: BuildOptions, progress: Progress | None = None) -> Product:
        """Build the file to load. It may take minutes.

        Raises:
            BundleError: the model is broken.
            BackendError: the runtime is not installed, or cannot build the model.
            OSError: the disk is full.
        """

    @abstractmethod
    def load(self, source: Source, built: Product | None) -> Runner:
        """Load a model on the calling thread.

        Args:
            source: the model.
            built: the build; None loads the ONNX file itself.

        Raises:
            UsageError: this runtime only builds.
            BundleError: the model is broken.
            BackendError: the runtime is not installed, or cannot load the model.
        """

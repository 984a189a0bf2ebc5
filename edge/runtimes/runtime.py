"""Interface of a runtime, which builds and loads the models of bundles, and the types that it shares with callers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec

from edge.bundles.bundle import Bundle
from edge.bundles.fields import Role
from edge.bundles.manifest import Artifact, Tensors, Tier
from edge.errors import UsageError
from edge.runner import Runner

#: The default workspace of a build. TensorRT's own default is the whole memory of the device.
DEFAULT_WORKSPACE_BYTES = 512 * 1024**2


class BuildProgress(msgspec.Struct, frozen=True):
    """The progress of a build: the compiler's name of the current step, and the fraction done, which never falls."""

    phase: str
    fraction: float
    seconds_left: float | None = None  # an estimate; None at first

    def __str__(self) -> str:
        left = self.seconds_left
        if left is None:
            return f"{self.fraction * 100:.0f} %"
        return f"{self.fraction * 100:.0f} %, {f'{left:.0f} s' if left < 90 else f'{left / 60:.0f} min'} left"


#: Called during a build. It must not raise.
Progress = Callable[[BuildProgress], None]


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a build. A runtime ignores those that do not apply to it."""

    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES  # the scratch memory that one layer of an engine may use
    require_fused_attention: bool = False  # whether unfused attention is an error
    ignore_memory: bool = False  # whether to build even if the estimate exceeds the available memory
    timing_cache: Path | None = None  # the file of kernel times that builds for the same device share; None keeps none


class BuildMemory(NamedTuple):
    """The estimated peak memory of a build."""

    size_bytes: int
    pinned_bytes: int  # the device's part, which swap cannot back


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The compiler's report of a build."""

    builder: str  # the compiler's package
    version: str  # of the compiler
    layers: int  # of the parsed network; the engine's own layers can be inspected only on its GPU
    attention_blocks: int  # the number of softmaxes between two matrix products
    attention_fused: bool | None  # whether the engine has a fused attention kernel; None without attention
    attention: str  # the blocks, whether they are fused, and the known obstacles, for people
    seconds: float
    warnings: tuple[str, ...]  # the last warnings and errors of the compiler's log
    profiles: tuple[str, ...] = ()  # the optimization profiles, as shapes
    skipped_tactics: int = 0  # the number of kernels that the compiler skipped for lack of memory
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    timing_cache: str = "off"  # "reused" if kernel times of earlier builds were, "new" if there were none
    index_limits: dict[str, int] = {}  # the rows of the smallest table that each input indexes
    notes: tuple[str, ...] = ()  # why it is slower or less exact than it could be, with the way out; logged at loads

    @property
    def all_fused(self) -> bool:
        """Whether every attention block became one kernel; True without attention."""
        return not self.attention_blocks or self.attention.endswith(", fused")


class Product(NamedTuple):
    """The result of a build: a file's name and bytes, and the compiler's report, if it has one."""

    file: str
    data: bytes
    report: EngineReport | None = None


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
    def of(cls, bundle: Bundle, runtime: Runtime, tier: str | None = None, role: Role = "model") -> Source:
        """Return the file of a tier and role for a runtime; see :meth:`Runtime.artifact`."""
        return cls(bundle, bundle.tier(tier), runtime.artifact(bundle, tier, role))

    @property
    def subject(self) -> str:
        """The name of the model in errors."""
        return f"model {self.bundle.path / self.artifact.file}"

    @property
    def onnx_sha256(self) -> str:
        return self.bundle.manifest.files[self.artifact.file].sha256

    @property
    def tensors(self) -> Tensors:
        """The inputs and outputs that the file must have, and a profile for each dynamic input."""
        return self.bundle.manifest.tensors(self.artifact)

    def read(self) -> bytes:
        """Return the bytes of the file; raise a BundleError if its hash has changed since the bundle was opened."""
        return self.bundle.read(self.artifact.file)


class Runtime(ABC):
    """A runtime on a device. Each subclass has an entry in :mod:`edge.runtimes.table`."""

    #: The target's name, without the parameter.
    name: ClassVar[str]
    #: The name of its parameter in the help of ``--target``; empty if it has none.
    parameter: ClassVar[str] = ""
    #: The files of a bundle that it runs: ``onnxruntime`` or ``tensorrt``, as in the manifest.
    artifact_runtime: ClassVar[str]
    #: Whether it compiles for another machine, so that no golden check runs and no model is loaded.
    build_only: ClassVar[bool] = False
    #: Whether it builds in a child process, whose exit frees all its memory, and loads only builds.
    isolated_build: ClassVar[bool] = False
    #: Whether only the thread that loaded a runner may call it, as with a GPU's context.
    thread_bound: ClassVar[bool] = False
    #: Whether a run is faster if its shapes have occurred before, as with CUDA graphs.
    few_shapes: ClassVar[bool] = False
    #: How often a loaded file has room for each of its tensors at its largest, on host and device together; 0 if each
    #: run allocates them.
    tensor_buffers: ClassVar[int] = 0
    #: ``CPU``, ``GPU``, or the compute capability that it compiles for, such as ``SM86``.
    device: str

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        self.reason = reason  # why it was chosen, as sentences
        self.given_parameter = parameter  # the text after the colon of the target
        self._given_target = f"{self.name}:{parameter}" if parameter else self.name

    @classmethod
    def target(cls) -> str:
        """Return the value of ``--target`` for help."""
        return f"{cls.name}:{cls.parameter}" if cls.parameter else cls.name

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Return its version; raise a BackendError if it is not installed, or cannot use its device."""

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return whether ``auto`` may choose it on this machine; None if ``auto`` never does."""
        return None

    def cache_key(self) -> dict[str, str]:
        """Return everything beside the model and the processor that a build depends on."""
        return {"runtime": self.name, "version": self.version(), "device": self.device}

    def build_key(self, source: Source) -> dict[str, str]:
        """Return everything else that the build of a model depends on beside its files and :meth:`cache_key`."""
        return {}

    def build_command(self, source: Source) -> str:
        """Return the command that builds a model for this runtime."""
        tier = "" if source.tier is source.bundle.manifest.tiers[0] else f" --tier {source.tier.name}"
        return f"fewheads build {source.bundle.path} --target {self._given_target}{tier}"

    def only_builds(self) -> UsageError:
        """Return the error of a target that only builds, where models are to be run."""
        expected, fix = "a target that this program can run", "Its engines only prove that a model compiles; take auto."
        return UsageError("--target", given=self._given_target, expected=expected, fix=fix)

    def artifact(self, bundle: Bundle, tier: str | None = None, role: Role = "model") -> Artifact:
        """Return the file of a tier, None for the full one; raise a BundleError if there is none for this runtime."""
        return bundle.artifact(self.artifact_runtime, tier, role)

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
        """Load a build, or the ONNX file itself if ``built`` is None, on the calling thread.

        Raise a BundleError if the model is broken, and a BackendError if the runtime is not installed, or cannot load
        the model.
        """

"""The interface of a runtime: it builds, loads and serves the models of bundles."""

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

#: The workspace of a build where nothing else is set: TensorRT's own default is the whole memory of the device.
DEFAULT_WORKSPACE_BYTES = 512 * 1024**2


class BuildProgress(msgspec.Struct, frozen=True):
    """The position of a build.

    Attributes:
        phase: the current step, in the compiler's words.
        fraction: of the build that is done, 0 to 1; it never falls.
        seconds_left: the estimated time to the end; None while nothing is known.
    """

    phase: str
    fraction: float
    seconds_left: float | None = None

    def __str__(self) -> str:
        """Return the position for people, such as ``42 %, 3 min left``."""
        left = self.seconds_left
        if left is None:
            return f"{self.fraction * 100:.0f} %"
        return f"{self.fraction * 100:.0f} %, {f'{left:.0f} s' if left < 90 else f'{left / 60:.0f} min'} left"


#: Called during a build. It must not raise.
Progress = Callable[[BuildProgress], None]


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a build. A runtime ignores those that do not concern it.

    Attributes:
        workspace_bytes: the scratch memory that one layer of an engine may use.
        require_fused_attention: whether an engine whose attention is not one fused kernel is an error.
        ignore_memory: whether to build although the memory does not suffice by the estimate.
        timing_cache: the file of measured kernel times that builds for the same device share; None keeps none.
    """

    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    require_fused_attention: bool = False
    ignore_memory: bool = False
    timing_cache: Path | None = None


class BuildMemory(NamedTuple):
    """The estimated peak memory of a build.

    Attributes:
        size_bytes: all of it.
        pinned_bytes: the part that the device holds, which swap cannot back.
    """

    size_bytes: int
    pinned_bytes: int


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
        typing: ``strong`` where the datatypes are those of the ONNX file, ``weak`` where the compiler chose them.
        typing_reason: why they are weak; empty otherwise.
        profiles: the optimization profiles, each as the shapes for which it is tuned.
        skipped_tactics: how many kernels the compiler did not try for lack of memory.
        workspace_bytes: the scratch memory that one layer may use.
        timing_cache: whether measured kernel times of earlier builds were ``reused``; ``new`` where there were none,
            ``off`` where none are kept.
        index_limits: of each input whose values index a table of the model, the rows of its smallest table.
        notes: what makes the engine slower or less exact than it could be, and the way out; shown when it is loaded.
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
        """Whether every attention block became one kernel; True where there is none."""
        return not self.attention_blocks or self.attention.endswith(", fused")


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
        isolated_build: whether a build runs in a child process, which gives all its memory back when it exits, and
            :meth:`load` takes nothing but a build.
        thread_bound: whether only the thread that loaded a runner may call it, as with a GPU's context.
        few_shapes: whether a run is faster if its shapes came before, as with CUDA graphs.
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

    def cache_key(self) -> dict[str, str]:
        """Return everything beside the model and the processor that makes a build unusable elsewhere, by its name.

        Raises:
            BackendError: as :meth:`version`.
        """
        return {"runtime": self.name, "version": self.version(), "device": self.device}

    def build_key(self, source: Source) -> dict[str, str]:
        """Return what a build of a model depends on beside its files and :meth:`cache_key`, by its name."""
        return {}

    def build_command(self, source: Source) -> str:
        """Return the command that builds a model for this runtime."""
        target = f"{self.name}:{self.given_parameter}" if self.given_parameter else self.name
        tier = "" if source.tier is source.bundle.manifest.tiers[0] else f" --tier {source.tier.name}"
        return f"fewheads build {source.bundle.path} --target {target}{tier}"

    def artifact(self, bundle: Bundle, tier: str | None = None) -> Artifact:
        """Return the file that it uses of a tier; None is the full tier.

        Raises:
            BundleError: there is no such tier, or it has no file for this runtime.
        """
        return bundle.artifact(self.artifact_runtime, tier)

    def build_memory(self, source: Source, options: BuildOptions) -> BuildMemory | None:
        """Return the estimated peak memory of a build; None where it is not worth a check."""
        return None

    def row_independent(self, artifact: Artifact) -> bool:
        """Return whether a row's outputs do not depend on the other rows of its run, so that requests may share it."""
        return True

    @abstractmethod
    def build(
        self,
        source: Source,
        options: BuildOptions = BuildOptions(),  # noqa: B008 - it is frozen
        progress: Progress | None = None,
    ) -> Product:
        """Make the file to load. It may take minutes.

        Args:
            source: the ONNX file.
            options: how to build.
            progress: called as the build goes on.

        Raises:
            BundleError: the model is broken.
            BackendError: the runtime is not installed, or cannot build the model.
            OSError: the disk is full.
        """

    @abstractmethod
    def load(self, source: Source, built: Product | None) -> Runner:
        """Load a model on the calling thread.

        Args:
            source: the ONNX file.
            built: what :meth:`build` returned; None where the cache has none, to load the ONNX file itself.

        Raises:
            UsageError: this runtime only builds.
            BundleError: the model is broken.
            BackendError: the runtime is not installed, or cannot load the model.
        """

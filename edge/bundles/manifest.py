"""Fields of ``manifest.json``, which ``msgspec`` checks as it decodes. FORMAT.md beside this file gives the reasons.

A decoded manifest must also pass :func:`edge.bundles.rules.check`, which holds the rules that span fields.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from edge.bundles.fields import MOST_BLOCKS, FileName, ModelName, Positive, Role, Sha256, Space, Struct, Text
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.bundles.steps import Postprocess, Preprocess
from edge.datatypes import TensorName, TensorSpec
from edge.files import sha256

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Shape = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=8)]
TensorSpecs = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
#: Of one file, such as the cache of a decoder with many layers.
FileTensorSpecs = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
Precision = Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]


class _Latency(Struct, frozen=True, kw_only=True):
    """A latency of a tier, for people: a device learns its own times, and no policy reads these."""

    device: Text  # the processor, or the board
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(onnxruntime|tensorrt)$")]  # of several files, of the last one
    precision: Precision
    part: Text | None = None  # of a request that needs several runs, such as ``prefill``
    rows: Positive  # of one run
    tokens: Positive | None = None  # of each row; None where the model's inputs have a fixed size
    milliseconds: AboveZero  # of one run, or of all runs of a part, without server and network
    times_faster: AboveZero  # the first tier's latency over this one, from the same source, part, rows and tokens


class MeasuredLatency(_Latency, frozen=True, kw_only=True, tag="measured", tag_field="source"):
    """The median of ``calls`` runs on one thread, in turns with the other tiers."""

    calls: Positive


class PredictedLatency(_Latency, frozen=True, kw_only=True, tag="prediction", tag_field="source"):
    """A prediction for a board in a power mode, on which nothing was measured; a measurement is expected between
    ``low_ms`` and ``high_ms``.
    """

    power_mode: Text
    low_ms: AboveZero
    high_ms: AboveZero


Latency = MeasuredLatency | PredictedLatency


class FileRecord(Struct, frozen=True):
    """Size and hash of one file, both checked before any of its bytes is used."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Sha256


class Profile(Struct, frozen=True):
    """The shapes that an input may have: TensorRT's optimization profile. Runtimes tune for ``opt``."""

    min: Shape
    opt: Shape
    max: Shape


class Tolerance(Struct, frozen=True):
    """The allowed difference from a golden output: ``|got - golden| <= atol + rtol * |golden|``.

    With ``rms``, the root mean square of the differences of all values of an output is limited, too: rounding moves a
    few values far, and a broken file moves all of them. ``outputs`` has the ``atol`` of single outputs, in place of the
    common one: those of one graph may differ in size by orders of magnitude.
    """

    atol: NonNegative
    rtol: NonNegative
    rms: NonNegative | None = None
    outputs: dict[TensorName, NonNegative] = msgspec.field(default_factory=dict)


class Artifact(Struct, frozen=True):
    """One ONNX file of a tier, for a runtime, with the precision of its weights and activations.

    Without inputs, outputs or a golden set of its own, it has the manifest's or its tier's.
    A model in INT8 with fixed scales has one, the outputs of this very file: its rounding is not an error.

    ``more_profiles`` are further sets of shapes, such as those of single tokens beside those of prompts. A run needs
    one set that admits all its inputs, and TensorRT tunes for each.
    """

    file: FileName
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(any|onnxruntime|tensorrt)$")]
    precision: Precision
    opset: Annotated[int, msgspec.Meta(ge=13, le=20)]
    tolerance: Tolerance
    role: Role = "model"
    inputs: FileTensorSpecs | None = None
    outputs: FileTensorSpecs | None = None
    profile: dict[TensorName, Profile] = msgspec.field(default_factory=dict)
    more_profiles: Annotated[tuple[dict[TensorName, Profile], ...], msgspec.Meta(max_length=7)] = ()
    golden: FileName | None = None


class Tensors(NamedTuple):
    """The inputs and outputs of an ONNX file, and a profile for each input with a -1, once or several times."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: dict[str, Profile]
    more_profiles: tuple[dict[str, Profile], ...] = ()

    @property
    def profiles(self) -> tuple[dict[str, Profile], ...]:
        """All sets of profiles; none for fixed shapes."""
        return (self.profile, *self.more_profiles) if self.profile else ()


class Tier(Struct, frozen=True):
    """One size of the model. The first tier of a bundle is the full one, later ones are leaner.

    A tier that computes other values than the full one has a golden set of its own; the others use the bundle's.
    ``latencies`` are for people; no policy reads them. Embeddings of all tiers with the same ``space``, of this bundle
    and of others, can be compared with one another.
    """

    name: ModelName
    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=2 * MOST_BLOCKS)]
    golden: FileName | None = None
    latencies: Annotated[tuple[Latency, ...], msgspec.Meta(max_length=64)] = ()
    space: Space | None = None


class Serving(Struct, frozen=True):
    """Serving defaults of the model; a server's options override them.

    A policy of None is ``router`` where the program is the default, else ``pinned``, the full tier. A request that
    finds the server busy may wait ``max_queue_delay_us`` for others to join it.
    """

    policy: Annotated[str, msgspec.Meta(pattern=r"^(pinned|router|deadline|load)$")] | None = None
    max_queue_delay_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    preferred_batch_sizes: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=16)] = ()


class Measure(Struct, frozen=True):
    """One measured accuracy: the metric, the data, the numbers of items and seeds, and a 95 % interval if known."""

    metric: Text
    split: Text
    value: float
    n: Positive
    seeds: Positive = 1
    interval: tuple[float, float] | None = None


class Provenance(Struct, frozen=True):
    """The origin of the weights. ``versions`` names the packages that trained and exported them."""

    created: Text
    trainer: Text
    data: Text
    seed: int | None = None
    git_commit: Text | None = None
    versions: dict[str, Text] = msgspec.field(default_factory=dict)


class Manifest(Struct, frozen=True, tag=FORMAT_VERSION, tag_field="format_version"):
    """``manifest.json`` of version 2: everything that the device knows of a model before it opens another file."""

    name: ModelName
    version: Positive
    description: Text
    inputs: TensorSpecs
    outputs: TensorSpecs
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    profile: dict[TensorName, Profile]
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName
    files: Annotated[dict[FileName, FileRecord], msgspec.Meta(max_length=8 * MOST_BLOCKS)]
    provenance: Provenance
    preprocess: Preprocess | None = None
    postprocess: Postprocess | None = None
    serving: Serving | None = None
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()
    program: CascadeProgram | LoopProgram | GenerateProgram | HeadProgram | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the files that compute a response together."""
        return self.program.roles if self.program else ("model",)

    @property
    def space(self) -> str | None:
        """The space of the embeddings, whichever tier computes them; None unless all tiers state one."""
        return self.tiers[0].space if all(tier.space for tier in self.tiers) else None

    @property
    def weights_sha256(self) -> str:
        """The SHA-256 of the full tier's first file; of a decoder in blocks, that of the hashes of each one's first."""
        files = {one.role: one.file for one in reversed(self.tiers[0].artifacts)}
        hashes = [self.files[files[role]].sha256 for role in self.roles]
        return hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode())

    def tensors(self, artifact: Artifact) -> Tensors:
        """Return the tensors that the ONNX graph of an artifact must have: its own, else the manifest's."""
        return Tensors(
            self.inputs if artifact.inputs is None else artifact.inputs,
            self.outputs if artifact.outputs is None else artifact.outputs,
            self.profile if artifact.inputs is None else artifact.profile,
            artifact.more_profiles,
        )

    def batch_size(self, artifact: Artifact) -> int:
        """Return the most rows of one run of an artifact; 0 if some of its tensors have none, as the keys of a head."""
        return 0 if artifact.role == "head" and isinstance(self.program, HeadProgram) else self.max_batch_size


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``manifest.json``, version 2."""
    return msgspec.json.schema(Manifest)

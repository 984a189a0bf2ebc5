"""Fields of ``manifest.json``, which ``msgspec`` checks as it decodes. FORMAT.md beside this file gives the reasons.

A decoded manifest must also pass :func:`edge.bundles.rules.check`, which holds the rules that span fields.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from edge.bundles.fields import FileName, ModelName, Positive, Role, Sha256, Struct, Text, require
from edge.bundles.latency import Latency
from edge.bundles.programs import CascadeProgram, GenerateProgram, HeadProgram, LoopProgram
from edge.datatypes import TensorName, TensorSpec
from edge.errors import Raw

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Shape = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=8)]
TensorSpecs = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
#: Of one file, such as the cache of a decoder with many layers.
FileTensorSpecs = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]


class FileRecord(Struct, frozen=True):
    """Size and hash of one file, both checked before any of its bytes is used."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Sha256


class Profile(Struct, frozen=True):
    """The shapes that an input may have: TensorRT's optimization profile. Runtimes tune for ``opt``."""

    min: Shape
    opt: Shape
    max: Shape


class ToleranceV1(Struct, frozen=True):
    """The allowed difference from a golden output, in version 1: ``|got - golden| <= atol + rtol * |golden|``."""

    atol: NonNegative
    rtol: NonNegative


class Tolerance(ToleranceV1, frozen=True):
    """The allowed difference from a golden output: ``|got - golden| <= atol + rtol * |golden|``.

    With ``rms``, the root mean square of the differences of all values of an output is limited, too: rounding moves a
    few values far, and a broken file moves all of them. ``outputs`` has the ``atol`` of single outputs, in place of the
    common one: those of one graph may differ in size by orders of magnitude.
    """

    rms: NonNegative | None = None
    outputs: dict[TensorName, NonNegative] = msgspec.field(default_factory=dict)


class ArtifactV1(Struct, frozen=True):
    """One ONNX file of a tier, in version 1: for a runtime, with the precision of its weights and activations."""

    file: FileName
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(any|onnxruntime|tensorrt)$")]
    precision: Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]
    opset: Annotated[int, msgspec.Meta(ge=13, le=20)]
    tolerance: ToleranceV1


class Artifact(ArtifactV1, frozen=True):
    """One ONNX file of a tier. Without inputs, outputs or a golden set of its own, it has the manifest's or its tier's.

    A model in INT8 with fixed scales has one, the outputs of this very file: its rounding is not an error.

    ``more_profiles`` are further sets of shapes, such as those of single tokens beside those of prompts. A run needs
    one set that admits all its inputs, and TensorRT tunes for each.
    """

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


class TierV1(Struct, frozen=True):
    """One size of the model, in version 1."""

    name: ModelName
    artifacts: Annotated[tuple[ArtifactV1, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName | None = None


class Tier(TierV1, frozen=True):
    """One size of the model. The first tier of a bundle is the full one, later ones are leaner.

    A tier that computes other values than the full one has a golden set of its own; the others use the bundle's.
    ``latencies`` are for people; no policy reads them.
    """

    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=8)]
    latencies: Annotated[tuple[Latency, ...], msgspec.Meta(max_length=64)] = ()


class _ArithmeticText(Struct, frozen=True):
    """What steps have in common that read arithmetic text."""

    input: TensorName

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The text inputs of a client."""
        return (_text(self.input),)

    def check(self, manifest: Manifest, subject: str) -> None:
        """Do nothing: the rules of all steps suffice."""


class ExpressionPreprocess(_ArithmeticText, frozen=True, tag="expression", tag_field="type"):
    """Arithmetic text in ``input`` (BYTES) becomes the calculator's tokens in ``output`` (FP32)."""

    output: TensorName
    max_abs_operand: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that this step computes."""
        return (self.output,)


class ArithmeticPreprocess(_ArithmeticText, frozen=True, tag="arithmetic", tag_field="type"):
    """Arithmetic text with products and parentheses in ``input`` (BYTES) becomes tokens, [-1, 64].

    The graph reads the ``kinds`` of the tokens (INT64) and their ``values`` (FP32).
    """

    kinds: TensorName
    values: TensorName
    max_abs_operand: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that this step computes."""
        return (self.kinds, self.values)


class TokenizerPreprocessV1(Struct, frozen=True, tag="tokenizer", tag_field="type"):
    """Text in ``input`` (BYTES) becomes token ids and their mask (INT64), padded to the longest row of the request.

    ``file`` is the ``tokenizer.json`` of Hugging Face's tokenizers. The graph reads ``ids``; ``mask``, 1 for tokens and
    0 for padding; and ``segments``, 1 for tokens of the second text, ``pair``. Rows longer than ``max_length`` tokens
    are cut, of a pair the longer text first; before a program that generates text they are refused.
    """

    input: TensorName
    file: FileName
    ids: TensorName
    mask: TensorName
    max_length: Positive
    pad_id: Annotated[int, msgspec.Meta(ge=0)]
    max_text_bytes: Positive
    pair: TensorName | None = None
    segments: TensorName | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The text inputs of a client; of a pair both."""
        return (_text(self.input), *((_text(self.pair),) if self.pair else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that this step computes."""
        return (self.ids, self.mask, *((self.segments,) if self.segments else ()))

    def check(self, manifest: Manifest, subject: str) -> None:
        """Raise a BundleError if the tokenizer's file is not in the bundle."""
        field, expected = f"files entry for {self.file!r}", "the tokenizer of preprocess"
        require(self.file in manifest.files, subject, field, Raw("nothing"), expected)


class TokenizerPreprocess(TokenizerPreprocessV1, frozen=True, tag="tokenizer", tag_field="type"):
    """The same in version 2, which may also compute ``offsets`` (INT64, [-1, tokens, 2]).

    They are the first character of each token in its text and the one behind its last, and equal for padding and for
    tokens that are not text. A graph that reads them returns them, so that clients find the characters of a token.
    """

    offsets: TensorName | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that this step computes."""
        return (*super().outputs, *((self.offsets,) if self.offsets else ()))

    def check(self, manifest: Manifest, subject: str) -> None:
        """Raise a BundleError if the tokenizer's file is not in the bundle, or offsets have another shape."""
        super().check(manifest, subject)
        spec = next((spec for spec in manifest.inputs if spec.name == self.offsets), None)
        field, expected = f"preprocess output {self.offsets!r}", "INT64 [-1, -1, 2]"
        require(spec in (None, TensorSpec(self.offsets or "", "INT64", (-1, -1, 2))), subject, field, spec, expected)


class ImagePreprocess(Struct, frozen=True, tag="image", tag_field="type"):
    """A JPEG or PNG image in ``input`` (BYTES) becomes pixels in ``output`` (FP32, [-1, channels, size, size]).

    With ``resize`` of ``crop``, the shorter side becomes ``shorter_side`` pixels, by default ``size``, and the middle
    square of ``size`` pixels is kept; with ``stretch``, both sides become ``size``. A value from 0 to 255 becomes
    ``(value / 255 - mean) / std`` of its channel. Images of more than ``max_bytes``, or of more than ``max_pixels``
    before or after the resize, are refused.
    """

    input: TensorName
    output: TensorName
    size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    colours: Literal["rgb", "grey"]
    mean: Annotated[tuple[float, ...], msgspec.Meta(min_length=1, max_length=3)]
    std: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1, max_length=3)]
    max_bytes: Positive
    max_pixels: Positive
    resize: Literal["crop", "stretch"] = "crop"
    shorter_side: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The input of a client, an encoded image in each row."""
        return (_text(self.input),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The input of the graph that this step computes."""
        return (self.output,)

    @property
    def channels(self) -> int:
        """The number of channels in ``output``."""
        return 3 if self.colours == "rgb" else 1

    def check(self, manifest: Manifest, subject: str) -> None:
        """Raise a BundleError unless mean, std and the shape of the graph's input fit size and colours."""
        for name in ("mean", "std"):
            values, expected = getattr(self, name), f"{self.channels} for {self.colours}"
            require(len(values) == self.channels, subject, f"preprocess {name}", values, expected)
        side, expected = self.shorter_side, f"none with {self.resize!r}, else {self.size}, the size, or more"
        holds = side is None or (self.resize == "crop" and side >= self.size)
        require(holds, subject, "preprocess shorter_side", side, expected)
        spec = next(spec for spec in manifest.inputs if spec.name == self.output)
        shape = (-1, self.channels, self.size, self.size)
        holds, given = spec.datatype == "FP32" and spec.shape == shape, Raw(f"{spec.datatype} {list(spec.shape)}")
        require(holds, subject, f"preprocess output {self.output!r}", given, f"FP32 {list(shape)}")


#: The steps before a model, each implemented in :data:`edge.bundles.preprocess.STEPS`. A step states the inputs of a
#: client (``inputs``) and those of the graph that it computes (``outputs``), and checks its own rules (``check``).
Preprocess = ExpressionPreprocess | ArithmeticPreprocess | TokenizerPreprocess | ImagePreprocess
PreprocessV1 = ExpressionPreprocess | TokenizerPreprocessV1


#: Names of the classes, in the order of the logits.
Labels = Annotated[tuple[Text, ...], msgspec.Meta(min_length=2, max_length=4096)]


class LabelPostprocess(Struct, frozen=True, tag="label", tag_field="type"):
    """The label of the largest of ``logits`` (FP32, [-1, labels]) as the text output ``output`` (BYTES, [-1, 1])."""

    logits: TensorName
    output: TensorName
    labels: Labels

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that ``logits`` must have."""
        return (-1, len(self.labels))

    @property
    def made(self) -> TensorSpec:
        """The output that a client may request."""
        return _text(self.output)


class TokenLabelPostprocess(Struct, frozen=True, tag="token_labels", tag_field="type"):
    """The label of the largest of ``logits`` (FP32, [-1, tokens, labels]) for each token.

    It is the text output ``output`` (BYTES, [-1, tokens]).
    """

    logits: TensorName
    output: TensorName
    labels: Labels

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that ``logits`` must have."""
        return (-1, -1, len(self.labels))

    @property
    def made(self) -> TensorSpec:
        """The output that a client may request."""
        return TensorSpec(self.output, "BYTES", (-1, -1))


class ScorePostprocess(Struct, frozen=True, tag="score", tag_field="type"):
    """The one column of ``logits`` (FP32, [-1, 1]) under the name of its meaning, ``output`` (FP32, [-1, 1]).

    The value is not clipped to the scale of the training data, and ``measures`` are of this very value.
    """

    shape: ClassVar[tuple[int, ...]] = (-1, 1)

    logits: TensorName
    output: TensorName

    @property
    def made(self) -> TensorSpec:
        """The output that a client may request."""
        return TensorSpec(self.output, "FP32", (-1, 1))


#: The steps after a model. A step states the ``shape`` of the logits that it reads, and the output that it makes.
Postprocess = LabelPostprocess | TokenLabelPostprocess | ScorePostprocess


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


class Common(Struct, frozen=True):
    """Everything that the device knows of a model before it opens another file, as far as all versions have it."""

    name: ModelName
    version: Positive
    description: Text
    inputs: TensorSpecs
    outputs: TensorSpecs
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    profile: dict[TensorName, Profile]
    tiers: Annotated[tuple[TierV1, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName
    files: Annotated[dict[FileName, FileRecord], msgspec.Meta(max_length=64)]
    provenance: Provenance
    preprocess: PreprocessV1 | Preprocess | None = None
    postprocess: Postprocess | None = None
    serving: Serving | None = None
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()


class ManifestV1(Common, frozen=True, tag=1, tag_field="format_version"):
    """``manifest.json`` of version 1: no roles, no tensors of artifacts, and the program is called ``router``.

    This schema never changes; ``tests/data/version_1/manifest.schema.json`` pins it.
    """

    preprocess: PreprocessV1 | None = None
    postprocess: LabelPostprocess | ScorePostprocess | None = None
    program: CascadeProgram | None = msgspec.field(default=None, name="router")

    def upgraded(self) -> Manifest:
        """Return the same manifest in version 2: every artifact is a ``model``, and the router is the program."""
        fields = msgspec.to_builtins(self) | {"format_version": FORMAT_VERSION}
        if "router" in fields:
            fields["program"] = fields.pop("router")
        return msgspec.convert(fields, Manifest)


class Manifest(Common, frozen=True, tag=FORMAT_VERSION, tag_field="format_version"):
    """``manifest.json`` of version 2, which every manifest in memory is."""

    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1, max_length=8)]
    preprocess: Preprocess | None = None
    program: CascadeProgram | LoopProgram | GenerateProgram | HeadProgram | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the files that compute a response together."""
        return self.program.roles if self.program else ("model",)

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


def _text(name: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (-1, 1))

"""Fields of ``manifest.json``, which ``msgspec`` checks as it decodes. FORMAT.md beside this file gives the reasons.

A decoded manifest must also pass :func:`edge.bundles.rules.check`, which holds the rules that span fields. A program
says how the artifacts of a bundle compute a response; :mod:`edge.programs` runs it. It names the roles that every tier
must have (``roles``) and checks its own rules (``check``). Without one, a request runs the ``model`` of one tier.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from edge.datatypes import TensorName, TensorSpec
from edge.errors import BundleError, Literally

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
ModelName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Shape = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=8)]
TensorSpecs = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
#: The part that an artifact plays in its tier. A ``model`` computes the manifest's outputs from its inputs alone.
Role = Literal["model", "embed", "step", "backbone", "head"]


def require(holds: object, subject: str, field: str, given: object, expected: str) -> None:
    """Raise a BundleError for a field of the manifest ``subject`` unless its rule holds."""
    if not holds:
        raise BundleError(f"{subject} {field}", given=given, expected=expected, fix=EXPORT_AGAIN)


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of every part of a manifest: immutable, and an unknown field is an error."""


class FileRecord(Struct, frozen=True):
    """Size and hash of one file, both checked before any of its bytes is used."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Profile(Struct, frozen=True):
    """The shapes that an input may have: TensorRT's optimization profile. Runtimes tune for ``opt``."""

    min: Shape
    opt: Shape
    max: Shape


class Tolerance(Struct, frozen=True):
    """The allowed difference from a golden output: ``|got - golden| <= atol + rtol * |golden|``."""

    atol: NonNegative
    rtol: NonNegative


class ArtifactV1(Struct, frozen=True):
    """One ONNX file of a tier, in version 1: for a runtime, with the precision of its weights and activations."""

    file: FileName
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(any|onnxruntime|tensorrt)$")]
    precision: Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]
    opset: Annotated[int, msgspec.Meta(ge=13, le=20)]
    tolerance: Tolerance


class Artifact(ArtifactV1, frozen=True):
    """One ONNX file of a tier. Without inputs, outputs or a golden set of its own, it has the manifest's."""

    role: Role = "model"
    inputs: TensorSpecs | None = None
    outputs: TensorSpecs | None = None
    profile: dict[TensorName, Profile] = msgspec.field(default_factory=dict)
    golden: FileName | None = None


class Tensors(NamedTuple):
    """The inputs and outputs of an ONNX file, and a profile for each input with a -1."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: dict[str, Profile]


class TierV1(Struct, frozen=True):
    """One size of the model, in version 1."""

    name: ModelName
    artifacts: Annotated[tuple[ArtifactV1, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName | None = None


class Tier(TierV1, frozen=True):
    """One size of the model. The first tier of a bundle is the full one, later ones are leaner.

    A tier that computes other values than the full one has a golden set of its own; the others use the bundle's.
    """

    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=8)]


class ExpressionPreprocess(Struct, frozen=True, tag="expression", tag_field="type"):
    """Arithmetic text in ``input`` (BYTES) becomes the calculator's tokens in ``output`` (FP32)."""

    input: TensorName
    output: TensorName
    max_abs_operand: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The text inputs of a client."""
        return (_text(self.input),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that this step computes."""
        return (self.output,)

    def check(self, manifest: Manifest, subject: str) -> None:
        """Do nothing: the rules of all steps suffice."""


class TokenizerPreprocess(Struct, frozen=True, tag="tokenizer", tag_field="type"):
    """Text in ``input`` (BYTES) becomes token ids and their mask (INT64), padded to the longest row of the request.

    ``file`` is the ``tokenizer.json`` of Hugging Face's tokenizers. The graph reads ``ids``; ``mask``, 1 for tokens and
    0 for padding; and ``segments``, 1 for tokens of the second text, ``pair``. Rows longer than ``max_length`` tokens
    are cut, of a pair the longer text first.
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
        require(self.file in manifest.files, subject, field, Literally("nothing"), expected)


#: The steps before a model, each implemented in :data:`edge.bundles.preprocess.STEPS`. A step states its text
#: inputs (``inputs``) and the inputs of the graph that it computes (``outputs``), and checks its own rules (``check``).
Preprocess = ExpressionPreprocess | TokenizerPreprocess


class LabelPostprocess(Struct, frozen=True, tag="label", tag_field="type"):
    """The label of the largest of ``logits`` (FP32, [-1, labels]) as the text output ``output`` (BYTES, [-1, 1])."""

    logits: TensorName
    output: TensorName
    labels: Annotated[tuple[Text, ...], msgspec.Meta(min_length=2, max_length=4096)]

    @property
    def columns(self) -> int:
        """The number of columns that ``logits`` must have."""
        return len(self.labels)

    @property
    def made(self) -> TensorSpec:
        """The output that a client may request."""
        return _text(self.output)


class ScorePostprocess(Struct, frozen=True, tag="score", tag_field="type"):
    """The one column of ``logits`` (FP32, [-1, 1]) under the name of its meaning, ``output`` (FP32, [-1, 1]).

    The value is not clipped to the scale of the training data, and ``measures`` are of this very value.
    """

    columns: ClassVar[int] = 1

    logits: TensorName
    output: TensorName

    @property
    def made(self) -> TensorSpec:
        """The output that a client may request."""
        return TensorSpec(self.output, "FP32", (-1, 1))


class CascadeProgram(Struct, frozen=True, tag="cascade", tag_field="type"):
    """The tier ``auto``: ``lean`` answers first, and ``full`` answers the rows where ``lean`` was unsure.

    ``lean`` is unsure where the two largest probabilities of ``logits`` (FP32, [-1, labels]) differ by less than
    ``margin``, which was chosen on data that no tier was trained on. With ``default``, ``auto`` answers requests that
    name no tier; set it only where a measurement favours it.
    """

    roles: ClassVar[tuple[Role, ...]] = ("model",)

    lean: ModelName
    full: ModelName
    logits: TensorName
    margin: Annotated[float, msgspec.Meta(ge=0, le=1)]
    default: bool = False

    def check(self, manifest: Manifest, subject: str) -> None:
        """Raise a BundleError if the tiers are not two of the bundle's, or ``logits`` is not an output with labels."""
        tiers, outputs = [tier.name for tier in manifest.tiers], manifest.outputs
        holds = self.lean in tiers and self.full in tiers and self.lean != self.full and "auto" not in tiers
        expected = f"two of {tiers}, none of which is called auto"
        require(holds, subject, "cascade tiers", (self.lean, self.full), expected)
        logits = next((spec for spec in outputs if spec.name == self.logits), None)
        has_batch = manifest.max_batch_size and all(spec.shape[0] == -1 for spec in outputs)
        # One column, a regression's, has no second label to be close to.
        has_labels = logits and logits.datatype == "FP32" and len(logits.shape) == 2 and logits.shape[1] != 1
        expected = "an FP32 output of shape [-1, labels], 2 labels or more, of a model with batches"
        require(has_labels and has_batch, subject, "cascade logits", self.logits, expected)


class LoopProgram(Struct, frozen=True, kw_only=True, tag="loop", tag_field="type"):
    """A step that is repeated on its own output until the state settles, for each row on its own.

    The file of the role ``embed`` computes the first ``state`` and the ``prompt``, [-1, tokens, width] each, from the
    manifest's inputs. That of the role ``step`` reads both and ``last``, the index of each row's last token (INT64,
    [-1, 1]). It computes ``next_state``, and of each row the ``prediction`` and the ``residual``, the change of the
    state, both FP32 [-1, 1]. The manifest's outputs are the last two and ``loops`` (INT32, [-1, 1]).
    If ``points`` and ``values`` name two inputs, a prompt has one point more than values, in their second dimensions.

    A row ends when its residual is at most ``tolerance``, or after ``max_loops``. Requests may set both, with at most
    ``most_loops``. The server computes ``check_every`` loops at once, and looks at the residuals of all of them
    afterwards, so this number changes no answer, only when rows join and leave.
    """

    roles: ClassVar[tuple[Role, ...]] = ("embed", "step")

    state: TensorName
    prompt: TensorName
    last: TensorName
    next_state: TensorName
    prediction: TensorName
    residual: TensorName
    loops: TensorName
    points: TensorName | None = None
    values: TensorName | None = None
    max_loops: Positive
    most_loops: Positive
    tolerance: Annotated[float, msgspec.Meta(gt=0)]
    check_every: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1

    def check(self, manifest: Manifest, subject: str) -> None:
        """Raise a BundleError if the tensors of the files do not fit together, or the budget exceeds its limit."""
        column = (-1, 1)
        outputs = {spec.name: (spec.datatype, spec.shape) for spec in manifest.outputs}
        expected = {self.prediction: ("FP32", column), self.residual: ("FP32", column), self.loops: ("INT32", column)}
        require(outputs == expected, subject, "loop outputs", sorted(outputs), f"{expected}")
        require(manifest.max_batch_size, subject, "loop max_batch_size", 0, "a model with batches")
        expected_loops = f"at most most_loops ({self.most_loops})"
        require(self.max_loops <= self.most_loops, subject, "loop max_loops", self.max_loops, expected_loops)
        for tier in manifest.tiers:
            for artifact in tier.artifacts:
                field, none = f"golden of artifact {artifact.file!r}", Literally("none")
                require(artifact.golden, subject, field, none, "a golden set for its own tensors")
            files = {artifact.role: manifest.tensors(artifact) for artifact in tier.artifacts}
            embed = {spec.name: spec for spec in files["embed"].outputs}
            reads, gives = ({spec.name: spec for spec in specs} for specs in files["step"][:2])
            field = f"loop files of tier {tier.name!r}"
            given, wanted = sorted(embed), f"{self.state!r} and {self.prompt!r}, as the step reads them"
            holds = embed == {name: reads.get(name) for name in (self.state, self.prompt)}
            require(holds and files["embed"].inputs == manifest.inputs, subject, field, given, wanted)
            given, wanted = sorted(reads), f"{self.state!r}, {self.prompt!r} and {self.last!r}"
            require(reads.keys() == {self.state, self.prompt, self.last}, subject, field, given, wanted)
            given, wanted = sorted(gives), f"{self.next_state!r}, {self.prediction!r} and {self.residual!r}"
            require(gives.keys() == {self.next_state, self.prediction, self.residual}, subject, field, given, wanted)
        named = (self.points, self.values)
        sequences = {spec.name for spec in manifest.inputs if len(spec.shape) > 1}
        holds = named == (None, None) or (set(named) <= sequences and self.points != self.values)
        require(holds, subject, "loop points and values", named, f"two of {sorted(sequences)}, or neither")


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
    preprocess: Preprocess | None = None
    postprocess: LabelPostprocess | ScorePostprocess | None = None
    serving: Serving | None = None
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()


class ManifestV1(Common, frozen=True, tag=1, tag_field="format_version"):
    """``manifest.json`` of version 1: no roles, no tensors of artifacts, and the program is called ``router``.

    This schema never changes; ``tests/data/version_1/manifest.schema.json`` pins it.
    """

    preprocess: ExpressionPreprocess | TokenizerPreprocess | None = None  # a further step is one of version 2
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
    program: CascadeProgram | LoopProgram | None = None

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
        )


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``manifest.json``, version 2."""
    return msgspec.json.schema(Manifest)


def _text(name: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (-1, 1))

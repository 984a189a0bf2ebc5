"""The manifest of a bundle: the fields of ``manifest.json``, version 2. FORMAT.md beside it gives reasons.

The types are the schema: ``msgspec`` checks every field, bound and pattern while it decodes. A decoded manifest must
also pass :func:`edge.bundles.rules.check`, which holds the rules that span fields.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from edge.bundles.fields import FileName, ModelName, NonNegative, Positive, Shape, Struct, Text, broken
from edge.bundles.programs import CascadeProgram, Role
from edge.datatypes import TensorName, TensorSpec
from edge.errors import Literally

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"

_Tensors = Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]


class FileRecord(Struct, frozen=True):
    """Size and hash of one file; both are checked before a byte of it is used."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Profile(Struct, frozen=True):
    """The shapes that an input may take: TensorRT's optimization profile. Runtimes tune for ``opt``."""

    min: Shape
    opt: Shape
    max: Shape


class Tolerance(Struct, frozen=True):
    """How far an output may be from its golden value: ``|got - golden| <= atol + rtol * |golden|``."""

    atol: NonNegative
    rtol: NonNegative


class Artifact(Struct, frozen=True):
    """One ONNX file of a tier.

    Attributes:
        file: its name in the bundle.
        runtime: the runtime that it was written for.
        precision: of its weights and activations.
        opset: of the ONNX standard.
        tolerance: how far its outputs may be from the golden ones.
        role: the part that it plays in the tier.
        inputs: its own inputs; None stands for the manifest's.
        outputs: its own outputs; None stands for the manifest's.
        profile: of its own inputs, for each with a -1.
    """

    file: FileName
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(any|onnxruntime|tensorrt)$")]
    precision: Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]
    opset: Annotated[int, msgspec.Meta(ge=13, le=20)]
    tolerance: Tolerance
    role: Role = "model"
    inputs: _Tensors | None = None
    outputs: _Tensors | None = None
    profile: dict[TensorName, Profile] = msgspec.field(default_factory=dict)


class Tensors(NamedTuple):
    """The inputs and outputs of an ONNX file, and a profile for each input with a -1."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: dict[str, Profile]


class Tier(Struct, frozen=True):
    """One size of the model. The first tier of a bundle is the full one, later ones are leaner.

    A tier that computes other values than the full one has a golden set of its own; the others use the bundle's.
    """

    name: ModelName
    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName | None = None


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

    Attributes:
        input: what a client may send.
        file: the ``tokenizer.json`` of Hugging Face's tokenizers, in the bundle.
        ids: the input of the graph for the ids.
        mask: the input of the graph that is 1 for tokens and 0 for padding.
        max_length: tokens of a row; what is longer is cut, of a pair the longer text first.
        pad_id: the id of padding.
        max_text_bytes: of one text; a longer one is refused before it is tokenised.
        pair: what a client sends beside ``input`` to a model that reads two texts together; None where it reads one.
        segments: the input of the graph that is 1 for tokens of the second text, else 0; None where it has none.
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
        """Check the rules of the tokenizer.

        Raises:
            BundleError: its file is not in the bundle.
        """
        if self.file not in manifest.files:
            raise broken(subject, f"files entry for {self.file!r}", Literally("nothing"), "the tokenizer of preprocess")


#: The steps before a model, each implemented in :data:`edge.bundles.preprocess.STEPS`. A step states its text
#: inputs (``inputs``) and the inputs of the graph that it computes (``outputs``), and checks its own rules (``check``).
Preprocess = ExpressionPreprocess | TokenizerPreprocess


class LabelPostprocess(Struct, frozen=True, tag="label", tag_field="type"):
    """The name of the largest of ``logits`` (FP32, [-1, labels]) as the text output ``output`` (BYTES, [-1, 1])."""

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
    """The one column of ``logits`` (FP32, [-1, 1]) under the name of what it is, ``output`` (FP32, [-1, 1]).

    As the model gives it: it may be beyond the scale that it was trained on, and ``measures`` are of this very value.
    """

    logits: TensorName
    output: TensorName

    @property
    def columns(self) -> int:
        """The number of columns that ``logits`` must have."""
        return 1

    @property
    def made(self) -> TensorSpec:
        """The output that a client may request."""
        return TensorSpec(self.output, "FP32", (-1, 1))


class Serving(Struct, frozen=True):
    """Serving defaults of the model; a server's options override them.

    Attributes:
        policy: the choice of the tier for a request that names none. None is ``router`` where the program is the
            default, else ``pinned``, the full tier.
        max_queue_delay_us: how long a request that found the server busy may wait for others to join it.
        preferred_batch_sizes: rows that a run should have, where more than one request waits.
    """

    policy: Annotated[str, msgspec.Meta(pattern=r"^(pinned|router|deadline|load)$")] | None = None
    max_queue_delay_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    preferred_batch_sizes: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=16)] = ()


class Measure(Struct, frozen=True):
    """One measured accuracy: the value, on what, from how many items and seeds, and its 95 % interval if known."""

    metric: Text
    split: Text
    value: float
    n: Positive
    seeds: Positive = 1
    interval: tuple[float, float] | None = None


class Provenance(Struct, frozen=True):
    """Where the weights come from. ``versions`` names the packages that made them."""

    created: Text
    trainer: Text
    data: Text
    seed: int | None = None
    git_commit: Text | None = None
    versions: dict[str, Text] = msgspec.field(default_factory=dict)


class Manifest(Struct, frozen=True, tag=FORMAT_VERSION, tag_field="format_version"):
    """Everything that the device knows of a model before it opens another file.

    ``format_version`` is the tag of this struct: every manifest in memory is of version 2.
    """

    name: ModelName
    version: Positive
    description: Text
    inputs: _Tensors
    outputs: _Tensors
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    profile: dict[TensorName, Profile]
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName
    files: Annotated[dict[FileName, FileRecord], msgspec.Meta(max_length=64)]
    provenance: Provenance
    preprocess: Preprocess | None = None
    postprocess: LabelPostprocess | ScorePostprocess | None = None
    program: CascadeProgram | None = None
    serving: Serving | None = None
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()

    def input(self, name: str) -> TensorSpec | None:
        """Return the spec of an input of the model, or None."""
        return next((spec for spec in self.inputs if spec.name == name), None)

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

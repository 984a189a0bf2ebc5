"""The manifest of a bundle: what ``manifest.json`` may say. The README's section on bundles gives the reasons.

The types are the schema: ``msgspec`` checks every field, bound and pattern while it decodes, and a manifest that
decodes has still to pass :func:`edge.bundles.rules.check`, which holds the rules that span fields.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from edge.datatypes import TensorName, TensorSpec

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
ModelName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Shape = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=8)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The common rules: immutable, and a field that this version does not know is an error, not a surprise."""


class FileRecord(_Struct, frozen=True):
    """Size and hash of one file; both are checked before a byte of it is used."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


class Profile(_Struct, frozen=True):
    """The shapes that an input may take: TensorRT's optimization profile. ``opt`` is what to tune for."""

    min: Shape
    opt: Shape
    max: Shape


class Tolerance(_Struct, frozen=True):
    """How far an output may be from its golden value: ``|got - golden| <= atol + rtol * |golden|``."""

    atol: NonNegative
    rtol: NonNegative


class Artifact(_Struct, frozen=True):
    """One ONNX file of a tier: which runtime it was written for, in which precision, and how exact it must be."""

    file: FileName
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(any|onnxruntime|tensorrt)$")]
    precision: Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]
    opset: Annotated[int, msgspec.Meta(ge=13, le=20)]
    tolerance: Tolerance


class Tier(_Struct, frozen=True):
    """One size of the model. The first tier of a bundle is the full one, later ones are leaner.

    A tier with outputs of its own has a golden set of its own; the others answer to the bundle's.
    """

    name: ModelName
    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName | None = None


class ExpressionPreprocess(_Struct, frozen=True, tag="expression", tag_field="type"):
    """Arithmetic text in ``input`` (BYTES) becomes the calculator's tokens in ``output`` (FP32)."""

    input: TensorName
    output: TensorName
    max_abs_operand: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What a client may send."""
        return (_text(self.input),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that it makes."""
        return (self.output,)


class TokenizerPreprocess(_Struct, frozen=True, tag="tokenizer", tag_field="type"):
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
        """What a client may send; of a pair both."""
        return (_text(self.input), *((_text(self.pair),) if self.pair else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The inputs of the graph that it makes."""
        return (self.ids, self.mask, *((self.segments,) if self.segments else ()))


class LabelPostprocess(_Struct, frozen=True, tag="label", tag_field="type"):
    """The name of the largest of ``logits`` (FP32, [-1, labels]) as the text output ``output`` (BYTES, [-1, 1])."""

    logits: TensorName
    output: TensorName
    labels: Annotated[tuple[Text, ...], msgspec.Meta(min_length=2, max_length=4096)]

    @property
    def columns(self) -> int:
        """How many columns ``logits`` must have."""
        return len(self.labels)

    @property
    def made(self) -> TensorSpec:
        """What a client may ask for."""
        return _text(self.output)


class ScorePostprocess(_Struct, frozen=True, tag="score", tag_field="type"):
    """The one column of ``logits`` (FP32, [-1, 1]) under the name of what it is, ``output`` (FP32, [-1, 1]).

    As the model gives it: it may lie beyond the scale that it was trained on, and ``measures`` are of this very value.
    """

    logits: TensorName
    output: TensorName

    @property
    def columns(self) -> int:
        """How many columns ``logits`` must have."""
        return 1

    @property
    def made(self) -> TensorSpec:
        """What a client may ask for."""
        return TensorSpec(self.output, "FP32", (-1, 1))


class CascadeRouter(_Struct, frozen=True, tag="cascade", tag_field="type"):
    """The tier ``auto``: ``lean`` answers, and ``full`` answers again where ``lean`` was not sure.

    Attributes:
        lean: the tier that answers first.
        full: the tier that answers where the two largest probabilities of ``logits`` are closer than ``margin``.
        logits: an output of the graph, FP32 [-1, labels].
        margin: 0 to 1; chosen on data that nothing was trained on.
        default: whether a request that names no tier is answered like this; only where that was measured to be better.
    """

    lean: ModelName
    full: ModelName
    logits: TensorName
    margin: Annotated[float, msgspec.Meta(ge=0, le=1)]
    default: bool = False


class Serving(_Struct, frozen=True):
    """How the model likes to be served; a server's options go before it.

    Attributes:
        policy: which tier answers a request that names none; None is ``router`` where the router is the default, else
            ``pinned``, the full tier.
        max_queue_delay_us: how long a request that found the server busy may wait for others to join it.
        preferred_batch_sizes: rows that a run should have, where more than one request waits.
    """

    policy: Annotated[str, msgspec.Meta(pattern=r"^(pinned|router|deadline|load)$")] | None = None
    max_queue_delay_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    preferred_batch_sizes: Annotated[tuple[Positive, ...], msgspec.Meta(max_length=16)] = ()


class Measure(_Struct, frozen=True):
    """One measured accuracy: the value, on what, from how many items and seeds, and its 95 % interval if known."""

    metric: Text
    split: Text
    value: float
    n: Positive
    seeds: Positive = 1
    interval: tuple[float, float] | None = None


class Provenance(_Struct, frozen=True):
    """Where the weights come from. ``versions`` names the packages that made them."""

    created: Text
    trainer: Text
    data: Text
    seed: int | None = None
    git_commit: Text | None = None
    versions: dict[str, Text] = {}


class Manifest(_Struct, frozen=True):
    """Everything that the device knows of a model before it opens a file."""

    format_version: int
    name: ModelName
    version: Positive
    description: Text
    inputs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
    outputs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    profile: dict[TensorName, Profile]
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName
    files: Annotated[dict[FileName, FileRecord], msgspec.Meta(max_length=64)]
    provenance: Provenance
    preprocess: ExpressionPreprocess | TokenizerPreprocess | None = None
    postprocess: LabelPostprocess | ScorePostprocess | None = None
    router: CascadeRouter | None = None
    serving: Serving | None = None
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()

    def input(self, name: str) -> TensorSpec | None:
        """Return the spec of an input of the ONNX graph, or None."""
        return next((spec for spec in self.inputs if spec.name == name), None)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``manifest.json``."""
    return msgspec.json.schema(Manifest)


def _text(name: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (-1, 1))

"""Steps before and after a model in ``manifest.json``: fields, the rules of each, and what those after it compute.

:data:`edge.bundles.preprocess.STEPS` implements those before a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from edge.bundles.fields import FileName, NonNegativeInteger, Positive, Struct, Text, require
from edge.datatypes import Array, TensorName, TensorSpec
from edge.errors import Raw


class _Step(Struct, frozen=True):
    """A step before a model that reads BYTES from ``input``."""

    input: TensorName

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of a client: texts, or encoded images."""
        return (_text(self.input),)

    def check(self, inputs: Sequence[TensorSpec], files: Collection[str], subject: str) -> None:
        """Raise a BundleError if the graph's inputs or the files of the manifest ``subject`` do not fit the step."""


class ExpressionPreprocess(_Step, frozen=True, tag="expression", tag_field="type"):
    """Arithmetic text in ``input`` (BYTES) becomes the calculator's tokens in ``output`` (FP32)."""

    output: TensorName
    max_abs_operand: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def graph_inputs(self) -> tuple[str, ...]:
        return (self.output,)


class ArithmeticPreprocess(_Step, frozen=True, tag="arithmetic", tag_field="type"):
    """Arithmetic text with products and parentheses in ``input`` (BYTES) becomes tokens, [-1, 64].

    The graph reads the ``kinds`` of the tokens (INT64) and their ``values`` (FP32).
    """

    kinds: TensorName
    values: TensorName
    max_abs_operand: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def graph_inputs(self) -> tuple[str, ...]:
        return (self.kinds, self.values)


class WindowShape(Struct, frozen=True):
    """How a row that is too long becomes several: windows of the second text, which share ``stride`` tokens.

    The first text is cut to ``question_tokens``.
    """

    question_tokens: Positive
    stride: NonNegativeInteger


class TokenizerPreprocess(_Step, frozen=True, tag="tokenizer", tag_field="type"):
    """Text in ``input`` (BYTES) becomes token ids and their mask (INT64), padded to the longest row of the request.

    ``file`` is the ``tokenizer.json`` of Hugging Face's tokenizers. The graph reads ``ids``; ``mask``, 1 for tokens and
    0 for padding; and ``segments``, 1 for tokens of the second text, ``pair``. Rows longer than ``max_length`` tokens
    are cut, of a pair the longer text first; before a program that generates text they are refused. Before a
    postprocess step of ``span`` they become ``windows``.

    ``offsets`` (INT64, [-1, tokens, 2]) are the first character of each token in its text and the one behind its last,
    and equal for padding and for tokens that are not text. A graph that reads them returns them, so that clients find
    the characters of a token.
    """

    file: FileName
    ids: TensorName
    mask: TensorName
    max_length: Positive
    pad_id: Annotated[int, msgspec.Meta(ge=0)]
    max_text_bytes: Positive
    pair: TensorName | None = None
    segments: TensorName | None = None
    offsets: TensorName | None = None
    windows: WindowShape | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_text(name) for name in (self.input, self.pair) if name)

    @property
    def graph_inputs(self) -> tuple[str, ...]:
        return tuple(name for name in (self.ids, self.mask, self.segments, self.offsets) if name)

    def check(self, inputs: Sequence[TensorSpec], files: Collection[str], subject: str) -> None:
        """Raise a BundleError if the tokenizer's file is not in the bundle, offsets have another shape, or windows no
        room.
        """
        field, expected = f"files entry for {self.file!r}", "the tokenizer of preprocess"
        require(self.file in files, subject, field, Raw("nothing"), expected)
        spec = next((spec for spec in inputs if spec.name == self.offsets), None)
        field, expected = f"preprocess output {self.offsets!r}", "INT64 [-1, -1, 2]"
        require(spec in (None, TensorSpec(self.offsets or "", "INT64", (-1, -1, 2))), subject, field, spec, expected)
        if self.windows:
            require(self.pair, subject, "preprocess windows", Raw("no pair"), "a pair, whose second text they are of")
            taken = self.windows.question_tokens + self.windows.stride
            expected = f"fewer than {self.max_length} tokens of the question and the stride"
            require(taken < self.max_length, subject, "preprocess windows", taken, expected)


class ImagePreprocess(_Step, frozen=True, tag="image", tag_field="type"):
    """A JPEG or PNG image in ``input`` (BYTES) becomes pixels in ``output`` (FP32, [-1, channels, size, size]).

    With ``resize`` of ``crop``, the shorter side becomes ``shorter_side`` pixels, by default ``size``, and the middle
    square of ``size`` pixels is kept; with ``stretch``, both sides become ``size``; with ``letterbox``, the longer one
    does, but for rounding down, and zeros follow to the right or below. A value from 0 to 255 becomes
    ``(value / 255 - mean) / std`` of its channel. Images of more than ``max_bytes``, or of more than ``max_pixels``
    before or after the resize, are refused.
    """

    output: TensorName
    size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    colours: Literal["rgb", "grey"]
    mean: Annotated[tuple[float, ...], msgspec.Meta(min_length=1, max_length=3)]
    std: Annotated[tuple[Annotated[float, msgspec.Meta(gt=0)], ...], msgspec.Meta(min_length=1, max_length=3)]
    max_bytes: Positive
    max_pixels: Positive
    resize: Literal["crop", "stretch", "letterbox"] = "crop"
    shorter_side: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    @property
    def graph_inputs(self) -> tuple[str, ...]:
        return (self.output,)

    @property
    def channels(self) -> int:
        return 3 if self.colours == "rgb" else 1

    def check(self, inputs: Sequence[TensorSpec], files: Collection[str], subject: str) -> None:
        """Raise a BundleError unless mean, std and the shape of the graph's input fit size and colours."""
        for name in ("mean", "std"):
            values, expected = getattr(self, name), f"{self.channels} for {self.colours}"
            require(len(values) == self.channels, subject, f"preprocess {name}", values, expected)
        side, expected = self.shorter_side, f"none with {self.resize!r}, else {self.size}, the size, or more"
        holds = side is None or (self.resize == "crop" and side >= self.size)
        require(holds, subject, "preprocess shorter_side", side, expected)
        spec = next(spec for spec in inputs if spec.name == self.output)
        shape = (-1, self.channels, self.size, self.size)
        holds, given = spec.datatype == "FP32" and spec.shape == shape, Raw(f"{spec.datatype} {list(spec.shape)}")
        require(holds, subject, f"preprocess output {self.output!r}", given, f"FP32 {list(shape)}")


Preprocess = ExpressionPreprocess | ArithmeticPreprocess | TokenizerPreprocess | ImagePreprocess

MOST_LABELS = 4096
#: Names of the classes, in the order of the logits.
Labels = Annotated[tuple[Text, ...], msgspec.Meta(min_length=2, max_length=MOST_LABELS)]
#: Of a picture.
MOST_BOXES = 1000


class _OneOutput(Struct, frozen=True):
    """A step after a model that makes one ``output`` of ``logits`` (FP32)."""

    logits: TensorName
    output: TensorName

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits,)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        return (self.result,)

    @property
    def result(self) -> TensorSpec:
        """The output that a client may request."""
        raise NotImplementedError


class _LabelStep(_OneOutput, frozen=True):
    """A step after a model that reads a column of ``logits`` for each label."""

    labels: Labels

    def texts(self) -> Array:
        """Return the labels as BYTES, [labels]."""
        return np.array([label.encode() for label in self.labels], np.object_)


class LabelPostprocess(_LabelStep, frozen=True, tag="label", tag_field="type"):
    """The label of the largest of ``logits`` (FP32, [-1, labels]) as the text output ``output`` (BYTES, [-1, 1])."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that ``logits`` must have."""
        return (-1, len(self.labels))

    @property
    def result(self) -> TensorSpec:
        """The output that a client may request."""
        return _text(self.output)

    def answer(self) -> Callable[[Array], Array]:
        texts = self.texts()
        return lambda logits: texts[logits.argmax(axis=1)][:, None]


class TokenLabelPostprocess(_LabelStep, frozen=True, tag="token_labels", tag_field="type"):
    """The label of the largest of ``logits`` (FP32, [-1, tokens, labels]) for each token.

    It is the text output ``output`` (BYTES, [-1, tokens]).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that ``logits`` must have."""
        return (-1, -1, len(self.labels))

    @property
    def result(self) -> TensorSpec:
        """The output that a client may request."""
        return TensorSpec(self.output, "BYTES", (-1, -1))

    def answer(self) -> Callable[[Array], Array]:
        texts = self.texts()
        return lambda logits: texts[logits.argmax(axis=2)]


class ScorePostprocess(_OneOutput, frozen=True, tag="score", tag_field="type"):
    """The one column of ``logits`` (FP32, [-1, 1]) under the name of its meaning, ``output`` (FP32, [-1, 1]).

    The value is not clipped to the scale of the training data, and ``measures`` are of this very value.
    """

    shape: ClassVar[tuple[int, ...]] = (-1, 1)

    @property
    def result(self) -> TensorSpec:
        """The output that a client may request."""
        return TensorSpec(self.output, "FP32", (-1, 1))

    def answer(self) -> Callable[[Array], Array]:
        return lambda logits: logits


class SpanPostprocess(Struct, frozen=True, tag="span", tag_field="type"):
    """The likeliest spans of the second text, by the logits of their first and last tokens (FP32, [-1, tokens]).

    They become the outputs ``answer`` (BYTES), ``score`` (FP32), and ``start`` and ``end`` (INT32), the first character
    of the span in the text and the one behind its last, all of shape [-1, spans]. A span has at most ``most_tokens``.
    With ``no_answer``, an empty one competes with them, by the logits of the row's first token, as in SQuAD 2.0.
    :func:`edge.bundles.spans.extract` computes them of the text, so a client that sends token ids gets logits alone.
    """

    shape: ClassVar[tuple[int, ...]] = (-1, -1)

    start_logits: TensorName
    end_logits: TensorName
    answer: TensorName
    score: TensorName
    start: TensorName
    end: TensorName
    most_tokens: Annotated[int, msgspec.Meta(ge=1, le=512)]
    no_answer: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.start_logits, self.end_logits)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The outputs that a client may request."""
        numbers = ((self.score, "FP32"), (self.start, "INT32"), (self.end, "INT32"))
        return tuple(TensorSpec(name, datatype, (-1, -1)) for name, datatype in ((self.answer, "BYTES"), *numbers))


class BoxPostprocess(Struct, frozen=True, tag="boxes", tag_field="type"):
    """The likeliest boxes of a detector that needs no non-maximum suppression, by the scores of its classes.

    The graph returns ``logits`` (FP32, [-1, queries, classes]) and ``shares`` (FP32, [-1, queries, 4]): the centre's x
    and y, width and height of each query's box as shares of the sides of its image. With the ``activation``
    ``sigmoid``, as of RT-DETR, each class has a score of its own; with ``softmax``, as of YOLOS, the last class is that
    of no object.

    The outputs are ``boxes`` (FP32, [-1, boxes, 4]), x1, y1, x2 and y2 in pixels of the picture that the client sent;
    ``scores`` (FP32) and ``classes`` (INT32), [-1, boxes]; and with ``labels`` those of the classes, ``label`` (BYTES).
    Scores are above ``threshold``, and a picture has at most ``top_k`` boxes, unless a request says otherwise.
    :func:`edge.bundles.boxes.extract` computes them with the picture's size, so a client that sends pixels gets the
    outputs of the graph alone.
    """

    logits: TensorName
    shares: TensorName
    boxes: TensorName
    scores: TensorName
    classes: TensorName
    activation: Literal["sigmoid", "softmax"]
    label: TensorName | None = None
    labels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_LABELS)] = ()
    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MOST_BOXES)] = 100

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.shares)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The outputs that a client may request."""
        specs = [
            TensorSpec(self.boxes, "FP32", (-1, -1, 4)),
            TensorSpec(self.scores, "FP32", (-1, -1)),
            TensorSpec(self.classes, "INT32", (-1, -1)),
        ]
        return (*specs, *([TensorSpec(self.label, "BYTES", (-1, -1))] if self.label else []))

    def check(self, outputs: Sequence[TensorSpec], subject: str) -> None:
        """Raise a BundleError unless the graph's outputs fit, and there is a label for each class, or none."""
        specs = {spec.name: spec for spec in outputs}
        logits, shares = (specs.get(name) for name in self.reads)
        holds = logits and logits.datatype == "FP32" and len(logits.shape) == 3 and logits.shape[2] > 0
        expected = "an FP32 output of shape [-1, queries, classes]"
        require(holds, subject, "postprocess logits", self.logits, expected)
        assert logits
        wanted = TensorSpec(self.shares, "FP32", (*logits.shape[:2], 4))
        require(shares == wanted, subject, "postprocess shares", self.shares, f"an FP32 output {list(wanted.shape)}")
        classes = logits.shape[2] - (self.activation == "softmax")
        holds = len(self.labels) == (classes if self.label else 0) and classes > 0
        given = Raw(f"{len(self.labels)} for {classes} classes")
        require(holds, subject, "postprocess labels", given, "one for each class with the output 'label', else none")


#: The steps after a model. A step states which outputs of the graph it ``reads``, and ``results``, the outputs that it
#: makes. One of a single output, ``result``, has the function that computes it, ``answer``.
Postprocess = LabelPostprocess | TokenLabelPostprocess | ScorePostprocess | SpanPostprocess | BoxPostprocess


def _text(name: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (-1, 1))

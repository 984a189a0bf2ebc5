"""Programs of a manifest: how the artifacts of a bundle compute a response; :mod:`edge.programs` runs them.

A program names the roles that every tier must have (``roles``) and checks its own rules (``check``). Without one, a
request runs the ``model`` of one tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from edge.bundles.fields import ModelName, NonNegativeInteger, Positive, Role, Struct, require
from edge.datatypes import TensorName
from edge.errors import Literally

if TYPE_CHECKING:
    from edge.bundles.manifest import Manifest


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


class CacheTensor(Struct, frozen=True):
    """Keys or values of one layer: the graph's input ``past`` [-1, heads, places, width], and its output ``new``."""

    past: TensorName
    new: TensorName


class GenerateProgram(Struct, frozen=True, kw_only=True, tag="generate", tag_field="type"):
    """Text that a decoder continues token by token, with a cache of keys and values.

    The file of the role ``backbone`` reads ``tokens`` (INT64, [-1, T]), and of each row the number of tokens in its
    cache, ``lengths``, and the index of the last one of its ``tokens``, ``last`` (INT64, [-1, 1] each). It computes the
    ``logits`` (FP32, [-1, vocabulary]) after that token, and the new entries of the cache, [-1, heads, T, width] each.
    It ignores the places of the cache from a row's length on, and what follows the last one of its tokens.

    The manifest's inputs are the tokenizer's ids and mask. Its outputs are the generated ``text`` (BYTES, [-1, 1]) and
    the number of its tokens, ``generated`` (INT32, [-1, 1]). Prompt and text together have ``positions`` tokens at
    most. A request that says nothing else gets ``max_tokens``, the likeliest each time; one of ``end_tokens`` ends the
    text earlier.
    """

    roles: ClassVar[tuple[Role, ...]] = ("backbone",)

    tokens: TensorName
    lengths: TensorName
    last: TensorName
    logits: TensorName
    cache: Annotated[tuple[CacheTensor, ...], msgspec.Meta(min_length=2, max_length=512)]
    text: TensorName
    generated: TensorName
    positions: Positive
    max_tokens: Positive
    end_tokens: Annotated[tuple[NonNegativeInteger, ...], msgspec.Meta(max_length=64)] = ()

    def check(self, manifest: Manifest, subject: str) -> None:
        """Raise a BundleError if the tensors of the file, or those of the tokenizer, do not fit the program."""
        outputs = {spec.name: (spec.datatype, spec.shape) for spec in manifest.outputs}
        expected = {self.text: ("BYTES", (-1, 1)), self.generated: ("INT32", (-1, 1))}
        require(outputs == expected, subject, "generate outputs", sorted(outputs), f"{expected}")
        require(manifest.max_batch_size, subject, "generate max_batch_size", 0, "a model with batches")
        step = manifest.preprocess
        names = {spec.name for spec in manifest.inputs}
        holds = step is not None and step.tokenizes and names == set(step.outputs) and len(names) == 2
        expected_step = "a tokenizer for the manifest's inputs, ids and mask"
        require(holds, subject, "generate preprocess", Literally("another one"), expected_step)
        holds, most = self.max_tokens < self.positions, f"less than positions ({self.positions})"
        require(holds, subject, "generate max_tokens", self.max_tokens, most)
        for tier in manifest.tiers:
            (file,) = (manifest.tensors(artifact) for artifact in tier.artifacts[:1])
            reads, gives = ({spec.name: spec for spec in specs} for specs in file[:2])
            field = f"generate files of tier {tier.name!r}"
            wanted = {self.tokens, self.lengths, self.last, *(one.past for one in self.cache)}
            require(reads.keys() == wanted, subject, field, sorted(reads), f"the inputs {sorted(wanted)}")
            wanted = {self.logits, *(one.new for one in self.cache)}
            require(gives.keys() == wanted, subject, field, sorted(gives), f"the outputs {sorted(wanted)}")
            for one in self.cache:
                past, new = reads[one.past], gives[one.new]
                holds = len(past.shape) == 4 and past == type(past)(one.past, new.datatype, new.shape)
                require(holds, subject, field, past.shape, f"four dimensions, as {one.new!r} has them")

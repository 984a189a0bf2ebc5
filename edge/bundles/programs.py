"""Programs of a manifest: how the artifacts of a bundle compute a response; :mod:`edge.programs` runs them.

A program names the roles that every tier must have (``roles``); :mod:`edge.bundles.rules` checks it. Without
one, a request runs the ``model`` of one tier.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from edge.bundles.fields import (
    MOST_BLOCKS,
    FileName,
    ModelName,
    NonNegativeInteger,
    Positive,
    Role,
    Sha256,
    Struct,
)
from edge.datatypes import TensorName


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

    A decoder in blocks of layers has a file for each, of the roles ``backbone-1``, ``backbone-2`` and so on, which run
    in turn. ``hidden`` names the states that go from each block to the next, FP32 [-1, T, width], which take the place
    of the logits and of the tokens. Only the last block reads ``last``. Each has a part of the cache, in its order.

    The manifest's inputs are the tokenizer's ids and mask. Its outputs are the generated ``text`` (BYTES, [-1, 1]) and
    the number of its tokens, ``generated`` (INT32, [-1, 1]). Prompt and text together have ``positions`` tokens at
    most. A request that says nothing else gets ``max_tokens``, the likeliest each time; one of ``end_tokens`` ends the
    text earlier.
    """

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
    hidden: Annotated[tuple[TensorName, ...], msgspec.Meta(max_length=MOST_BLOCKS - 1)] = ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the blocks in their order."""
        return backbone_roles(len(self.hidden) + 1)


def backbone_roles(blocks: int) -> tuple[Role, ...]:
    """Return the roles of so many blocks of a decoder."""
    return tuple(f"backbone-{number + 1}" for number in range(blocks)) if blocks > 1 else ("backbone",)


class HeadBase(Struct, frozen=True):
    """The generating model that a head belongs to; see :attr:`edge.bundles.manifest.Manifest.weights_sha256`."""

    name: ModelName
    version: Positive
    sha256: Sha256


class HeadProgram(Struct, frozen=True, kw_only=True, tag="head", tag_field="type"):
    """A head of backward attention, which moves the logits of a generating model, its ``base`` (paper 004).

    Each of its layers has ``keys`` [groups, width, vocabulary], ``values`` [groups, vocabulary, width] and
    ``temperatures`` [groups] in the file ``tensors``, an uncompressed .npz with the arrays ``0/keys``, ``0/values``,
    ``0/temperatures``, ``1/keys`` and so on. The file of the role ``head`` reads them beside ``logits`` (FP32,
    [-1, vocabulary]) and ``alpha`` (FP32, [-1, 1]), and computes ``moved``: logits + alpha * the sum over the groups of
    softmax(logits / temperature) values keys.
    A request to the base that names the head, and no alpha, gets ``usual_alpha``.
    """

    roles: ClassVar[tuple[Role, ...]] = ("head",)

    base: HeadBase
    tensors: FileName
    logits: TensorName
    alpha: TensorName
    moved: TensorName
    keys: TensorName
    values: TensorName
    temperatures: TensorName
    layers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    usual_alpha: float = 1.0

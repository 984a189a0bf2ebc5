"""The programs that a manifest may name: how the artifacts of a bundle compute an answer together.

:mod:`edge.programs` runs them. The manifest's ``program`` is a union of these structs, tagged by ``type``. Each struct
names the roles that every tier must have (``roles``) and checks its own rules (``check``). Without a program, a request
runs the ``model`` of one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from edge.bundles.fields import ModelName, Struct, broken
from edge.datatypes import TensorName, TensorSpec

#: The part that an artifact plays in its tier. A ``model`` computes the manifest's outputs from its inputs alone.
Role = Literal["model", "embed", "step", "backbone", "head"]


class CascadeProgram(Struct, frozen=True, tag="cascade", tag_field="type"):
    """The tier ``auto``: ``lean`` answers first, and ``full`` answers the rows where ``lean`` was unsure.

    Attributes:
        lean: the tier that answers first.
        full: the tier that answers where the two largest probabilities of ``logits`` are closer than ``margin``.
        logits: an output of the graph, FP32 [-1, labels].
        margin: 0 to 1; chosen on data that nothing was trained on.
        default: whether the cascade answers requests that name no tier. Set it only where a measurement favours it.
    """

    roles: ClassVar[tuple[Role, ...]] = ("model",)

    lean: ModelName
    full: ModelName
    logits: TensorName
    margin: Annotated[float, msgspec.Meta(ge=0, le=1)]
    default: bool = False

    def check(self, tiers: Sequence[str], outputs: Sequence[TensorSpec], max_batch_size: int, subject: str) -> None:
        """Check the rules of the cascade.

        Args:
            tiers: the names of the bundle's tiers.
            outputs: of the graph.
            max_batch_size: of the manifest.
            subject: the name of the manifest in errors.

        Raises:
            BundleError: it names an unknown tier or the same tier twice, or ``logits`` is no output with labels.
        """
        if self.lean not in tiers or self.full not in tiers or self.lean == self.full or "auto" in tiers:
            expected = f"two of {list(tiers)}, none of which is called auto"
            raise broken(subject, "cascade tiers", (self.lean, self.full), expected)
        logits = next((spec for spec in outputs if spec.name == self.logits), None)
        has_batch = max_batch_size and all(spec.shape[0] == -1 for spec in outputs)
        # One column, a regression's, has no second label to be close to.
        has_labels = logits is not None and len(logits.shape) == 2 and logits.shape[1] != 1
        if logits is None or logits.datatype != "FP32" or not has_labels or not has_batch:
            expected = "an FP32 output of shape [-1, labels], 2 labels or more, of a model with batches"
            raise broken(subject, "cascade logits", self.logits, expected)

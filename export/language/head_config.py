"""Shape of a head of backward attention."""

from __future__ import annotations

from typing import Literal

import msgspec

from edge.errors import Raw, UsageError


class HeadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a head.

    Attributes:
        vocabulary: V, the tokens of the language model.
        width: of its embeddings.
        dims: d, of the keys and values of all heads together.
        heads: H, which share d; each learns a temperature if there is more than one.
        latent: r, width of the latent projection; None has none.
        gated: whether a SiLU gate multiplies the latent projection.
        chunk_bytes: see :func:`export.papers.backward.head.weighted_means`.
    """

    vocabulary: int
    width: int
    dims: int
    heads: int = 1
    latent: int | None = None
    gated: bool = False
    layers: int = 1
    chunk_bytes: int = 2**26
    form: Literal["residual", "literal"] = "residual"

    def __post_init__(self) -> None:
        """Raise a UsageError if the shape is impossible."""
        for name in ("vocabulary", "width", "dims", "heads", "latent", "layers", "chunk_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise _wrong(name, value, "at least 1", f"Give a larger {name}.")
        if self.dims % self.heads:
            raise _wrong("heads", self.heads, f"a divisor of the {self.dims} dims", "Give other heads or dims.")
        if self.latent is not None and self.latent < self.dims:
            expected = f"at least the {self.dims} dims, whose rank it would limit"
            raise _wrong("latent", self.latent, expected, "Give a larger latent, fewer dims, or no latent.")
        if self.gated and self.latent is None:
            raise _wrong("gated", True, "a latent to gate", "Give a latent.")
        if self.form == "literal" and (self.heads, self.layers) != (1, 1):
            given = Raw(f"{self.heads} heads and {self.layers} layers")
            raise _wrong("form literal", given, "one head and one layer, as in the paper", "Give the form residual.")


def _wrong(name: str, given: object, expected: str, fix: str) -> UsageError:
    return UsageError(f"{name} of a backward head", given=given, expected=expected, fix=fix)

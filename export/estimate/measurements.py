"""Published latencies of TensorRT on the Orin Nano, with what suffices to compute the work of each."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from export.estimate.devices import Mode
from export.estimate.work import ITEM_BYTES, Kernel, Work, product

#: Kernels of an encoder's layer besides its four products and its attention, and kernels around the layers:
#: TensorRT 10.3 lists 92 layers for ViT-B/16.
_OTHERS_OF_A_LAYER = 2.4
_OTHERS_AROUND = 2


class EncoderSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a transformer; queries, keys and values are one product."""

    layers: int
    width: int
    heads: int
    ffn: int
    tokens: int
    head_width: int = 64
    kv_heads: int = 0  # 0 for as many as heads
    gated: bool = False  # whether the feed-forward has a gate beside its first product
    causal: bool = False
    patch: int = 0  # values of a patch; 0 for no patches
    outputs: int = 0  # of a product with the last token

    def kernels(self, precision: str, batch: int) -> list[Kernel]:
        """Return products and attentions."""
        rows, values = self.tokens * batch, self.heads * self.head_width
        projected = values + 2 * (self.kv_heads or self.heads) * self.head_width
        inside = self.ffn * (2 if self.gated else 1)
        shapes = ((self.width, projected), (values, self.width), (self.width, inside), (self.ffn, self.width))
        products = [product(rows, inner, width, precision) for inner, width in shapes]
        pairs = batch * self.tokens**2 * (0.5 if self.causal else 1)
        products.append(Kernel("attention", gflop=4e-9 * values * pairs, inner=self.head_width))
        around = [product(rows, self.patch, self.width, "fp16")] if self.patch else []
        around += [product(1, self.width, self.outputs, precision)] if self.outputs else []
        return products * self.layers + around


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, part of a model, or single kernel.

    Attributes:
        products: count, rows for one input, inner size, width, and for a convolution the values that it reads.
        attention: count, heads, queries, keys, width of a head.
        others: count, bytes in FP16.
        kernels: all of them; 0 for those above, or for an encoder as many as TensorRT 10.3 lists for ViT-B/16.
    """

    encoder: EncoderSizes | None = None
    products: tuple[tuple[int, ...], ...] = ()
    attention: tuple[tuple[int, int, int, int, int], ...] = ()
    others: tuple[tuple[int, int], ...] = ()
    kernels: int = 0

    def work(self, precision: str, batch: int, kernels: int = 0) -> Work:
        """Return the work of a run; ``kernels`` of the measured engine replace those of the network."""
        counted = self.encoder.kernels(precision, batch) if self.encoder else []
        for count, rows, inner, width, *read in self.products:
            counted += [product(rows * batch, inner, width, precision, *(each * batch for each in read))] * count
        for count, heads, queries, keys, width in self.attention:
            counted += [Kernel("attention", gflop=4e-9 * batch * heads * queries * keys * width, inner=width)] * count
        for count, size in self.others:
            size = size * batch * ITEM_BYTES[precision] // 2
            counted += [Kernel("other", activation_bytes=size)] * count
        listed = kernels or self.kernels
        usual = round(_OTHERS_OF_A_LAYER * self.encoder.layers) + _OTHERS_AROUND if self.encoder else 0
        return Work(tuple(counted), max(listed - len(counted), 0) if listed else usual, batch)


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published latency.

    Attributes:
        source: key of its repository and file.
        ms: of one run on the GPU.
        kernels: that the engine has, where the source lists them; 0 otherwise.
        cuda_graph: whether one launched the run; None where the source does not say.
        check: why it was not fitted to; empty if it was.
        note: what was inferred.
    """

    network: str
    source: str
    gpu_mhz: float
    memory_mhz: float
    ms: float
    precision: str = "fp16"
    batch: int = 1
    kernels: int = 0
    cuda_graph: bool | None = None
    check: str = ""
    note: str = ""

    @property
    def mode(self) -> Mode:
        """The clocks, stated or assumed."""
        return Mode(self.gpu_mhz, self.memory_mhz)

    @property
    def work(self) -> Work:
        """The work of the run."""
        return published().networks[self.network].work(self.precision, self.batch, self.kernels)


class Unused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published rows that no prediction can be compared with, and the reason."""

    rows: int
    what: str
    why: str


class PublishedLatencies(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them; ``sources`` has repository, file and runtime by key, ``networks`` the models by name."""

    sources: dict[str, str]
    networks: dict[str, Network]
    measurements: tuple[Measurement, ...]
    unused: tuple[Unused, ...]


@cache
def published() -> PublishedLatencies:
    """Return the published latencies."""
    return msgspec.json.decode(files(__package__).joinpath("measurements.json").read_bytes(), type=PublishedLatencies)

"""The cross-entropy of a head with the vocabulary in chunks, and the memory that a step of its training then takes.

Logits, probabilities and scores of the whole vocabulary never exist at once. A pass over the chunks gives, for each
layer, the logarithm of the sum of the exponentials and the mean of the values in each chunk, which together make those
of the whole vocabulary:

    p U = Σ_c w_c (p_c U_c),   w = softmax over the chunks of log Σ exp z_c

So the size of the chunks changes nothing but rounding. A last pass gives the cross-entropy. Each pass computes the
logits anew from the states, and the backward pass computes each chunk once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from edge.instruments.memory import MemorySampler
from export.generate.model import ReadOut, softcapped
from export.papers.backward.head import BackwardHead, HeadConfig, split_heads
from export.papers.backward.methods import DIMS
from export.papers.backward.training import RECIPE
from export.papers.experiment import Experiment, Part
from export.report.drawing import finish_axes, new_figure
from export.report.table import Table
from export.training.provenance import Processor
from export.training.watch import Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20
#: M_MMAP_THRESHOLD of malloc.h.
_MMAP_THRESHOLD = -3


def chunked_losses(head: BackwardHead, read_out: ReadOut, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy [N] of a head on states [N, E], in chunks of so many tokens of the vocabulary.

    Args:
        head: with the residual, all probabilities and no dropout.
        targets: the tokens that follow, [N].
    """
    config = head.config
    assert (config.form, config.top_k, config.dropout) == ("residual", 0, 0), "a head of another form"
    constants, queries = head.keys_and_values(), list[Tensor]()
    chunks = [slice(start, start + chunk) for start in range(0, config.vocabulary, chunk)]

    def logits(tokens: slice, *queries: Tensor) -> Tensor:
        """Return z' [N, c] of the layers with these queries."""
        z = read_out._replace(weight=read_out.weight[tokens]).logits(hidden)
        for query, (keys, _) in zip(queries, constants, strict=False):
            z = torch.addmm(z, query, keys[tokens].T)
        return z

    def mean(tokens: slice, values: Tensor, temperatures: Tensor, *queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return log Σ exp z_c [H, N] and p_c U_c [H, N, d_h]."""
        scaled = logits(tokens, *queries) / temperatures[:, None, None]
        return scaled.logsumexp(2), functional.softmax(scaled, dim=2) @ split_heads(values[tokens], config.heads)

    def total(tokens: slice, *queries: Tensor) -> Tensor:
        """Return log Σ exp z'_c [N]."""
        return logits(tokens, *queries).logsumexp(1)

    for layer, (_, values) in zip(head.attentions, constants, strict=True):
        given = values, layer.temperatures, *queries
        parts = [checkpoint(mean, tokens, *given, use_reentrant=False) for tokens in chunks]
        sums, means = (torch.stack(of) for of in zip(*parts, strict=True))
        whole = torch.einsum("chn,chnd->nhd", sums.softmax(0), means).flatten(1)
        queries.append(layer.scaled_query(whole))
    totals = [checkpoint(total, tokens, *queries, use_reentrant=False) for tokens in chunks]
    right = softcapped((hidden * read_out.weight[targets]).sum(1), read_out.softcap)
    moved = sum((query * keys[targets]).sum(1) for query, (keys, _) in zip(queries, constants, strict=True))
    return torch.stack(totals).logsumexp(0) - right - moved


class ChunkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all parts.

    Attributes:
        width: E.
        states: N of a step.
        chunks: tokens in a chunk; 0 is the training itself, which keeps logits of the whole vocabulary.
        repeats: of each, in a process of its own.
    """

    vocabulary: int
    width: int
    dims: int = DIMS
    states: int = RECIPE.batch_size
    chunks: tuple[int, ...]
    repeats: int
    processor: Processor


class ChunkRecord(msgspec.Struct, frozen=True):
    """A step of a training, forwards and backwards.

    Attributes:
        peak_bytes: the largest resident memory during the step, minus that before it.
    """

    peak_bytes: int


class ChunkMemory(Experiment[ChunkRecord]):
    """The memory of a step by the size of the chunks; each part is to be a process of its own."""

    title, record = "Memory of a head's training by chunks of the vocabulary", ChunkRecord
    extensible = ("chunks", "repeats")

    def __init__(self, settings: ChunkSettings) -> None:
        self.settings: ChunkSettings = settings

    def parts(self) -> list[Part]:
        """All sizes are computed once before any is again."""
        return [
            Part(f"chunk{chunk}-{repeat}", (chunk,))
            for repeat in range(self.settings.repeats)
            for chunk in self.settings.chunks
        ]

    def compute(self, part: Part, watch: Watch) -> ChunkRecord:
        """Make two steps with random states and weights, of which the second is measured."""
        settings = self.settings
        # Otherwise malloc keeps some of what is freed, as chance will have it.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)
        torch.manual_seed(0)
        weight = torch.randn(settings.vocabulary, settings.width) / settings.width**0.5
        head = BackwardHead(
            HeadConfig(vocabulary=settings.vocabulary, width=settings.width, dims=settings.dims), weight
        )
        hidden = torch.randn(settings.states, settings.width)
        targets = torch.randint(settings.vocabulary, (settings.states,))
        (chunk,) = part.arguments
        _step(head, ReadOut(weight), hidden, targets, chunk)
        head.zero_grad()
        before = MemorySampler().process_rss_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        _step(head, ReadOut(weight), hidden, targets, chunk)
        (peak,) = [of.size_bytes for of in MemorySampler().sample() if of.kind == "process_peak_rss"]
        return ChunkRecord(peak - before)

    def text(self, records: Mapping[str, ChunkRecord]) -> str:
        """Return how the results came about."""
        settings = self.settings
        logits = 4 * settings.states * settings.vocabulary / _MIB
        return (
            f"Written by `fewheads language chunks`. A step forwards and backwards on {settings.states} states of "
            f"{settings.width} dimensions, with random weights in FP32 and a head of d = {settings.dims} over "
            f"{settings.vocabulary:,} tokens. Memory is the largest resident size of the process during the step minus "
            f"that before it, which has the embeddings; the logits alone would be {logits:.1f} MiB.\n\n"
            f"Computed on {settings.processor.name} ({settings.processor.described})."
        )

    def tables(self, records: Mapping[str, ChunkRecord]) -> list[Table]:
        """Return the memory of each size."""
        rows = [
            (f"{chunk:,}" if chunk else "all, without chunks", mebibytes)
            for chunk, mebibytes in self._by_chunk(records).items()
        ]
        return [Table("Memory of a step", ("tokens in a chunk", "MiB"), rows)]

    def figures(self, records: Mapping[str, ChunkRecord]) -> dict[str, Figure]:
        """Return the memory by the size of the chunks."""
        peaks = self._by_chunk(records)
        figure = new_figure(6, 4, without="give --no-plots")
        axes = figure.subplots()
        sizes = sorted(chunk for chunk in peaks if chunk)
        axes.plot(sizes, [peaks[chunk] for chunk in sizes], "o-", label="in chunks")
        if 0 in peaks:
            axes.axhline(peaks[0], color="C1", ls="--", label="the whole vocabulary at once")
        finish_axes(axes, xlabel="tokens in a chunk", ylabel="memory of a step, MiB", xscale="log", ylim=(0, None))
        return {"memory": figure}

    def _by_chunk(self, records: Mapping[str, ChunkRecord]) -> dict[int, float]:
        """Return the mean of the repeats, in MiB."""
        found: dict[int, list[int]] = {}
        for part in self.parts():
            if part.name in records:
                found.setdefault(part.arguments[0], []).append(records[part.name].peak_bytes)
        return {chunk: float(np.mean(some)) / _MIB for chunk, some in found.items()}


def _step(head: BackwardHead, read_out: ReadOut, hidden: Tensor, targets: Tensor, chunk: int) -> None:
    if chunk:
        losses = chunked_losses(head, read_out, hidden, targets, chunk)
    else:
        losses = functional.cross_entropy(head(read_out.logits(hidden), hidden), targets, reduction="none")
    losses.mean().backward()  # type: ignore[no-untyped-call]

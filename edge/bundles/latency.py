"""Latencies of a tier in ``manifest.json``: measured where the bundle was made, or predicted for a board.

They are for people. A device learns its own times, and no policy reads these.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from edge.bundles.fields import Positive, Struct, Text, require
from edge.errors import Raw

Milliseconds = Annotated[float, msgspec.Meta(gt=0)]


class _Latency(Struct, frozen=True, kw_only=True):
    """What both kinds have in common.

    Attributes:
        device: the processor, or the board.
        runtime, precision: of the file that ran, or would run; of several, the last one.
        part: of a request that needs several runs, such as ``prefill``; None for a request of one run.
        rows: of one run.
        tokens: of each row; None where the model's inputs have a fixed size.
        milliseconds: of one run, or of all runs of a part, without server and network.
        times_faster: the latency of the bundle's first tier over this one, both from the same source and for the same
            part, rows and tokens.
    """

    device: Text
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(onnxruntime|tensorrt)$")]
    precision: Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]
    part: Text | None = None
    rows: Positive
    tokens: Positive | None = None
    milliseconds: Milliseconds
    times_faster: Annotated[float, msgspec.Meta(gt=0)]


class MeasuredLatency(_Latency, frozen=True, kw_only=True, tag="measured", tag_field="source"):
    """The median of ``calls`` runs on one thread, in turns with the other tiers."""

    calls: Positive


class PredictedLatency(_Latency, frozen=True, kw_only=True, tag="prediction", tag_field="source"):
    """A prediction for a board in a power mode, on which nothing was measured; a measurement is expected between
    ``low_ms`` and ``high_ms``.
    """

    power_mode: Text
    low_ms: Milliseconds
    high_ms: Milliseconds


Latency = MeasuredLatency | PredictedLatency


def check_latency(latency: Latency, one_run: bool, subject: str) -> None:
    """Raise a BundleError if a prediction is outside its own band, or a part is named or missing without need.

    Args:
        one_run: whether a request to the model is one run, which has no parts.
    """
    if isinstance(latency, PredictedLatency):
        given = (latency.low_ms, latency.milliseconds, latency.high_ms)
        require(given == tuple(sorted(given)), subject, "prediction", given, "low_ms <= milliseconds <= high_ms")
    part = Raw("none") if latency.part is None else latency.part
    expected = "none, because a request is one run" if one_run else "the part of a request, which has several"
    require((latency.part is None) == one_run, subject, "latency part", part, expected)

"""Picture of a load report, drawn by matplotlib: outcomes and latency over time, percentiles, and memory."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge.bench.report import LoadReport
from edge.bench.sender import OUTCOMES
from edge.files import write_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The palette of Okabe and Ito, in which colour-blind people can distinguish all colours.
_HEX: Final = ("#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#999999", "#d55e00", "#000000", "#f0e442")
COLORS: Final = dict(zip(OUTCOMES, _HEX, strict=True))
#: Ratio of latencies beyond which a linear axis would hide the small ones.
_LOG_RATIO: Final = 30.0


def draw(report: LoadReport, path: Path) -> None:
    """Write the picture of a report as PNG, SVG or PDF, by the suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    figure.suptitle(f"{', '.join(report.models)}: {report.summary}")
    figure.supxlabel("\n".join(f"Not to be trusted: {doubt}" for doubt in report.doubts), color="red")
    (outcomes, latency), (percentiles, memory) = figure.subplots(2, 2)
    _draw_outcomes(outcomes, report)
    middles = [point.at_seconds + report.interval_seconds / 2 for point in report.timeline]
    for name in ("p50", "p99"):
        latency.plot(middles, [getattr(point, f"{name}_ms") for point in report.timeline], ".-", label=name)
    _finish_latency(latency, report, "Latency, by when requests were due", "seconds")
    percentiles.plot([_nines(percent) for percent, _ in report.curve], [value for _, value in report.curve])
    marks = [0, 50, *(100 - 10.0 ** (2 - n) for n in range(1, 8) if n <= math.log10(max(report.latency.count, 10)))]
    percentiles.set_xticks([_nines(mark) for mark in marks], [f"{mark:.6g}" for mark in marks])
    _finish_latency(percentiles, report, "Latency by percentile", "percent of responses")
    if report.memory:
        seconds, sizes = zip(*report.memory.samples, strict=True)
        memory.plot(seconds, [size / 1e6 for size in sizes], ".-")
    memory.set(title="Server's resident memory, with the warm-up", xlabel="seconds", ylabel="MB", ylim=(0, None))
    data = io.BytesIO()
    figure.savefig(data, dpi=120, format=path.suffix.removeprefix("."))
    write_result(path, data.getvalue())


def _draw_outcomes(axes: Axes, report: LoadReport) -> None:
    starts, step = [point.at_seconds for point in report.timeline], report.interval_seconds
    below = [0.0] * len(starts)
    for name in report.outcomes:
        rates = [point.outcomes.get(name, 0) / step for point in report.timeline]
        axes.bar(starts, rates, step, below, align="edge", color=COLORS[name], label=name.replace("_", " "))
        below = [low + rate for low, rate in zip(below, rates, strict=True)]
    responses = [point.answers_per_second for point in report.timeline]
    axes.plot([start + step / 2 for start in starts], responses, "k:", label="responses received")
    axes.set(title="Outcomes, by when requests were due", xlabel="seconds", ylabel="requests per second")
    axes.legend()


def _finish_latency(axes: Axes, report: LoadReport, title: str, xlabel: str) -> None:
    for deadline in filter(None, report.deadlines_ms):
        axes.axhline(deadline, color="black", linestyle="--", label=f"deadline {deadline:g} ms")
    latencies = [value for _, value in report.curve if value > 0]
    scale = "log" if latencies and max(*latencies, *report.deadlines_ms) / min(latencies) > _LOG_RATIO else "linear"
    axes.set(title=title, xlabel=xlabel, ylabel="ms", yscale=scale)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def _nines(percent: float) -> float:
    return -math.log10(1 - percent / 100)

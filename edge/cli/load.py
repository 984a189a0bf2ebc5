"""Open loop of ``fewheads bench``: its options and its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from edge.bench.plan import ENFORCERS, PATTERNS, POISSON, Plan, Rate, parse_mix, parse_number_mix
from edge.cli.options import PATH, check_plot, numbers, section_option
from edge.cli.output import heading, print_fields, print_json, print_table, progress, remark, stderr
from edge.errors import Raw, ServerError, UsageError
from edge.files import check_parent
from edge.scheduling.job import PRIORITY_LEVELS

if TYPE_CHECKING:
    from edge.bench.report import LoadReport

OPEN_LOOP = "Open loop, with --rate or --trace"
#: Steps of the progress bar.
_STEPS = 100
_LATENCY = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms", "max_ms")
_CAUSE = ("outcome", "cause", "count", "latency.p50_ms", "latency.p99_ms", "retry_after_p50_ms")
#: Read the limits of looped models.
LIMITS: Final[dict[str, Callable[[Any], dict[float, float]]]] = {
    "max_loops": partial(parse_number_mix, "--max-loops", least=1, most=1e6, whole=True),
    "tolerances": partial(parse_number_mix, "--tolerance", least=1e-9, most=math.inf),
}
_option = section_option(OPEN_LOOP)
#: Their arguments have the names of :class:`edge.bench.plan.Plan`, except for those of :func:`run_load`.
LOAD_OPTIONS = (
    _option("--rate", metavar="RATE", help="Requests per second, or 3x for three times the measured capacity."),
    _option("--arrivals", "pattern", type=click.Choice(PATTERNS), default=POISSON, help="Pattern of the arrivals."),
    _option("--trace", type=PATH, help="In place of --rate: a file of times in seconds, one to a line."),
    _option("--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Length of the measurement."),
    _option(
        "--warm-up", "warm_up_seconds", type=click.FloatRange(0), default=1.0, help="Seconds before the measurement."
    ),
    _option("--seed", type=click.IntRange(min=0), default=0, help="Equal seeds send equal requests."),
    _option("--weights", metavar="PARTS,...", help="Parts of the requests for each BUNDLE.  [default: equal]"),
    _option("--deadline-ms", "deadlines_ms", metavar="MS[=PARTS],...", help="Deadline, from when a request is due."),
    _option(
        "--deadline-by", "enforcer", type=click.Choice(ENFORCERS), default="client", help="What ends late requests."
    ),
    _option(
        "--priority",
        "priorities",
        metavar="LEVEL[=PARTS],...",
        help="Priorities, 1 (the highest) to 10.  [default: the server's]",
    ),
    _option("--policy", "policies", metavar="NAME[=PARTS],...", help="Policies or tiers.  [default: the server's]"),
    _option(
        "--texts", type=PATH, help="File of texts, one to a line, to send; also without --rate, for a name at --url."
    ),
    _option("--channels", type=click.IntRange(min=1, max=64), default=4, help="Connections."),
    _option("--max-outstanding", type=click.IntRange(min=1), default=10_000, help="Limit of requests in flight."),
    _option("--plot", type=PATH, help="Also draw the report, as .png, .svg or .pdf; needs matplotlib."),
)


def run_load(
    paths: tuple[Path, ...],
    *,
    url: str | None,
    target: str,
    cache: Path | None,
    as_json: bool,
    weights: str | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Measure one run and show its report, also after Ctrl-C and if requests failed or were lost, which then raise."""
    from edge.bench.closed_loop import server_for
    from edge.bench.open_loop import measure
    from edge.bench.plot import draw
    from edge.bundles.bundle import Bundle

    if plot:
        check_parent("--plot", plot)
        check_plot(plot)
    plan = _plan(**options)
    bundles = dict(zip(map(Bundle.open, paths), _parts(weights, len(paths)), strict=True))
    with server_for(list(bundles), url, target, cache) as address:
        with progress() as bar:
            task = bar.add_task(", ".join(bundle.manifest.name for bundle in bundles), total=_STEPS, note="")
            result = measure(address, bundles, plan, advanced=lambda share: bar.update(task, completed=share * _STEPS))
        # Before the server ends, so that the report is there even if that fails.
        if as_json:
            print_json(result)
        else:
            _show(result)
        if plot:
            draw(result, plot)
            remark(f"wrote {plot}")
    if result.interrupted:
        raise KeyboardInterrupt
    if result.lost or result.failed:
        given = Raw(f"{result.failed} requests that failed, and {result.lost} without any answer")
        fix = "See the causes above, and its log; with --deadline-by client an answer that never comes is expired."
        expected = "an answer, a refusal or an expiry for each request"
        raise ServerError(f"server at {address}", given=given, expected=expected, fix=fix)


def _plan(**options: Any) -> Plan:
    from edge.bench.inputs import read_texts
    from edge.bench.plan import read_trace

    readers: dict[str, Callable[[Any], Any]] = {
        "rate": Rate.parse,
        "trace": read_trace,
        "texts": read_texts,
        "policies": partial(parse_mix, "--policy"),
        "priorities": partial(parse_number_mix, "--priority", least=1, most=PRIORITY_LEVELS, whole=True),
        "deadlines_ms": partial(parse_number_mix, "--deadline-ms", least=1, most=math.inf),
        **LIMITS,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if "requests" in given and "trace" not in given:
        given["seconds"] = math.inf
    return Plan(**{name: readers[name](value) if name in readers else value for name, value in given.items()})


def _parts(weights: str | None, count: int) -> tuple[float, ...]:
    expected = f"{count} numbers above 0, one for each BUNDLE"
    parts = (1.0,) * count if weights is None else numbers("--weights", weights, expected)
    if len(parts) != count:
        raise UsageError("--weights", given=weights, expected=expected, fix="Give them in the order of the bundles.")
    return parts


def _show(report: LoadReport) -> None:
    loops = ["loops"] if report.loops is not None else []
    print_table(
        report.summary,
        ["group", "requests", *report.outcomes, *map(heading, _LATENCY), *loops],
        [
            [
                *(name, group.requests, *(group.outcomes.get(key, 0) for key in report.outcomes)),
                *(getattr(group.latency, field) if group.latency.count else None for field in _LATENCY),
                *(group.loops for _ in loops),
            ]
            for name, group in report.named_groups()
        ],
    )
    if report.causes:
        print_fields("Without an answer, with the time until the error", _CAUSE, report.causes)
    lag = report.lag
    remark(f"sent late by {lag.p50_ms:.3g} ms at p50, {lag.p99_ms:.3g} at p99, {lag.max_ms:.3g} at most")
    if report.memory:
        memory = report.memory
        before, after, peak = (size / 1e6 for size in (memory.before_bytes, memory.after_bytes, memory.peak_bytes))
        remark(f"server's resident memory: {before:.1f} MB before, {after:.1f} MB after, {peak:.1f} MB at most")
    for doubt in report.doubts:
        stderr.print(f"[red]not to be trusted:[/red] {doubt}", highlight=False)

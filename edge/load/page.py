"""A report as one HTML page with pictures, which fetches nothing and needs no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from edge.errors import Literally, UsageError
from edge.files import write_whole
from edge.load.charts import Axis, Bars, Line, chart, linear_axis, log_axis
from edge.load.record import OUTCOMES
from edge.load.report import LoadReport

#: Of Okabe and Ito, who chose them to be told apart by everyone.
COLORS = dict(
    zip(
        OUTCOMES,
        ("#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#999999", "#d55e00", "#000000", "#f0e442"),
        strict=True,
    )
)
_MEDIAN, _TAIL = "#0072b2", "#d55e00"
#: Beyond this ratio a linear axis would hide the small values.
_LOG_RATIO = 30.0
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--soft:#667;--line:#d5d9de;--card:#f4f6f8;--page:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#9aa4ad;--line:#3a4148;--card:#22272c;--page:#16191c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1180px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.5rem;margin:0}p.plan{color:var(--soft);margin:.2rem 0 1.2rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.7rem;margin-bottom:1.2rem}
.cards div{background:var(--card);border-radius:8px;padding:.6rem .9rem}.cards b{display:block;font-size:1.35rem}
.cards span{color:var(--soft);font-size:.85rem}.doubt{border-left:4px solid #d55e00;padding:.3rem .8rem;margin:.5rem 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1rem 1.6rem}figure{margin:0}
figcaption{font-weight:600;margin-bottom:.2rem}svg{width:100%;height:auto;display:block;font:12px system-ui,sans-serif}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.tick,.label{fill:var(--soft)}.label{text-anchor:middle}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
line.limit{stroke:var(--ink);stroke-dasharray:5 4}
text.limit{fill:var(--ink);text-anchor:end}.legend{color:var(--soft);font-size:.85rem;padding-left:58px}
.legend span{margin-right:1rem;white-space:nowrap}.legend i{display:inline-block;width:11px;height:11px;
border-radius:2px;margin-right:.35rem}table{border-collapse:collapse;margin:1.2rem 0;font-size:.9rem}
caption{text-align:left;font-weight:600;padding-bottom:.3rem}th,td{padding:.25rem .7rem;text-align:right;
border-bottom:1px solid var(--line)}th:first-child,td:first-child,td.word,th.word{text-align:left}th{color:var(--soft);
font-weight:500}.tables{overflow-x:auto}
"""


def check_place(path: Path) -> None:
    """Check the path of a report before its run.

    Raises:
        UsageError: it is no ``.html``, or its directory is not there.
    """
    if path.suffix != ".html":
        raise UsageError("--report", given=str(path), expected="a name that ends in .html", fix="Rename it.")
    if not path.parent.is_dir():
        given = Literally(f"{path.parent}, which is no directory")
        raise UsageError("--report", given=given, expected="a directory that is there", fix="Make it.")


def write_page(report: LoadReport, path: Path) -> None:
    """Write a report as a page.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        write_whole(path, page(report).encode())
    except OSError as error:
        given = Literally(error.strerror)
        raise UsageError(f"{path}", given=given, expected="a file to write", fix="Choose another place.") from None


def page(report: LoadReport) -> str:
    """Return the page of a report."""
    title = f"{', '.join(report.models)} under load"
    charts = [_outcomes(report), _latency(report), _curve(report), _memory(report)]
    doubts = "".join(f'<p class="doubt">Not to be trusted: {escape(doubt)}</p>' for doubt in report.doubts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="plan">{escape(_plan(report))}</p>{doubts}{_cards(report)}'
        f'<div class="charts">{"".join(charts)}</div><div class="tables">{_tables(report)}</div></body></html>\n'
    )


def _plan(report: LoadReport) -> str:
    capacity = (
        f", {report.rate_per_second / report.capacity_per_second:.3g} times the measured capacity of "
        f"{report.capacity_per_second:.4g}"
        if report.capacity_per_second
        else ""
    )
    deadlines = [f"{each:g} ms" for each in report.deadlines_ms if each]
    return (
        f"{report.pattern} arrivals, {report.rate_per_second:.4g} requests per second{capacity}, for "
        f"{report.seconds:.4g} s; {'deadline ' + ', '.join(deadlines) if deadlines else 'no deadline'}; latency counts "
        f"from when a request was due; seed {report.seed}{'; interrupted' if report.interrupted else ''}."
    )


def _cards(report: LoadReport) -> str:
    total = max(report.requests, 1)
    cards = [
        (f"{report.in_time_per_second:.4g}/s", "answers in time"),
        (f"{report.latency.p50_ms:.3g} ms", "p50 of the answered"),
        (f"{report.latency.p99_ms:.3g} ms", "p99 of the answered"),
        *((f"{count / total:.1%}", f"{name.replace('_', ' ')}: {count}") for name, count in report.outcomes.items()),
        (f"{report.lag.p99_ms:.3g} ms", "sent late, p99"),
    ]
    if "lost" not in report.outcomes:
        cards.append(("0", "lost"))
    return (
        f'<div class="cards">{"".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in cards)}</div>'
    )


def _outcomes(report: LoadReport) -> str:
    step = report.interval_seconds
    layers = [
        Bars(name.replace("_", " "), COLORS[name], [point.outcomes.get(name, 0) / step for point in report.timeline])
        for name in report.outcomes
    ]
    highest = max((sum(point.outcomes.values()) / step for point in report.timeline), default=0.0)
    answers = Line(
        "answers that came", "var(--ink)", [(p.at_seconds + step / 2, p.answers_per_second) for p in report.timeline]
    )
    return chart(
        "What became of the requests, by when they were due",
        _seconds(report),
        linear_axis("requests per second", max(highest, 1.0)),
        bars=layers,
        lines=[answers],
        starts=[point.at_seconds for point in report.timeline],
        width=step,
    )


def _latency(report: LoadReport) -> str:
    middle = report.interval_seconds / 2
    lines = [
        Line(name, color, [(point.at_seconds + middle, _or_nan(value)) for point, value in values])
        for name, color, values in (
            ("p50", _MEDIAN, [(point, point.p50_ms) for point in report.timeline]),
            ("p99", _TAIL, [(point, point.p99_ms) for point in report.timeline]),
        )
    ]
    return chart(
        "Latency of the answered, by when they were due",
        _seconds(report),
        _milliseconds(report, [value for line in lines for _, value in line.points]),
        lines=lines,
        limits=_deadlines(report),
    )


def _curve(report: LoadReport) -> str:
    depth = math.log10(max(report.latency.count, 10))
    marks = [
        (50.0, "50"),
        *((100 - 10.0 ** (2 - n), f"{100 - 10.0 ** (2 - n):.6g}") for n in range(1, 8) if n <= depth),
    ]
    ticks = tuple((_nines(percent), name) for percent, name in ((0.0, "0"), *marks))
    return chart(
        "Latency by percentile",
        Axis("percent of the answered", 0.0, depth, ticks),
        _milliseconds(report, [value for _, value in report.curve]),
        lines=[Line("latency", _MEDIAN, [(_nines(percent), value) for percent, value in report.curve])],
        limits=_deadlines(report),
    )


def _memory(report: LoadReport) -> str:
    if not report.memory:
        return ""
    samples = [(seconds, size / 1e6) for seconds, size in report.memory.samples]
    return chart(
        "The server's resident memory, the warm-up included",
        linear_axis("seconds", max(max(seconds for seconds, _ in samples), 1.0)),
        linear_axis("MB", max(size for _, size in samples) * 1.1),
        lines=[Line("resident memory", _MEDIAN, samples)],
    )


def _tables(report: LoadReport) -> str:
    headings = ("p50 ms", "p90 ms", "p95 ms", "p99 ms", "p99.9 ms", "max ms")
    rows: list[Sequence[object]] = []
    for name, group in report.named_groups():
        times = [getattr(group.latency, field) for field in _FIELDS] if group.latency.count else [""] * len(_FIELDS)
        rows.append([name, group.requests, *(group.outcomes.get(key, 0) for key in report.outcomes), *times])
    words = [outcome.replace("_", " ") for outcome in report.outcomes]
    made = _table("All requests and groups of them", ["", "requests", *words, *headings], rows)
    if report.causes:
        made += _table(
            "Without an answer",
            ["outcome", "cause", "count", "answered after, p50 ms", "come again after, p50 ms"],
            [
                [each.outcome, each.cause, each.count, each.latency.p50_ms, _blank(each.retry_after_p50_ms)]
                for each in report.causes
            ],
        )
    return made


_FIELDS = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99_9_ms", "max_ms")


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    words = [isinstance(cell, str) and bool(cell) for cell in rows[0]]
    head = "".join(
        f"<th{' class=word' if word else ''}>{escape(heading)}</th>"
        for heading, word in zip(headings, words, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, str):
        return f'<td class="word">{escape(value)}</td>'
    return f"<td>{value:.4g}</td>" if isinstance(value, float) else f"<td>{value}</td>"


def _seconds(report: LoadReport) -> Axis:
    end = len(report.timeline) * report.interval_seconds
    axis = linear_axis("seconds", end)
    return axis._replace(high=end, ticks=tuple(tick for tick in axis.ticks if tick[0] <= end * 1.001))


def _milliseconds(report: LoadReport, values: Sequence[float]) -> Axis:
    """Return an axis for latencies and deadlines; logarithmic where a linear one would hide the small ones."""
    seen = [value for value in values if value > 0]  # so that NaN is left out too
    if not seen:
        return linear_axis("ms", 1.0)
    high = max(*seen, *(value for value, _ in _deadlines(report)), 0.0)
    if high / min(seen) > _LOG_RATIO:
        return log_axis("ms, logarithmic", min(seen), high)
    return linear_axis("ms", high * 1.05)


def _deadlines(report: LoadReport) -> list[tuple[float, str]]:
    return [(each, f"deadline {each:g} ms") for each in report.deadlines_ms if each]


def _nines(percent: float) -> float:
    return -math.log10(max(1 - percent / 100, 1e-12))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _blank(value: float | None) -> object:
    return "" if value is None else value

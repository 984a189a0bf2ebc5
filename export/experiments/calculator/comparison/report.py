"""The report: the tables of all results as Markdown, which the command writes beside the figures."""

from __future__ import annotations

from collections.abc import Sequence

from edge.bundles.manifest import Measure
from export.papers.calculator.benchmark import BASELINE_MODEL, FLOOR, PAPER_SCORE, SCORE, SPLIT, baseline
from export.papers.calculator.comparison.results import Results, Spread
from export.papers.calculator.comparison.summary import FROZEN
from export.papers.calculator.data import LONG_TERMS
from export.papers.experiment import markdown_table
from export.training.intervals import with_interval

_SPLITS = {"in_range": "in range", "out_of_range": "out of range", "long": "long"}
_LENGTHS = (*(f"long/{terms}" for terms in LONG_TERMS), "long/without_5", "long/with_5")
_SLIP = (
    "The paper's figure for long expressions is no error, except that of the LSTM: its code subtracts the answers to "
    "expressions *in range* from the absolute values of the long ones' truth, which gives 6.17 for a network that is "
    "perfect in range, however wrong it is on long expressions."
)


def report_of(results: Results, figures: Sequence[str]) -> str:
    """Return the report.

    Args:
        figures: file names beside the report.
    """
    lines = ["# Calculators", "", *_introduction(results)]
    for title, note, table in (
        ("Accuracy", "", accuracy(results)),
        ("Right answers in %, once rounded", "", exact_matches(results)),
        ("Scores compared", _tests_note(results), against(results)),
        ("The paper's figures beside ours", _SLIP, published(results)),
        ("Absolute error by number of terms, and without and with the unseen operand 5", "", by_terms(results)),
        ("Cost", _cost_note(results), costs(results)),
    ):
        lines += ["", f"## {title}", "", *([note, ""] if note else []), *table]
    for name in figures:
        lines += ["", f"![{name.removesuffix('.png')}]({name})"]
    return "\n".join(lines) + "\n"


def _introduction(results: Results) -> list[str]:
    seeds = len(baseline().seeds)
    return [
        "Written by `fewheads calculator compare`. Means over seeds with Student's 95 % interval; of a network with "
        "one seed, the interval is over the items (bootstrap). Those of shares are at least as wide as Wilson's over "
        "the items. There are 1,457 items in range, 2,048 out of range, and 700 long ones: 100 each of 2 to 8 terms.",
        "",
        "The *score* is the geometric mean of the baseline's error over the model's, for four errors: absolute in "
        "range, out of range and on 4 to 8 terms, and relative out of range. "
        f"1 is {BASELINE_MODEL}, frozen as the mean of {seeds} seeds. Errors below {FLOOR:g} count as {FLOOR:g}, so "
        "that a perfect network has a score. The *paper's score* is paper 000's formula over the same baseline. Means "
        "of scores are geometric.",
    ]


def accuracy(results: Results) -> list[str]:
    """Return the table of errors and scores."""
    columns = {
        "MAE in range": ("mae", "in_range"),
        "MRE in range": ("mre", "in_range"),
        "MAE out of range": ("mae", "out_of_range"),
        "MRE out of range": ("mre", "out_of_range"),
        "MAE 4 to 8 terms": ("mae", "long/4-8"),
        "score": (SCORE, SPLIT),
        "paper's score": (PAPER_SCORE, SPLIT),
    }
    rows = [
        (model.name, f"{model.parameters:,}", model.seeds, *(_value(model.measure(*key)) for key in columns.values()))
        for model in results.models
    ]
    return markdown_table(("model", "parameters", "seeds", *columns), rows, texts=1)


def exact_matches(results: Results) -> list[str]:
    """Return the table of the shares of right answers."""
    rows = [
        (model.name, *(_percent(model.measure("exact_match", split)) for split in _SPLITS)) for model in results.models
    ]
    return markdown_table(("model", *_SPLITS.values()), rows, texts=1)


def against(results: Results) -> list[str]:
    """Return the table of t-tests against the baseline and the reference."""
    others = _compared(results)
    rows = []
    for model in results.models:
        tests = {test.other: test for test in model.against}
        cells = [(_number(tests[name].ratio), _p(tests[name].p)) if name in tests else ("", "") for name in others]
        rows.append((model.name, *(cell for pair in cells for cell in pair)))
    heads = ("model", *(head for name in others for head in (f"score over that of {name}", "p")))
    return markdown_table(heads, rows, texts=1)


def _compared(results: Results) -> tuple[str, str]:
    return FROZEN, results.reference


def _tests_note(results: Results) -> str:
    tests = [test for model in results.models for test in model.against if test.other in _compared(results)]
    number = sum(test.p is not None for test in tests)
    return (
        "Welch's t-tests of the logarithms of scores, over seeds; none where a model has one seed. The values of p are "
        f"not corrected: of {number} tests, those below {0.05 / max(number, 1):.2g} are significant at 5 % together."
    )


def published(results: Results) -> list[str]:
    """Return the table of paper 000's figures, each followed by ours."""
    rows = []
    for model in results.models:
        paper = model.paper
        if paper is None:
            continue
        pairs = [(value, _number(model.measure(*key).value)) for key, value in paper.errors().items()]
        *errors, (printed_long, true_long) = pairs
        ours = (printed_long, _number(model.paper_long) if paper.long_is_no_error else "no slip", true_long)
        least, most = model.paper_scores
        score = (_number(model.measure(PAPER_SCORE, SPLIT).value), f"{_number(least)} … {_number(most)}")
        rows.append((model.name, *(cell for pair in errors for cell in pair), *ours, paper.score, *score))
    if not rows:
        return ["None of these models is in the paper's table."]
    heads = [head for name in ("MAE in", "MRE in", "MAE out", "MRE out") for head in (f"{name}: paper", "ours")]
    heads += ["long: paper", "its slip with our answers", "true MAE", "score: paper", "ours", "by seed of the baseline"]
    return markdown_table(("model", *heads), rows, texts=1)


def by_terms(results: Results) -> list[str]:
    """Return the table of errors by length."""
    rows = [(model.name, *(_value(model.measure("mae", split)) for split in _LENGTHS)) for model in results.models]
    heads = [split.removeprefix("long/").replace("_", " ") for split in _LENGTHS]
    return markdown_table(("model", *heads), rows, texts=1)


def costs(results: Results) -> list[str]:
    """Return the table of costs; latencies and memory are left out where they were not measured."""
    rows = []
    many = sorted({rows for model in results.models for rows in model.cost.latencies})
    for model in results.models:
        cost = model.cost
        cells = [model.name, f"{model.parameters:,}", f"{cost.mflop:.3g}", f"{cost.onnx_bytes / 1e3:,.1f}"]
        for number in many:
            latency = cost.latencies[number]
            cells += [_spread(latency.served), _spread(latency.served_ratio)]
            cells += [_spread(latency.in_process), _spread(latency.in_process_ratio)]
        if cost.memory_bytes:
            cells.append(_spread(cost.memory_bytes, 1e-6))
        rows.append(cells)
    heads = ["model", "parameters", "MFLOP", "ONNX kB"]
    for number in many:
        what = "" if number == 1 else f", {number} rows"
        heads += [f"served ms{what}", f"/ {results.reference}", f"in process ms{what}", f"/ {results.reference}"]
    return markdown_table([*heads, *(["memory MB"] if many else [])], rows, texts=1)


def _cost_note(results: Results) -> str:
    note = "MFLOP are operations of matrix products for one expression, counted in the ONNX file."
    if not any(model.cost.latencies for model in results.models):
        return note
    settings, processor = results.settings, results.processor
    return (
        f"{note} Latencies are medians of {settings.requests:,} requests of one expression, and of a tenth as many of "
        "64, by `fewheads bench`: *served* from a client's call to its answer over gRPC, *in process* of preprocessing "
        f"and ONNX Runtime alone; ratios are to {results.reference} in the same round. Memory is the resident memory "
        "that a further copy of a model adds to a process. In brackets: the least and the most of "
        f"{settings.rounds} rounds. Measured on {processor.name} ({processor.described})."
    )


def _value(measure: Measure) -> str:
    return with_interval(measure.value, measure.interval, _number) if measure.interval else _number(measure.value)


def _percent(measure: Measure) -> str:
    interval = measure.interval or (measure.value, measure.value)
    return with_interval(measure.value, interval, lambda share: f"{100 * share:.1f}")


def _spread(spread: Spread, scale: float = 1.0) -> str:
    return with_interval(spread.median, (spread.least, spread.most), lambda value: _number(scale * value))


def _number(value: float) -> str:
    return f"{value:.3g}"


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"

"""The report: the tables of all results as Markdown, which the command writes beside the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from export.papers.experiment import markdown_table
from export.papers.looped.published import DIMS, PUBLISHED
from export.papers.looped.results import Curve, Results, TaskResult
from export.papers.looped.stopping import PLAIN, SETTLED, TOLERANCES
from export.training.intervals import RESAMPLES, Difference, with_interval

_LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 30, 40, 60, 80, 120, 200, 500)
#: Numbers of pairs in a table of curves, at most.
_COLUMNS = 11
#: Errors below this are of the arithmetic.
_ROUNDING = 1e-6
_SHIFTS = (
    "The models were trained on none of these. A scale's square divides the errors, too. With noise, values that are "
    "predicted have it as well, and ridge is the best possible method."
)


def report_of(results: Results, figures: Sequence[str]) -> str:
    """Return the report.

    Args:
        figures: file names beside the report.
    """
    settings, processor = results.settings, results.processor
    lines = [
        "# Looped transformers on function classes",
        "",
        f"Written by `fewheads looped`. Errors are squared and divided by the variance of the values. "
        f"{settings.prompts:,} prompts, {RESAMPLES:,} resamples of prompts and of seeds; intervals are of 95 % where "
        "nothing else is said. All methods see the same prompts, and differences are paired.",
        "",
        f"Computed on {processor.name} ({processor.described}).",
    ]
    for task in results.tasks:
        lines += ["", *_task(task, settings.loops), *_figures(task, figures)]
    return "\n".join(lines) + "\n"


def _task(task: TaskResult, most: int) -> list[str]:
    lines = [f"## {task.function}, d = {task.dims}, {task.points - 1} pairs"]
    for title, table in (
        ("Models, after all pairs", _groups(task, most)),
        ("Runs", _runs(task, most)),
        ("Error by number of pairs (figure 2), 5th and 95th percentile", _by_pairs(task)),
        (_published_title(task), _published(task)),
        ("Error by loops, 5th and 95th percentile", _by_loops(task)),
        (f"{task.looped} against the others, after all pairs", _against(task)),
        ("Other distributions of prompts", _shifts(task)),
        *((f"Probes: {probed.model}", _probed(task, number)) for number, probed in enumerate(task.probes)),
        ("Loops that stop by their residual", _stopping(task)),
    ):
        if table:
            lines += ["", f"### {title}", "", *table]
    return lines


def _groups(task: TaskResult, most: int) -> list[str]:
    rows = [
        (
            group.name,
            group.seeds,
            f"{group.parameters:,}",
            group.loops,
            with_interval(group.error, group.interval, _number),
            _number(group.longest),
            group.settled,
            group.as_unlooped,
        )
        for group in task.groups
    ]
    settled, last = f"loops until within {SETTLED - 1:.0%} of that", f"error after {most} loops"
    heads = ("model", "seeds", "parameters", "loops", "error", last, settled, "loops until the unlooped error")
    return _table(heads, rows)


def _runs(task: TaskResult, most: int) -> list[str]:
    rows = [
        (
            run.name,
            run.group,
            run.seed,
            run.steps,
            f"{run.seconds:.0f}",
            with_interval(run.error, run.interval, _number),
            _number(run.longest),
        )
        for run in task.runs
    ]
    heads = ("run", "model", "seed", "steps", "seconds of training", "error", f"error after {most} loops")
    return _table(heads, rows)


def _by_pairs(task: TaskResult) -> list[str]:
    columns = _spread(range(1, task.points), [curve.x for curve in task.by_pairs])
    return _table(("pairs", *columns), [(curve.name, *_values(curve, columns)) for curve in task.by_pairs])


def _published_title(task: TaskResult) -> str:
    size = "this size" if task.dims == DIMS else f"another size, d = {DIMS}"
    return f"Published errors, of {size}{', read off the figure' if task.function == 'tree' else ''}"


def _published(task: TaskResult) -> list[str]:
    errors = PUBLISHED[task.function]
    columns = sorted({pairs for of_method in errors.values() for pairs in of_method})
    rows = [(name, *(_number(of_method.get(pairs)) for pairs in columns)) for name, of_method in errors.items()]
    return _table(("pairs", *columns), rows)


def _by_loops(task: TaskResult) -> list[str]:
    curves = [*task.by_loops, *(task.run_loops if len(task.run_loops) > 1 else ())]
    if not curves:
        return []
    columns = [loops for loops in _LOOPS if loops <= curves[0].x[-1]]
    return _table(("loops", *columns), [(curve.name, *_values(curve, columns)) for curve in curves])


def _against(task: TaskResult) -> list[str]:
    rows = []
    for one in task.against:
        ratios = [
            "" if ratio is None or bounds is None else with_interval(ratio, bounds, _number)
            for ratio, bounds in ((one.ratio, one.ratio_interval), (one.mean_ratio, one.mean_ratio_interval))
        ]
        rows.append((one.other, _number(one.error), _difference(one.difference), *ratios))
    heads = (
        "other",
        "its error",
        "looped minus other",
        "looped / other",
        "looped / other, mean over all numbers of pairs",
    )
    return _table(heads, rows)


def _shifts(task: TaskResult) -> list[str]:
    methods = list(dict.fromkeys(method for one in task.shifts for method in one.errors))
    # Of shifts that were measured after every number of pairs: one pair fewer than dimensions, as many, and all.
    shown = {task.dims - 1, task.dims, task.points - 1}
    rows = [
        (
            one.shift,
            one.pairs,
            *(_number(one.errors.get(method)) for method in methods),
            _difference(one.difference),
        )
        for one in task.shifts
        if one.pairs in shown
    ]
    table = _table(("prompts", "pairs", *methods, "looped minus unlooped"), rows)
    return [_SHIFTS, "", *table] if table else []


def _probed(task: TaskResult, number: int) -> list[str]:
    probed = task.probes[number]
    stages = "layers" if probed.model == "unlooped" else "loops"
    rows = [(target, *map(_number, errors)) for target, errors in probed.errors.items()]
    return _table((f"{stages} (error / variance, held out)", *probed.stages), rows)


def _stopping(task: TaskResult) -> list[str]:
    stopped = [point for point in task.stopping if point.tolerance in TOLERANCES]
    rows = [
        (point.method, point.tolerance, f"{point.mean_loops:.1f}", f"{point.most:.0f}", _number(point.error))
        for point in stopped
    ]
    fewest = [
        (
            one.method,
            "by residual" if one.stopped else "fixed",
            "never" if one.mean_loops is None else f"{one.mean_loops:.1f}",
            _number(one.error),
        )
        for one in task.fewest
    ]
    if not rows:
        return []
    best = _table(("loops", "stop", "fewest mean loops within 5 %", "error"), fewest)
    table = _table(("loops", "tolerance", "mean loops", "90th percentile of loops", "error"), rows)
    return [verdict(task), "", *best, "", *table]


def verdict(task: TaskResult) -> str:
    """Return one sentence that says whether Anderson acceleration saves loops; the task has looped runs."""
    reached = {one.method: one for one in task.fewest if one.stopped and one.mean_loops is not None}
    plain = reached.pop(PLAIN, None)
    best = min(reached.values(), key=lambda one: one.mean_loops or 0, default=None)
    ours, theirs = (None if one is None else one.mean_loops for one in (plain, best))
    if best is None or theirs is None:
        return "Anderson acceleration does not reach the error of plain loops at any of the tolerances."
    if ours is None:
        return f"Only {best.method} reaches the error of plain loops when stopped by its residual."
    word = "helps" if theirs < 0.95 * ours else "does not help"
    return f"Anderson acceleration {word}: {theirs:.1f} mean loops ({best.method}), against {ours:.1f} plain ones."


def _figures(task: TaskResult, figures: Iterable[str]) -> list[str]:
    ours = [name for name in figures if name.startswith(f"{task.name}-")]
    return [line for name in ours for line in ("", f"![{name.removesuffix('.png')}]({name})")]


def _values(curve: Curve, columns: Sequence[int]) -> list[str]:
    places = {x: place for place, x in enumerate(curve.x)}
    return [
        with_interval(curve.mean[place], (curve.low[place], curve.high[place]), _number) if place is not None else ""
        for place in map(places.get, columns)
    ]


def _spread(numbers: Sequence[int], measured: Iterable[Sequence[int]]) -> list[int]:
    """Return :data:`_COLUMNS` numbers at most: those that every method has if they are few, and others between them."""
    common = set(numbers).intersection(*map(set, measured))
    kept = common if len(common) < _COLUMNS else {numbers[-1]}
    step = -(-len(numbers) // (_COLUMNS - len(kept)))
    return list(numbers) if len(numbers) <= _COLUMNS else sorted(kept.union(numbers[::step]))


def _difference(found: Difference | None) -> str:
    return "" if found is None else with_interval(found.value, found.interval, partial(_number, sign="+"))


def _number(value: float | None, sign: str = "") -> str:
    if value is not None and 0 < abs(value) < _ROUNDING:
        return f"<{_ROUNDING:g}"
    return "" if value is None else f"{value:{sign}.3g}"


def _table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    return markdown_table(heads, rows, texts=1) if rows else []

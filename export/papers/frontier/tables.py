"""Tables of a frontier, for its report, README and LIMITS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from export.finetune.text_tasks import TASKS
from export.papers.frontier.records import DENSE, FP32, INT8, STATIC, Key
from export.papers.frontier.summary import BASELINE, Summary, geometric
from export.report.table import Table
from export.training.intervals import Difference, with_interval
from export.training.provenance import described

#: The product's aims: the points that a tier of a planned speed-up may lose on the mean of these tasks.
AIMS = {2.0: 0.2, 3.0: 0.5, 4.0: 1.0}
_AIMED = ("SST-2", "CoLA", "STS-B", "MRPC")
#: Metrics times 100 of MiniLM-L6-H384, a language model of the same shape, fine-tuned on the same training sets:
#: Wang et al. 2020, in the README of their code. It does not say which metric that of MRPC is, so that one is left out.
PUBLISHED = {"SST-2": 91.5, "CoLA": 47.5, "RTE": 68.8}
#: Its width and number of layers.
PUBLISHED_SHAPE = 384, 6
#: The points that static INT8 may lose against its FP32.
_STATIC_AIM = 0.3
#: How far above its aim the upper confidence bound of a loss may be.
_MARGIN = 1.0


#: Claims of paper 002 for the average of GLUE: speed-up and points.
PAPER = {FP32: (1.76, -0.2), INT8: (2.3, -0.5)}


def text_of(summary: Summary) -> str:
    """Return the conditions, and the table of the first screen."""
    seeds = []
    for name, task in summary.tasks.items():
        first, number = task.families[0].answered, len(task.families)
        counted = f"{number} seed{'s' * (number > 1)}"
        seeds.append(f"{name} (n = {first.items:,}, {counted}, {first.mean_tokens:.0f} tokens)")
    several = any(len(task.families) > 1 for task in summary.tasks.values())
    trained = {one.gpu or described([one.processor])[0] for one in (family.answered for family in summary.families)}
    lines = [
        f"Tasks: {', '.join(seeds)}. ONNX Runtime, one thread, batch 1, timed on {', '.join(processors(summary))}; "
        f"trained on {', '.join(sorted(trained))}. Differences are paired, in points, with 95 % intervals over items"
        f"{' and seeds' if several else ''}."
    ]
    if not summary.above_chance:
        none = "On none of these tasks is the dense model better than chance"
        lines += ["", f"{none}, so the differences support no claim."]
    elif without := _without(summary):
        reason = "where the dense model is not significantly better than chance"
        lines += ["", f"Averages are{without}, {reason}, unless their column says otherwise."]
    planned = [tier.planned for tier in summary.settings.tiers.values()]
    places = sorted({f"{one.device} ({one.label})" for one in planned})
    lines += ["", f"Planned speeds are those of the tiers' plans, for {', '.join(places)}."]
    return "\n".join([*lines, "", *headline(summary).markdown()])


def headline(summary: Summary) -> Table:
    """Return the table of the first screen: dense and tiers, as planned for a device, then as measured here."""
    rows: list[list[object]] = []
    for run in [run for run in (DENSE, *summary.settings.tiers) if (run, FP32) in summary.keys]:
        tier = summary.settings.tiers.get(run)
        shown = (f"{point.speedup:.1f}× ({point.name})" for point in tier.planned.points) if tier else ["1.0×"]
        cells: list[object] = [run, ", ".join(shown)]
        for precision in (FP32, INT8):
            key = run, precision
            lost = "–" if key == BASELINE else _lost(summary.difference(key)) if key in summary.keys else ""
            cells += [f"{geometric(summary.speedups(key)):.1f}×" if key in summary.keys else "", lost]
        rows.append(cells)
    heads = ("model", "times faster, planned", "on x86, FP32", "score lost", "on x86, INT8", "score lost")
    return Table("", heads, rows)


def tables_of(summary: Summary) -> list[Table]:
    """Return the tables of the report behind the first one."""
    files = [key for key in summary.keys if key[1] != STATIC]
    return [
        Table("Aims", ("aim", "", "points lost", "upper bound"), list(_aims(summary)), 2),
        _control(summary),
        _static(summary),
        _files(summary, files),
        *_published(summary),
        Table("Task by task", ("run", "precision", *summary.tasks), list(_by_task(summary, files)), 2),
    ]


def _published(summary: Summary) -> Iterator[Table]:
    """Yield the dense models' scores beside published ones, if they have the shape of :data:`PUBLISHED`."""
    if any((one.answered.dim, len(one.answered.layers[DENSE])) != PUBLISHED_SHAPE for one in summary.families):
        return
    rows = [
        (name, TASKS[name].headline, f"{summary.tasks[name].values(BASELINE).mean():.1f}", PUBLISHED.get(name))
        for name in summary.tasks_of(BASELINE)
    ]
    heads = ("task", "metric × 100", "dense, here", "MiniLM-L6-H384")
    yield Table("The dense model against published results", heads, rows, 2)


def control_of(summary: Summary) -> tuple[Key, Key] | None:
    """Return the restored tier and the control, which was not restored; None where no family has the control."""
    both = (summary.settings.control, FP32), (summary.settings.control_run, FP32)
    return both if all(key in summary.keys for key in both) else None


def _aims(summary: Summary) -> Iterator[tuple[str, ...]]:
    names = [name for name in summary.judged if name in _AIMED] or summary.judged
    for run, tier in summary.settings.tiers.items():
        most, speed = AIMS.get(tier.planned.target_speedup), tier.planned.target_speedup
        if most is not None and summary.is_complete((run, FP32)):
            difference = summary.difference((run, FP32), tasks=names)
            aim = f"{run}, planned for {speed:.1f}×, at {most} on {', '.join(names)}"
            yield aim, _verdict(difference, most), *_worst(difference)
    for run in [run for run, precision in summary.keys if precision == STATIC]:
        difference = summary.difference((run, STATIC), (run, FP32))
        wanted = f"static INT8 of {run} at {_STATIC_AIM} below its FP32"
        yield wanted, _verdict(difference, _STATIC_AIM), *_worst(difference)
    if both := control_of(summary):
        difference = summary.difference(*both)
        yield "restored ahead of not restored", _verdict(difference, 0, margin=0), *_worst(difference)


def _control(summary: Summary) -> Table:
    rows, both = [], control_of(summary)
    if both:
        names = summary.tasks_of(*both, judged=True)
        seeds = ", ".join(f"{name} {len(summary.tasks[name].having(*both))}" for name in names)
        speeds = (geometric(summary.speedups(one, *both, judged=True)) for one in both)
        ahead = _signed(summary.difference(*both)), *_cells(summary.by_task(*both), summary.judged)
        rows.append((seeds, *(f"{speed:.2f}" for speed in speeds), *ahead))
    heads = ("seeds", "speed of the tier", "of the control", "points ahead", *summary.judged)
    note = f"{summary.settings.control}, and the same layers of the dense encoder with the same training on the task."
    return Table("Restored on plain text, and not restored", heads, rows, 1, note)


def _static(summary: Summary) -> Table:
    rows = []
    for key in [key for key in summary.keys if key[1] == STATIC]:
        other = key[0], FP32
        average = _signed(summary.difference(key, other)) if summary.is_complete(key, other) else ""
        rows.append((key[0], average, *_cells(summary.by_task(key, other), summary.tasks)))
    heads = ("run", f"points against its FP32{_without(summary)}", *summary.tasks)
    return Table("Static INT8, for TensorRT", heads, rows)


def _files(summary: Summary, files: Iterable[Key]) -> Table:
    heads = ["run", "precision", "speed, dev as it is", "at 128 tokens", "against dense INT8", "average"]
    heads += ["points, all tasks", f"points{_without(summary)}", "against its FP32"]
    rows = []
    for key in files:
        ratios, names = summary.speedups(key), summary.tasks_of(key)
        over_all = ("", "")  # an average of other tasks says nothing
        if len(names) == len(summary.tasks):
            average = float(np.mean([summary.tasks[name].values(key).mean() for name in names]))
            over_all = f"{average:.1f}", _signed(summary.difference(key, tasks=names))
        rows.append(
            (
                *key,
                f"{geometric(ratios):.2f} ({ratios.min():.2f} … {ratios.max():.2f})",
                f"{geometric(summary.speedups(key, fixed=True)):.2f}",
                f"{geometric(ratios / summary.speedups((DENSE, INT8), key)):.2f}",
                *over_all,
                _signed(summary.difference(key)) if summary.is_complete(key) else "",
                "" if key[1] == FP32 else _signed(summary.difference(key, (key[0], FP32))),
            )
        )
    return Table("All files of ONNX Runtime", heads, rows, 2)


def _by_task(summary: Summary, files: Iterable[Key]) -> Iterator[tuple[str, ...]]:
    yield "chance", "", *(f"{task.chance:.1f}" for task in summary.tasks.values())
    for key in files:
        differences = summary.by_task(key)
        cells = []
        for name, task in summary.tasks.items():
            change = f", {_signed(differences[name])}" if key != BASELINE and name in differences else ""
            cells.append(f"{task.values(key).mean():.1f}{change}" if task.having(key) else "")
        yield *key, *cells


def processors(summary: Summary) -> tuple[str, ...]:
    """Return the names of the processors that timed."""
    return described(family.timed.processor for family in summary.families)


def _without(summary: Summary) -> str:
    left_out = ", ".join(name for name in summary.tasks if name not in summary.judged)
    return f" without {left_out}" if left_out else ""


def _verdict(difference: Difference, most: float, margin: float = _MARGIN) -> str:
    """Return whether the loss is at most ``most``, and its upper confidence bound below that and a margin."""
    if -difference.value > most:
        return "missed"
    return "met" if -difference.interval[0] < most + margin else "not certain"


def _worst(difference: Difference) -> tuple[str, str]:
    """Return the loss and its upper confidence bound, for people."""
    loss, bound = (f"{-value:.2f}".replace("-0.00", "0.00") for value in (difference.value, difference.interval[0]))
    return loss, bound


def _cells(differences: Mapping[str, Difference], names: Iterable[str]) -> list[str]:
    return [_signed(differences[name]) if name in differences else "" for name in names]


def _signed(difference: Difference) -> str:
    return with_interval(difference.value, difference.interval, "{:+.1f}".format)


def _lost(difference: Difference) -> str:
    low, high = difference.interval
    return with_interval(-difference.value, (-high, -low), lambda value: f"{value:.1f}".replace("-0.0", "0.0"))

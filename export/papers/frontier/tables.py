"""Tables of a frontier, for its report, README and LIMITS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product

import numpy as np

from edge.bench.layer_latencies import PREDICTION
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.roofline import Prediction, predict
from export.estimate.sizes import USUAL_BATCHES, USUAL_LENGTHS
from export.estimate.work import transformer_work
from export.finetune.text_tasks import TASKS
from export.models.transformer import LayerShape, TransformerConfig
from export.papers.frontier.records import DENSE, FP32, INT8, REDUCED, STATIC, Key
from export.papers.frontier.summary import BASELINE, Summary, geometric
from export.report.table import Table
from export.training.intervals import Difference, with_interval
from export.training.provenance import described

#: The product's aims for the judged tasks: a tier's precision, its speed-up, and the points it may lose.
AIMS = {
    ("half", FP32): (2.0, 0.2),
    ("third", FP32): (3.0, 0.5),
    ("quarter", FP32): (4.0, 1.0),
    ("quarter", INT8): (7.0, 1.0),
}
#: Metrics times 100 of MiniLM-L6-H384, a language model of the same shape, fine-tuned on the same training sets:
#: Wang et al. 2020, in the README of their code. It does not say which metric that of MRPC is, so that one is left out.
PUBLISHED = {"SST-2": 91.5, "CoLA": 47.5, "RTE": 68.8}
#: The points that static INT8 may lose against its FP32.
_STATIC_AIM = 0.5
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
    return "\n".join([*lines, "", *headline(summary).markdown()])


def headline(summary: Summary) -> Table:
    """Return the table of the first screen: dense and tiers, predicted on a Jetson, then as measured."""
    rows: list[list[object]] = []
    for run in [run for run in (DENSE, *summary.settings.tiers) if (run, FP32) in summary.keys]:
        cells: list[object] = [run, ", ".join(f"{faster:.1f}×" for *_, faster in predictions(summary, run).values())]
        for precision in (FP32, INT8):
            key = run, precision
            lost = "–" if key == BASELINE else _lost(summary.difference(key)) if key in summary.keys else ""
            cells += [f"{geometric(summary.speedups(key)):.1f}×" if key in summary.keys else "", lost]
        rows.append(cells)
    heads = ("model", "on a Jetson, FP16, predicted", "on x86, FP32", "score lost", "on x86, INT8", "score lost")
    return Table("", heads, rows)


def tables_of(summary: Summary) -> list[Table]:
    """Return the tables of the report behind the first one."""
    files = [key for key in summary.keys if key[1] not in (STATIC, REDUCED)]
    return [
        Table("Aims", ("aim", "", "speed", "points lost", "upper bound"), list(_aims(summary)), 2),
        _controls("The search against simple reductions of the same speed", summary, FP32),
        _changes("Before distillation", "points against dense", summary, REDUCED, lambda run: BASELINE),
        _controls("The search against simple reductions, before distillation", summary, REDUCED),
        _changes("Static INT8, for TensorRT", "points against its FP32", summary, STATIC, lambda run: (run, FP32)),
        _files(summary, files),
        _board(summary),
        Table(
            "The dense model against published results",
            ("task", "metric × 100", "dense, here", "MiniLM-L6-H384"),
            [
                (name, TASKS[name].headline, f"{summary.tasks[name].values(BASELINE).mean():.1f}", PUBLISHED.get(name))
                for name in summary.tasks_of(BASELINE)
            ],
            2,
        ),
        Table("Task by task", ("run", "precision", *summary.tasks), list(_by_task(summary, files)), 2),
    ]


def controls(summary: Summary, form: str) -> list[tuple[Key, Key]]:
    """Return the searched tier and each control, before or after distillation."""
    tier = summary.settings.control_tier
    runs = [run for run, precision in summary.keys if precision == FP32 and run.startswith(f"{tier}-")]
    return [((tier, form), (run, form)) for run in runs if (run, form) in summary.keys]


def predictions(summary: Summary, run: str) -> dict[str, tuple[float, float, float, float]]:
    """Return the latency in FP16 on a Jetson, its band, and the speed over the dense model, by input.

    By the sizes of layers; means over the families that have the run, geometric ones of speeds.
    """
    having = [one.answered for one in summary.families if run in one.answered.layers]
    cells = {}
    for tokens, rows in product(USUAL_LENGTHS, USUAL_BATCHES):
        here, dense = ([_predicted(one.dim, one.layers[name], tokens, rows) for one in having] for name in (run, DENSE))
        faster = [theirs.milliseconds / mine.milliseconds for theirs, mine in zip(dense, here, strict=True)]
        low, mean, high = (
            np.mean([getattr(one, name) for one in here]) for name in ("low_ms", "milliseconds", "high_ms")
        )
        cells[f"{tokens} tokens, batch {rows}"] = float(mean), float(low), float(high), geometric(np.array(faster))
    return cells


def _predicted(dim: int, layers: tuple[LayerShape, ...], tokens: int, rows: int) -> Prediction:
    config = TransformerConfig(architecture="bert", dim=dim, layers=layers)
    return predict(transformer_work(config, tokens, rows), None, DEFAULT_BOARD.mode)


def _aims(summary: Summary) -> Iterator[tuple[str, ...]]:
    for key, (speedup, most) in AIMS.items():
        if key in summary.keys:
            speed, difference = geometric(summary.speedups(key)), summary.difference(key)
            has_vnni = all("VNNI" in one for one in processors(summary))
            slow = "too slow" if key[1] == FP32 or has_vnni else "needs VNNI"
            verdict = _verdict(difference, most) if speed >= speedup else slow
            yield f"{key[1].upper()} {speedup:.1f}× at {most}", verdict, f"{speed:.2f}", *_worst(difference)
    for run in [run for run, precision in summary.keys if precision == STATIC]:
        difference = summary.difference((run, STATIC), (run, FP32))
        wanted = f"static INT8 of {run} at {_STATIC_AIM} below its FP32"
        yield wanted, _verdict(difference, _STATIC_AIM), "", *_worst(difference)
    for search, control in controls(summary, FP32):
        difference = summary.difference(search, control)
        speed = geometric(summary.speedups(search, control, judged=True))
        aim, verdict = f"ahead of {_strategy(summary, control)}", _verdict(difference, 0, margin=0)
        yield aim, verdict, f"{speed:.2f}", *_worst(difference)


def _controls(title: str, summary: Summary, form: str) -> Table:
    rows = []
    for search, control in controls(summary, form):
        names = summary.tasks_of(search, control, judged=True)
        seeds = ", ".join(f"{name} {len(summary.tasks[name].having(search, control))}" for name in names)
        # A reduced model is as fast before its distillation, so both have the times of FP32.
        fast, slow = ((run, FP32) for run, _ in (search, control))
        speeds = (
            geometric(summary.speedups(fast, slow, judged=True)),
            geometric(summary.speedups(slow, fast, judged=True)),
        )
        ahead = summary.difference(search, control), summary.by_task(search, control)
        cells = (_strategy(summary, control), seeds, *(f"{speed:.2f}" for speed in speeds), _signed(ahead[0]))
        rows.append((*cells, *_cells(ahead[1], summary.judged)))
    heads = ("control", "seeds", "speed of the search", "of the control", "points ahead", *summary.judged)
    return Table(title, heads, rows, 2)


def _changes(title: str, head: str, summary: Summary, form: str, other_of: Callable[[str], Key]) -> Table:
    rows = []
    for key in [key for key in summary.keys if key[1] == form]:
        other = other_of(key[0])
        average = _signed(summary.difference(key, other)) if summary.is_complete(key, other) else ""
        rows.append((key[0], average, *_cells(summary.by_task(key, other), summary.tasks)))
    return Table(title, ("run", f"{head}{_without(summary)}", *summary.tasks), rows)


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


def _board(summary: Summary) -> Table:
    rows, heads = [], ["run"]
    for run in dict.fromkeys(run for run, precision in summary.keys if precision == FP32):
        cells = predictions(summary, run)
        heads = ["run", *cells]
        shown = (f"{ms:.2f} ({low:.2f} … {high:.2f}), {faster:.2f}×" for ms, low, high, faster in cells.values())
        rows.append((run, *shown))
    note = (
        f"A {PREDICTION}: TensorRT in FP16 on a {DEVICES[DEFAULT_BOARD.board].name} at {DEFAULT_BOARD.power_mode}. "
        "Milliseconds of a run, between which a measurement is expected, and the speed over the dense model in FP16; "
        "means over tasks and seeds, geometric ones of speeds."
    )
    return Table("Predicted on a Jetson", heads, rows, note=note)


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


def _strategy(summary: Summary, control: Key) -> str:
    return control[0].removeprefix(f"{summary.settings.control_tier}-")


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
    return f"{-difference.value:.2f}", f"{-difference.interval[0]:.2f}"


def _cells(differences: Mapping[str, Difference], names: Iterable[str]) -> list[str]:
    return [_signed(differences[name]) if name in differences else "" for name in names]


def _signed(difference: Difference) -> str:
    return with_interval(difference.value, difference.interval, "{:+.1f}".format)


def _lost(difference: Difference) -> str:
    low, high = difference.interval
    return with_interval(-difference.value, (-high, -low), lambda value: f"{value:.1f}".replace("-0.0", "0.0"))

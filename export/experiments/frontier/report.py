"""Markdown tables of a frontier, for README and LIMITS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from export.finetune.text_tasks import TASKS
from export.papers.experiment import markdown_table
from export.papers.frontier.board import Board, BoardPoint
from export.papers.frontier.records import FP32, INT8
from export.papers.frontier.settings import DENSE
from export.papers.frontier.summary import Advantage, Change, Frontier, Point
from export.training.intervals import Difference, with_interval

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

#: The remark where the dense model is above chance on no task.
NO_CLAIM = "On none of these tasks is the dense model better than chance, so the differences support no claim."


def report_of(frontier: Frontier) -> str:
    """Return the page of a frontier."""
    seeds = ", ".join(
        f"{task} (n = {frontier.items[task]:,}, {number} seed{'s' * (number > 1)}, "
        f"{frontier.mean_tokens[task]:.0f} tokens)"
        for task, number in frontier.seeds.items()
    )
    lines = [
        "# Speed against accuracy",
        "",
        f"Tasks: {seeds}. ONNX Runtime, one thread, batch 1, timed on {', '.join(frontier.processors)}; trained on "
        f"{', '.join(frontier.trained_on)}. Differences are paired, in points, with 95 % intervals over items"
        f"{' and seeds' if max(frontier.seeds.values()) > 1 else ''}.",
        *_chance(frontier),
        "",
        *headline(frontier),
        "",
        "## Aims",
        "",
        *aims(frontier),
        "",
        "## The search against simple reductions of the same speed",
        "",
        *_controls(frontier.advantages, frontier),
        "",
        "## Before distillation",
        "",
        *_changes("points against dense", frontier.undistilled, frontier),
        "",
        *_controls(frontier.undistilled_advantages, frontier),
        "",
        "## Static INT8, for TensorRT",
        "",
        *_changes("points against its FP32", frontier.static, frontier),
        "",
        "## All files of ONNX Runtime",
        "",
        *_files(frontier),
        "",
        "## Predicted on a Jetson",
        "",
        *_board(frontier.board),
        "",
        "## The dense model against published results",
        "",
        *published(frontier),
        "",
        "## Task by task",
        "",
        *_tasks(frontier),
    ]
    return "\n".join(lines) + "\n"


def headline(frontier: Frontier) -> list[str]:
    """Return the table of the first screen: dense and tiers, predicted on a Jetson, then as measured."""
    found = {(point.run, point.precision): point for point in frontier.points}
    board = _by_run(frontier.board, lambda point: f"{point.times_faster:.1f}×")
    rows = []
    for run in (DENSE, *frontier.settings.tiers):
        cells: list[object] = [run, ", ".join(board.get(run, {}).values())]
        for precision in (FP32, INT8):
            point = found.get((run, precision))
            same = (run, precision) == (DENSE, FP32)
            cells += [f"{point.speedup:.1f}×", "–" if same else _lost(point.judged)] if point else ["", ""]
        rows.append(cells)
    heads = ("model", "on a Jetson, FP16, predicted", "on x86, FP32", "score lost", "on x86, INT8", "score lost")
    return markdown_table(heads, rows, texts=1)


def aims(frontier: Frontier) -> list[str]:
    """Return the table of the aims, and whether they are met."""
    found = {(point.run, point.precision): point for point in frontier.points}
    rows = []
    for (run, precision), (speedup, most) in AIMS.items():
        if point := found.get((run, precision)):
            has_vnni = all("VNNI" in one for one in frontier.processors)
            slow = "too slow" if precision == FP32 or has_vnni else "needs VNNI"
            verdict = _verdict(point.judged, most) if point.speedup >= speedup else slow
            speed = f"{point.speedup:.2f}"
            rows.append((f"{precision.upper()} {speedup:.1f}× at {most}", verdict, speed, *_worst(point.judged)))
    for one in frontier.static:
        wanted = f"static INT8 of {one.run} at {_STATIC_AIM} below its FP32"
        rows.append((wanted, _verdict(one.difference, _STATIC_AIM), "", *_worst(one.difference)))
    for control in frontier.advantages:
        verdict, speed = _verdict(control.difference, 0, margin=0), f"{control.speedup:.2f}"
        rows.append((f"ahead of {control.control}", verdict, speed, *_worst(control.difference)))
    return markdown_table(("aim", "", "speed", "points lost", "upper bound"), rows, texts=2)


def _controls(advantages: Iterable[Advantage], frontier: Frontier) -> list[str]:
    rows = []
    for one in advantages:
        seeds = ", ".join(f"{task} {number}" for task, number in one.seeds.items())
        cells = (one.control, seeds, f"{one.speedup:.2f}", f"{one.control_speedup:.2f}", _signed(one.difference))
        rows.append((*cells, *_by_task(one.tasks, frontier.judged)))
    heads = ("control", "seeds", "speed of the search", "of the control", "points ahead", *frontier.judged)
    return markdown_table(heads, rows, texts=2)


def _changes(head: str, changes: Iterable[Change], frontier: Frontier) -> list[str]:
    rows = [
        (
            one.run,
            _signed(one.difference) if frontier.is_judged(one.tasks) else "",
            *_by_task(one.tasks, frontier.seeds),
        )
        for one in changes
    ]
    return markdown_table(("run", f"{head}{_without(frontier)}", *frontier.seeds), rows, texts=1)


def published(frontier: Frontier) -> list[str]:
    """Return the table of the dense model's metrics beside those of a published model of its shape."""
    dense = next(point for point in frontier.points if (point.run, point.precision) == (DENSE, FP32))
    rows = [
        (one.task, TASKS[one.task].headline, f"{one.metric:.1f}", str(PUBLISHED.get(one.task, "")))
        for one in dense.tasks
    ]
    return markdown_table(("task", "metric × 100", "dense, here", "MiniLM-L6-H384"), rows, texts=2)


def _files(frontier: Frontier) -> list[str]:
    speeds = ("speed, dev as it is", "at 128 tokens", "against dense INT8")
    heads = (
        "run",
        "precision",
        *speeds,
        "average",
        "points, all tasks",
        f"points{_without(frontier)}",
        "against its FP32",
    )
    rows = [
        (
            point.run,
            point.precision,
            f"{point.speedup:.2f} ({point.slowest:.2f} … {point.fastest:.2f})",
            f"{point.fixed_speedup:.2f}",
            f"{point.int8_speedup:.2f}",
            *_averages(point, frontier),
            _signed(point.own) if point.own else "",
        )
        for point in frontier.points
    ]
    return markdown_table(heads, rows, texts=2)


def _board(board: Board) -> list[str]:
    """Return the predictions as a paragraph and a table: milliseconds, their band, and the speed."""
    cells = _by_run(
        board,
        lambda point: f"{point.milliseconds:.2f} ({point.low_ms:.2f} … {point.high_ms:.2f}), {point.times_faster:.2f}×",
    )
    heads = ("run", *next(iter(cells.values())))
    where = f"{board.device} at {board.power_mode}"
    text = (
        f"A {board.label}: TensorRT in FP16 on a {where}. Milliseconds of a run, between which a measurement is "
        "expected, and the speed over the dense model in FP16; means over tasks and seeds, geometric ones of speeds."
    )
    return [text, "", *markdown_table(heads, [(run, *found.values()) for run, found in cells.items()], texts=1)]


def _by_run(board: Board, shown: Callable[[BoardPoint], str]) -> dict[str, dict[str, str]]:
    """Return what is shown of each run for each size of an input."""
    found: dict[str, dict[str, str]] = {}
    for point in board.points:
        found.setdefault(point.run, {})[f"{point.tokens} tokens, batch {point.rows}"] = shown(point)
    return found


def _averages(point: Point, frontier: Frontier) -> tuple[str, str, str]:
    """Return average and points over all tasks, and points over the judged ones; empty where a task is missing."""
    average = frontier.average_of(point)
    over_all = ("", "") if average is None else (f"{average:.1f}", _signed(point.difference))
    return *over_all, _signed(point.judged) if frontier.is_judged(one.task for one in point.tasks) else ""


def _tasks(frontier: Frontier) -> list[str]:
    heads = ("run", "precision", *frontier.seeds)
    rows: list[tuple[str, ...]] = [("chance", "", *(f"{value:.1f}" for value in frontier.chance.values()))]
    rows += [(point.run, point.precision, *_cells(point, frontier)) for point in frontier.points]
    return markdown_table(heads, rows, texts=2)


def _cells(point: Point, frontier: Frontier) -> Iterator[str]:
    found = {task.task: task for task in point.tasks}
    for name in frontier.seeds:
        task = found.get(name)
        plain = (point.run, point.precision) == (DENSE, FP32)
        yield "" if task is None else f"{task.metric:.1f}" + ("" if plain else f", {_signed(task.difference)}")


def _chance(frontier: Frontier) -> list[str]:
    """Return a paragraph on the tasks that are not judged; none if there are none."""
    if not frontier.above_chance:
        return ["", NO_CLAIM]
    if frontier.judged == tuple(frontier.seeds):
        return []
    reason = "where the dense model is not significantly better than chance"
    return ["", f"Averages are{_without(frontier)}, {reason}, unless their column says otherwise."]


def _without(frontier: Frontier) -> str:
    left_out = ", ".join(task for task in frontier.seeds if task not in frontier.judged)
    return f" without {left_out}" if left_out else ""


def _verdict(difference: Difference, most: float, margin: float = _MARGIN) -> str:
    """Return whether the loss is at most ``most``, and its upper confidence bound below that and a margin."""
    if -difference.value > most:
        return "missed"
    return "met" if -difference.interval[0] < most + margin else "not certain"


def _worst(difference: Difference) -> tuple[str, str]:
    """Return the loss and its upper confidence bound, for people."""
    return f"{-difference.value:.2f}", f"{-difference.interval[0]:.2f}"


def _by_task(differences: Mapping[str, Difference], tasks: Iterable[str]) -> list[str]:
    return [_signed(differences[task]) if task in differences else "" for task in tasks]


def _signed(difference: Difference) -> str:
    return with_interval(difference.value, difference.interval, lambda value: f"{value:+.1f}")


def _lost(difference: Difference) -> str:
    low, high = difference.interval
    return with_interval(-difference.value, (-high, -low), lambda value: f"{value:.1f}".replace("-0.0", "0.0"))

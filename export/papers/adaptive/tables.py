"""The tables of a comparison; ``python -m export.papers.adaptive.tables`` makes those of RESULTS.md from the records.

``results/TASK/`` has the records of a task, which ``fewheads compare`` wrote with a report and a picture, and
``results/images.json`` what ``fewheads finetune --json`` printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.datatypes import Array
from export.finetune.predictions import CORRELATIONS, METRICS
from export.papers.adaptive.measures import HeadUse, Int8, Speed
from export.papers.experiment import read_records
from export.report.table import Table, with_tables, write_pages
from export.training.intervals import Difference, Sample, average, clipped, percent
from export.training.runs import RunMetrics

_HERE = Path(__file__).parent
PAGE, RESULTS = _HERE / "RESULTS.md", _HERE / "results"
FULL = "full"
#: Paper 002's order at an equal share of attention: random, learnt for all inputs alike, and by input.
ORDER = ("random", "global", "budget")
#: Behind the lengths of timed inputs.
_LONGEST = 10_000


class MechanismRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one mechanism and seed.

    Attributes:
        metric: of :data:`export.finetune.predictions.METRICS`, or ``mean of`` one that each answer has.
        smaller: whether the timed matrices are smaller; otherwise scorers, masks and gates are timed, too.
        speeds: for inputs of random tokens, except of layers that are skipped by input, and last for rows of dev, one
            at a time and in batches.
        peak_bytes: of the dense and of this file, see :class:`export.papers.adaptive.measures.FileMeasures`.
        holdout: the metric on the hold-out, of each epoch.
        answers, targets: classes or values of dev's items; or the metric of each answer, and zeros.
    """

    name: str
    what: str
    seed: int
    metric: str
    smaller: bool
    holdout: tuple[float, ...]
    use: HeadUse
    speeds: tuple[Speed, ...]
    peak_bytes: tuple[int, int]
    int8: Int8 | None
    answers: tuple[float, ...]
    targets: tuple[float, ...]


class _Tuned(msgspec.Struct, frozen=True):
    """What ``fewheads finetune --seeds N --final --json`` printed."""

    task: str
    runs: tuple[str, ...]
    metrics: RunMetrics


def _by_name(records: Mapping[str, MechanismRecord]) -> dict[str, list[MechanismRecord]]:
    groups: dict[str, list[MechanismRecord]] = {}
    for record in records.values():
        groups.setdefault(record.name, []).append(record)
    return groups


def sample_of(runs: Sequence[MechanismRecord]) -> Sample:
    """Return the metric on dev, times 100."""
    metric, answers = partial(_points, runs[0].metric), [np.array(run.answers) for run in runs]
    return Sample.of_answers(metric, answers, np.array(runs[0].targets))


def difference(runs: Sequence[MechanismRecord], baselines: Sequence[MechanismRecord]) -> Difference:
    """Return the difference on dev in points, over the seeds of both."""
    seeds = {run.seed for run in runs} & {run.seed for run in baselines}
    here, there = (sample_of([run for run in of if run.seed in seeds]) for of in (runs, baselines))
    return average([here.paired(there)])


def tables_of(records: Mapping[str, MechanismRecord]) -> list[Table]:
    """Return the tables of mechanisms and of their files, if there are any; speeds have their bounds in brackets."""
    rows, files, groups = [], [], _by_name(records)
    lengths = list(dict.fromkeys((one.rows, one.tokens) for record in records.values() for one in record.speeds))
    lengths.sort(key=lambda size: (size[0], size[1] or _LONGEST))
    for name, runs in groups.items():
        first, uses = runs[0], [run.use for run in runs]
        speeds = [[one for run in runs for one in run.speeds if (one.rows, one.tokens) == size] for size in lengths]
        ratios = [_speeds(of) if of else None for of in speeds]
        scores = [use.score for use in uses if use.score is not None]
        change = difference(runs, groups[FULL]) if name != FULL and FULL in groups else None
        rows.append(
            (
                name,
                first.what,
                len(runs),
                f"{_mean([use.kept for use in uses]):.2f}",
                f"{_mean(scores):.2f}" if scores else None,
                clipped(sample_of(runs).mean(), -100 if first.metric in CORRELATIONS else 0),
                change,
                *ratios,
                "smaller" if first.smaller else "as it runs",
            )
        )
        peaks, int8 = np.array([run.peak_bytes for run in runs]), [run.int8 for run in runs if run.int8]
        files.append(
            (
                name,
                f"{peaks[:, 1].mean() / 2**20:.0f}",
                f"{(peaks[:, 1] / peaks[:, 0]).mean():.2f}",
                int8_difference(runs) if int8 else None,
                f"{_mean([one.ratio for one in int8]):.2f}" if int8 else None,
            )
        )
    if not rows:
        return []
    sizes = [f"{'dev' if tokens is None else f'{tokens} tokens'}{f', {n} rows' * (n > 1)}" for n, tokens in lengths]
    heads = ("mechanism", "what", "seeds", "share left", "mean score", "dev", "points over full")
    of_files = ("mechanism", "peak memory, MiB", "over dense", "INT8: points over FP32", "speed over dense FP32")
    return [
        Table("Mechanisms", (*heads, *(f"speed (bound), {size}" for size in sizes), "timed"), rows, texts=2),
        Table("Memory and INT8", of_files, files),
    ]


def int8_difference(runs: Sequence[MechanismRecord]) -> Difference:
    """Return what INT8 changes on dev in points, over the runs that have such a file."""
    runs = [run for run in runs if run.int8]
    quantised = [msgspec.structs.replace(run, answers=run.int8.answers) for run in runs if run.int8]
    return average([sample_of(quantised).paired(sample_of(runs))])


def order_of(records: Mapping[str, MechanismRecord]) -> list[Table]:
    """Return the table that decides whether each of :data:`ORDER` is better than the one before, if there are any.

    It is over the seeds that both have. One seed decides nothing.
    """
    rows, groups = [], _by_name(records)
    for lower, higher in pairwise(ORDER):
        both = groups.get(higher, []), groups.get(lower, [])
        seeds = {run.seed for run in both[0]} & {run.seed for run in both[1]}
        if not seeds:
            continue
        runs, baselines = ([run for run in of if run.seed in seeds] for of in both)
        change = difference(runs, baselines)
        low, high = change.interval
        verdict = "undecided" if len(seeds) < 2 or low <= 0 <= high else "better" if low > 0 else "worse"
        left = " and ".join(f"{_mean([run.use.kept for run in of]):.2f}" for of in (runs, baselines))
        rows.append((f"{higher} over {lower}", len(seeds), left, change, verdict))
    return [Table("Order", ("comparison", "seeds", "share left", "points", "it is"), rows)] if rows else []


def images_of(record: Path) -> Table:
    """Return the accuracy of new models of images on dev, over items and seeds."""
    rows = []
    for one in msgspec.json.decode(record.read_bytes(), type=list[_Tuned]):
        (dev,) = (measure for measure in one.metrics.measures if measure.split == "dev")
        rows.append((one.task, f"{one.metrics.parameters:,}", len(one.runs), dev.n, percent(dev)))
    return Table("", ("images", "parameters", "seeds", "n", "accuracy"), rows)


def _speeds(of: Sequence[Speed]) -> str:
    return f"{_mean([one.ratio for one in of]):.2f} ({_mean([one.bound for one in of]):.2f})"


def _points(metric: str, answers: Array, targets: Array) -> Array:
    function: Any = METRICS.get(metric, _of_items)
    return np.asarray(100 * function(answers, targets))


def _of_items(answers: Array, targets: Array) -> Array:
    return np.asarray(answers.mean(axis=-1))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def pages() -> dict[Path, str]:
    """Return RESULTS.md with the tables of all records."""
    tables = {"export/papers/adaptive/results/images.json": images_of(RESULTS / "images.json")}
    for directory in sorted(path for path in RESULTS.glob("*") if path.is_dir()):
        records = read_records(directory, MechanismRecord)
        name = f"export/papers/adaptive/results/{directory.name}"
        for table in (*tables_of(records), *order_of(records)):
            tables[f"{name}#{table.title.split()[0].lower()}"] = table._replace(title="")
    return {PAGE: with_tables(PAGE.read_text(), "python -m export.papers.adaptive.tables", tables)}


if __name__ == "__main__":
    write_pages(pages())

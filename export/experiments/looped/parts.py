"""The parts of the experiments: each is computed on its own and kept in a file, so that nothing is computed twice.

A file's name has the digest of the weights that it was computed with. Parts run in threads, one for each core: most of
their time is in torch and XGBoost, which release Python's lock.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import Raw
from edge.files import write_whole
from export.errors import CheckpointError
from export.papers.looped.baselines import BASELINES, Predict, least_squares, predict_after, ridge
from export.papers.looped.functions import Prompts, draw_prompts
from export.papers.looped.model import PromptTransformer
from export.papers.looped.paths import Arrays, anderson_path, errors_by_pairs, run_path, shifted_errors
from export.papers.looped.probe import probe_run, untrained
from export.papers.looped.runs import Groups, Task, Trained, main_group
from export.papers.looped.seeds import EVALUATION, generator_of
from export.papers.looped.shifts import SHIFTS, Shift

#: What a part is: its experiment, and what it is about.
Key = tuple[str, ...]
#: Earlier states that Anderson acceleration combines, and the most loops that a stopped solver takes.
MEMORIES, STOPPED_LOOPS = (2, 5), 32
_DIRECTORY = "parts"


class Part(NamedTuple):
    """A part: its key, the name of its file, and the function that computes it."""

    key: Key
    file: str
    make: Callable[[], Arrays]


def parts_of(task: Task, groups: Groups, *, prompts: int, loops: int) -> list[Part]:
    """Return the parts of a task, long ones first."""
    return list(_parts(task, groups, prompts, loops))


def compute(parts: Sequence[Part], out: Path, on_part: Callable[[Key], None]) -> dict[Key, Arrays]:
    """Return the arrays of parts, computing those that have no file yet.

    Args:
        out: of the experiment.
        on_part: called after each part.
    """
    directory = out / _DIRECTORY
    found: dict[Key, Arrays] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {pool.submit(_computed, part, directory): part for part in parts}
        try:
            for future in as_completed(started):
                key = started[future].key
                found[key] = future.result()
                on_part(key)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def pairs_measured(task: Task, *, slow: bool) -> Sequence[int]:
    """Return the numbers of pairs after which a baseline is measured: all, or four if it is slow."""
    most = task.points - 1
    return sorted({max(1, most * quarter // 4) for quarter in (1, 2, 3, 4)}) if slow else range(task.points)


def main_runs(groups: Groups) -> list[Trained]:
    """Return the runs that stand for the looped and the unlooped models."""
    names = [main_group(groups, looped=looped) for looped in (True, False)]
    return [run for name in names if name is not None for run in groups[name]]


def _parts(task: Task, groups: Groups, number: int, loops: int) -> Iterator[Part]:
    prompts = draw_prompts(task.function, number, task.points, task.dims, generator_of(EVALUATION))

    def part(make: Callable[[], Arrays], run: Trained | None, *key: str) -> Part:
        words = [*key, run.name, run.digest[:12]] if run else key
        file = "-".join(re.sub(r"[^\w.]+", "-", word) for word in (task.name, *words))
        return Part((*key, run.name) if run else key, f"{file}.npz", make)

    for name, baseline in BASELINES[task.function].items():
        pairs = pairs_measured(task, slow=baseline.slow)
        yield part(partial(_baseline_errors, baseline.predict, prompts, pairs), None, "baseline", name)
    for run in (run for group in groups.values() for run in group):
        if run.looped:
            yield part(partial(run_path, run.model, prompts, trained=run.loops, loops=loops), run, "path")
        else:
            yield part(partial(_unlooped_errors, run.model, prompts), run, "path")
    main = main_runs(groups)
    for run in (run for run in main if run.looped):
        for memory in MEMORIES:
            most = min(STOPPED_LOOPS, loops)
            path = partial(anderson_path, run.model, prompts, loops=most, memory=memory)
            yield part(path, run, "anderson", str(memory))
    if task.function != "linear":
        return
    probed = {run.looped: run for run in reversed(main)}  # the first of each kind
    for run in probed.values():
        yield part(partial(probe_run, run.model, task.function), run, "probe")
    if True in probed:
        yield part(lambda: probe_run(untrained(probed[True].model), task.function), probed[True], "untrained")
    for name, shift in SHIFTS.items():
        solvers = {"least squares": least_squares}
        if shift.noise:
            solvers["ridge"] = partial(ridge, penalty=shift.noise**2)
        for run in main:
            yield part(_shifted(task, shift, number, partial(_model_errors, run)), run, "shift", name)
        for method, predict in solvers.items():
            errors = _shifted(task, shift, number, partial(_solver_errors, predict))
            yield part(errors, None, "shift", name, method)


def _shifted(task: Task, shift: Shift, number: int, errors_of: Callable[[Prompts], Array]) -> Callable[[], Arrays]:
    return partial(shifted_errors, errors_of, shift, number, task.points, task.dims, EVALUATION)


def _model_errors(run: Trained, prompts: Prompts) -> Array:
    return errors_by_pairs(run.model, prompts, run.loops)


def _solver_errors(predict: Predict, prompts: Prompts) -> Array:
    return _baseline_errors(predict, prompts, range(prompts.xs.shape[1]))["errors"]


def _unlooped_errors(model: PromptTransformer, prompts: Prompts) -> Arrays:
    return {"pairs": errors_by_pairs(model, prompts, 1)}


def _baseline_errors(predict: Predict, prompts: Prompts, pairs: Sequence[int]) -> Arrays:
    errors = (predict_after(predict, prompts.xs, prompts.ys, pairs) - prompts.ys.double().numpy()[:, list(pairs)]) ** 2
    return {"pairs": np.array(pairs), "errors": errors}


def _computed(part: Part, directory: Path) -> Arrays:
    path = directory / part.file
    if path.exists():
        return _read(path)
    found = part.make()
    data = io.BytesIO()
    np.savez_compressed(data, **{name: np.asarray(array) for name, array in found.items()})  # type: ignore[arg-type]
    write_whole(path, data.getvalue())
    return found


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError) as error:
        fix = "Delete it, and give the same command."
        raise CheckpointError(f"{path}", given=Raw(error), expected="a part's arrays", fix=fix) from None

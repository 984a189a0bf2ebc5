"""Times of a family's files on ONNX Runtime, one thread, batch 1, in turns of random order.

Each item is run on every file before the next item, so that drifts of clocks and other work affect all files alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from edge.bench.timing import WARM_UP, times_in_turns, turns
from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.data.tokens import Encoded
from export.papers.experiment import read_part
from export.papers.frontier.answers import file_of
from export.papers.frontier.family import FamilyInputs
from export.papers.frontier.records import (
    ANSWERED,
    FP32,
    STATIC,
    TIMED,
    Answered,
    Key,
    Timed,
    key_of,
    write_record,
)
from export.papers.frontier.settings import DENSE, FamilySettings
from export.quantize.calibration import feeds_of
from export.reduce.plan import LayerPlan, Plan, check_speedup
from export.training.provenance import processor, versions

#: Tokens of the length that all tasks share.
FIXED_TOKENS = 128
_FIXED_CALLS = 100
#: Items of dev that are timed, drawn at random.
_ITEMS = 300


def time_files(
    family: FamilySettings,
    inputs: FamilyInputs,
    directory: Path,
    on_item: Callable[[int, int], None] = lambda done, items: None,
) -> None:
    """Time the files of a family, and write the record.

    Raises:
        PlanError: a run is faster than the removed multiplications can explain, against the dense model in the same
            precision: the machine was too busy.
    """
    answered = read_part(directory / ANSWERED, Answered)
    dev = inputs.data.dev["dev"]
    assert isinstance(dev, Encoded)
    keys = [key for key in map(key_of, answered.file_bytes) if key[1] != STATIC]
    runners = {key: OnnxRuntimeRunner(file_of(directory, key).read_bytes(), subject=" ".join(key)) for key in keys}
    try:
        seconds = _timed(runners, dev, family.seed, on_item)
        fixed = times_in_turns(runners, _fixed_feeds(dev), _FIXED_CALLS)
    finally:
        for runner in runners.values():
            runner.close()
    dense = DENSE, FP32
    speedups, fixed_speedups = (
        {key: float(np.median(times[dense] / times[key])) for key in keys} for times in (seconds, fixed)
    )
    for run, precision in keys:
        left_out = [None] * (len(answered.layers[DENSE]) - len(answered.layers[run]))
        layers = (*(LayerPlan(shape) for shape in answered.layers[run]), *left_out)
        plan = Plan(answered.dim, answered.layers[DENSE], layers)
        for tokens, found in ((round(answered.mean_tokens), speedups), (FIXED_TOKENS, fixed_speedups)):
            check_speedup(plan, tokens, found[run, precision] / found[DENSE, precision])
    record = Timed(
        speedups={"/".join(key): value for key, value in speedups.items()},
        fixed_speedups={"/".join(key): value for key, value in fixed_speedups.items()},
        median_ms={"/".join(key): float(1e3 * np.median(seconds[key])) for key in keys},
        items=len(seconds[dense]),
        processor=processor(),
        versions=versions(),
    )
    write_record(directory / TIMED, record)


def _timed(
    runners: Mapping[Key, OnnxRuntimeRunner], dev: Encoded, seed: int, on_item: Callable[[int, int], None]
) -> dict[Key, Array]:
    """Return the seconds of each file for the timed items, [items]."""
    items = np.random.default_rng(seed).permutation(len(dev.tokens))[:_ITEMS]
    seconds = {key: np.zeros(len(items)) for key in runners}
    warm_up = items[:WARM_UP]
    for place, item in enumerate(np.concatenate([warm_up, items]), -len(warm_up)):
        feeds = feeds_of(dev, np.array([item]))
        for key in turns(list(runners), place):
            started = time.perf_counter()
            runners[key].infer(feeds)
            if place >= 0:
                seconds[key][place] = time.perf_counter() - started
        on_item(max(0, place + 1), len(items))
    return seconds


def _fixed_feeds(dev: Encoded) -> dict[str, Array]:
    """Return one input of :data:`FIXED_TOKENS` tokens, taken from the start of dev."""
    tokens = np.concatenate(dev.tokens)
    ids = np.resize(tokens, (1, FIXED_TOKENS)).astype(np.int64)
    return {"inputs": ids, "mask": np.ones_like(ids), "segments": np.zeros_like(ids)}

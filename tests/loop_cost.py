"""What the host adds to each step of a served loop: bookkeeping of rows, beside ONNX Runtime's own run.

python -m tests.loop_cost BUNDLE [--rows 8] [--steps 2000] [--out FILE]

Three things take turns, in random order: a step of the session, the same without its bookkeeping, and the bare run of
ONNX Runtime on the same arrays. The differences are medians over the turns. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from edge.bundles.bundle import Bundle
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import Joining, LoopLimits, Options
from edge.runtimes.build import load_runner
from edge.runtimes.host import HostLoop


def measured(path: Path, rows: int, steps: int) -> dict[str, list[float]]:
    """Return the microseconds of each turn."""
    bundle = Bundle.open(path)
    with tempfile.TemporaryDirectory() as cache:
        runners = LoopRunners(
            *(load_runner(bundle, "onnxruntime", Path(cache), role=role).runner for role in ("embed", "step"))
        )
    tier = bundle.manifest.tiers[0].name
    session = Loop(bundle.manifest.program, {tier: runners}).session(Options(tier))  # type: ignore[arg-type]
    inputs = {name: array[:rows] for name, array in bundle.golden.inputs.items()}
    endless = LoopLimits(2**62, -1.0)  # no residual is below 0
    session.add([Joining("all", inputs, Options(tier, endless))])
    for _ in range(2):
        session.step()
    device = session._device
    assert isinstance(device, HostLoop)

    def bare() -> None:
        for run in device._runs[session.rows, device._current]:
            run()

    turns: dict[str, Callable[[], object]] = {"bare run": bare, "device's step": device.step, "session": session.step}
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(steps):
        for name in random.sample(list(turns), len(turns)):
            begun = time.perf_counter_ns()
            turns[name]()
            taken[name].append((time.perf_counter_ns() - begun) / 1e3)
    for runner in runners:
        runner.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="the record to write")
    given = parser.parse_args()
    taken = measured(given.bundle, given.rows, given.steps)
    record: dict[str, object] = {"rows": given.rows, "steps": given.steps}
    for name, times in taken.items():
        added = statistics.median(one - bare for one, bare in zip(times, taken["bare run"], strict=True))
        record[name] = {"median_us": statistics.median(times), "median_added_us": added}
        print(f"{name:14} {statistics.median(times):8.1f} µs, {added:5.1f} µs more than the bare run")
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

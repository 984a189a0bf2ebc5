"""What a head adds to a step of generated text, and what a change of heads from one step to the next adds.

python -m tests.head_cost BASE HEAD HEAD [--rows 1] [--steps 200] [--out FILE]

Sessions without a head, with the first one, and with both in turn take turns, step by step. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.programs import GenerateProgram, HeadProgram
from edge.programs.generate import GenerationSession, generator
from edge.programs.head import LogitHead, head_of
from edge.programs.program import AppliedHead, Joining, Options
from edge.programs.sampling import Sampling
from edge.runner import Runner
from edge.runtimes.build import load_runner


def head_in(path: Path, cache: Path) -> LogitHead:
    bundle = Bundle.open(path)
    config = bundle.manifest.program
    assert isinstance(config, HeadProgram)
    tier = bundle.manifest.tiers[0].name
    return head_of(bundle, config, {tier: load_runner(bundle, "onnxruntime", cache, role="head").runner})


def session_of(bundle: Bundle, runner: Runner, rows: int, head: LogitHead | None) -> GenerationSession:
    config, tier = bundle.manifest.program, bundle.manifest.tiers[0].name
    assert isinstance(config, GenerateProgram)
    session = generator(bundle, config, {tier: runner}).session(Options(tier))
    inputs = {name: array[:1] for name, array in bundle.golden.inputs.items()}
    length = int(inputs["mask"][0].sum())
    inputs = {name: np.repeat(array[:, :length], rows, axis=0) for name, array in inputs.items()}
    sampling = Sampling(config.positions)
    session.add([Joining("all", inputs, Options(tier, None, sampling, AppliedHead(head, 1.0) if head else None))])
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("heads", type=Path, nargs=2)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="the record to write")
    given = parser.parse_args()
    base = Bundle.open(given.base)
    with tempfile.TemporaryDirectory() as directory:
        runner = load_runner(base, "onnxruntime", Path(directory), role="backbone").runner
        heads = [head_in(path, Path(directory)) for path in given.heads]
    sessions = {"no head": None, "one head": heads[0], "two heads in turn": heads[0]}
    running = {name: session_of(base, runner, given.rows, head) for name, head in sessions.items()}
    taken: dict[str, list[float]] = {name: [] for name in running}
    for step in range(given.steps + 3):
        for row in running["two heads in turn"]._rows:
            row.head = AppliedHead(heads[step % 2], 1.0)
        for name, session in running.items():
            begun = time.perf_counter_ns()
            session.step()
            if step > 2:
                taken[name].append((time.perf_counter_ns() - begun) / 1e3)
    plain = taken["no head"]
    record: dict[str, object] = {"rows": given.rows, "steps": given.steps}
    for name, times in taken.items():
        added = statistics.median(one - other for one, other in zip(times, plain, strict=True))
        ratio = statistics.median(one / other for one, other in zip(times, plain, strict=True))
        record[name] = {"median_us": statistics.median(times), "median_added_us": added, "median_ratio": ratio}
        print(
            f"{name:18} {statistics.median(times):9.0f} µs, {added:7.0f} µs more than without a head, ratio {ratio:.3f}"
        )
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

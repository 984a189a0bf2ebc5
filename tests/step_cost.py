"""The cost that the server adds to each step of a loop, and a head to each step of generated text. Use an idle machine.

python -m tests.step_cost BUNDLE [--rows 8] [--steps 2000] [--out FILE]
python -m tests.step_cost BASE HEAD HEAD [--rows 8] [--steps 2000] [--out FILE]

A loop: a step of the session, the same without its bookkeeping of rows, and ONNX Runtime's bare run on the same arrays.
Text: a step without a head, with the first one, and with both in turn. All take turns in random order, and the
differences to the first of them are medians over the turns.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path

import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.programs import GenerateProgram, HeadProgram
from edge.programs.backward_head import head_of
from edge.programs.generate import generator
from edge.programs.loop import Loop, LoopRunners
from edge.programs.program import AppliedHead, Joining, LoopLimits, Options
from edge.programs.sampling import Sampling
from edge.runtimes.build import load_runner
from edge.runtimes.host import HostLoop


def loop_turns(bundle, cache, rows):
    runners = LoopRunners(*(load_runner(bundle, "onnxruntime", cache, role=role).runner for role in ("embed", "step")))
    tier = bundle.manifest.tiers[0].name
    session = Loop(bundle.manifest.program, {tier: runners}).session(Options(tier))
    inputs = {name: array[:rows] for name, array in bundle.golden.inputs.items()}
    session.add([Joining("all", inputs, Options(tier, LoopLimits(2**62, -1.0)))])  # no residual is below 0
    for _ in range(2):  # each has arrays of its own
        session.step()
    device = session._device
    assert isinstance(device, HostLoop)

    def bare():
        for run in device._runs[session.rows, device._current]:
            run()

    return {"bare run": bare, "device's step": device.step, "session": session.step}


def loaded_head(path, cache):
    bundle = Bundle.open(path)
    config, tier = bundle.manifest.program, bundle.manifest.tiers[0].name
    assert isinstance(config, HeadProgram)
    return head_of(bundle, config, {tier: load_runner(bundle, "onnxruntime", cache, role="head").runner})


def session_of(bundle, runner, rows, head):
    config, tier = bundle.manifest.program, bundle.manifest.tiers[0].name
    assert isinstance(config, GenerateProgram)
    session = generator(bundle, config, {tier: [runner]}).session(Options(tier))
    length = int(bundle.golden.inputs["mask"][0].sum())
    inputs = {name: np.repeat(array[:1, :length], rows, axis=0) for name, array in bundle.golden.inputs.items()}
    applied = AppliedHead(head, 1.0) if head else None
    session.add([Joining("all", inputs, Options(tier, None, Sampling(config.positions), applied))])
    return session


def head_turns(bundle, heads, cache, rows):
    runner = load_runner(bundle, "onnxruntime", cache, role="backbone").runner
    plain, one, both = (session_of(bundle, runner, rows, head) for head in (None, heads[0], heads[0]))
    in_turn = cycle(heads)

    def changing():
        head = next(in_turn)
        for row in both._rows:
            row.head = AppliedHead(head, 1.0)
        both.step()

    return {"no head": plain.step, "one head": one.step, "two heads in turn": changing}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("heads", type=Path, nargs="*")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="the record to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle, cache = Bundle.open(given.bundle), Path(directory)
        heads = [loaded_head(path, cache) for path in given.heads]
        turns = head_turns(bundle, heads, cache, given.rows) if heads else loop_turns(bundle, cache, given.rows)
    taken = {name: [] for name in turns}
    for step in range(given.steps + 3):
        for name in random.sample(list(turns), len(turns)):
            begun = time.perf_counter_ns()
            turns[name]()
            if step > 2:  # the first ones load code
                taken[name].append((time.perf_counter_ns() - begun) / 1e3)
    first = next(iter(taken))
    record = {"rows": given.rows, "steps": given.steps}
    for name, times in taken.items():
        added = statistics.median(one - base for one, base in zip(times, taken[first], strict=True))
        ratio = statistics.median(one / base for one, base in zip(times, taken[first], strict=True))
        record[name] = {"median_us": statistics.median(times), "median_added_us": added, "median_ratio": ratio}
        print(f"{name:18} {statistics.median(times):9.1f} µs, {added:7.1f} µs more than {first}, ratio {ratio:.3f}")
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

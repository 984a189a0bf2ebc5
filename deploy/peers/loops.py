"""Throughput of a looped model with continuous batching, and with batches that run to their slowest row.

    .venv/bin/python deploy/peers/loops.py REPOSITORY --target simulated:1

The same server, model, clients and requests, by turns; see ``run_to_slowest.py`` for the second one. Requests of one
prompt each differ in tolerance and budget. Prints the answers of each round per second and per second of the server's
processor time, and the medians of the ratios within a round; ``--out`` writes all of them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import grpc
import numpy as np

from edge.launch import serving
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE

TOLERANCES, BUDGETS = (0.3, 0.1, 0.03, 0.003), (30, 60, 120)
SERVERS = {
    "continuous": (sys.executable,),
    "run to the slowest": (sys.executable, str(Path(__file__).parent / "run_to_slowest.py")),
}
#: The fields of a measurement.
RATE, WORK = "answers_per_second", "answers_per_processor_second"
_WARM_UP_SECONDS = 2.0


def requests_of(manifest: Path, count: int, seed: int) -> list[bytes]:
    """Return requests for linear functions in context, with tolerances and budgets in equal shares."""
    spec = json.loads(manifest.read_text())
    _, tokens, dims = spec["profile"]["xs"]["max"]
    generator = np.random.default_rng(seed)
    messages = []
    for tolerance, budget in (pair for pair, _ in zip(_mix(), range(count), strict=False)):
        xs = generator.standard_normal((1, tokens, dims)).astype(np.float32)
        ys = (xs[:, :-1] @ generator.standard_normal((dims, 1)))[:, :, 0].astype(np.float32)
        message = pb.ModelInferRequest(model_name=spec["name"])
        for name, array in (("xs", xs), ("ys", ys)):
            message.inputs.add(name=name, datatype="FP32", shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
        message.parameters["tolerance"].double_param = tolerance
        message.parameters["max_loops"].int64_param = budget
        messages.append(message.SerializeToString())
    random.Random(seed).shuffle(messages)
    return messages


def _mix() -> Iterator[tuple[float, int]]:
    return cycle((tolerance, budget) for tolerance in TOLERANCES for budget in BUDGETS)


async def measure(port: int, messages: list[bytes], concurrency: int, seconds: float) -> tuple[float, list[int]]:
    """Return the answers per second to so many clients, each with one request at a time, and the loops of each."""
    loops: list[int] = []
    endless = cycle(messages)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        begun = time.perf_counter() + _WARM_UP_SECONDS
        end = begun + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                answer = await infer(next(endless))
                if begun <= time.perf_counter() < end:
                    response = pb.ModelInferResponse.FromString(answer)
                    names = [output.name for output in response.outputs]
                    loops.append(int(np.frombuffer(response.raw_output_contents[names.index("loops")], np.int32)[0]))

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return len(loops) / seconds, loops


def processor_seconds(process_id: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--out", type=Path, help="the record to write")
    options = parser.parse_args()
    (manifest,) = options.repository.glob("*/manifest.json")
    messages = requests_of(manifest, 1000, 0)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    for _ in range(options.rounds):
        for name, python in SERVERS.items():
            with serving(options.repository, target=options.target, python=python) as ready:
                before = processor_seconds(ready.process_id)
                rate, loops = asyncio.run(measure(ready.grpc_port, messages, options.concurrency, options.seconds))
                used = processor_seconds(ready.process_id) - before
            # The server's processor time includes the warm-up.
            work = rate * (options.seconds + _WARM_UP_SECONDS) / used
            rates[name].append({RATE: rate, WORK: work, "mean_loops": statistics.mean(loops)})
            print(f"{name}: {rate:.0f} answers/s, {work:.0f} per processor second, {statistics.mean(loops):.1f} loops")
    record = {"target": options.target, "concurrency": options.concurrency, "seconds": options.seconds}
    record |= {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "rounds": rates}
    for what in (RATE, WORK):
        first, second = ([each[what] for each in of] for of in rates.values())
        ratios = [one / other for one, other in zip(first, second, strict=True)]
        record[f"ratio_of_{what}"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        medians = f"{statistics.median(first):.0f} against {statistics.median(second):.0f}"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{what.replace('_', ' ')}: {medians}, ratio {ratio}")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The clients: h2load, which is written in C and costs little, and blocking grpcio stubs in a process of their own.

python clients.py URL FILE CONCURRENCY COUNT      is that process; it sends the content of FILE to URL
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from edge.datatypes import Array
from edge.pb import inference_pb2 as pb
from edge.serving.wire import from_raw, to_raw
from work import MODELS

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_JSON = "application/json"
_SECONDS = 60


class Latencies(NamedTuple):
    """The latencies of one cell in µs, and its answers per second."""

    mean_us: float
    p50_us: float
    p99_us: float
    per_second: float


def message(name: str) -> bytes:
    """Return the request to a model as a serialized ModelInferRequest."""
    request = pb.ModelInferRequest(model_name=name)
    for spec in MODELS[name].inputs:
        array = MODELS[name].request[spec.name]
        request.inputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        request.raw_input_contents.append(to_raw(array, spec.datatype))
    data: bytes = request.SerializeToString()
    return data


def document(name: str) -> bytes:
    """Return the request to a model as JSON."""
    return json.dumps({tensor: array.tolist() for tensor, array in MODELS[name].request.items()}).encode()


def ask(port: int, name: str, http_too: bool) -> Array:
    """Send the request to a model once, and return its output.

    Raises:
        OSError: no server is listening.
        grpc.RpcError: the server refuses the request.
    """
    if http_too:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
        connection.request("POST", f"/{name}", document(name), {"content-type": _JSON})
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(response.read(500))
        return np.array(json.loads(response.read())["output"], np.float32)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = pb.ModelInferResponse.FromString(channel.unary_unary(_METHOD)(message(name), timeout=_SECONDS))
    (tensor,) = answer.outputs
    return from_raw(answer.raw_output_contents[0], tensor.datatype, tuple(tensor.shape), name)


def has_h2load() -> bool:
    """Return whether h2load is installed."""
    return shutil.which("h2load") is not None


def h2load(port: int, name: str, http_too: bool, concurrency: int, count: int, directory: Path) -> Latencies:
    """Send ``count`` requests over ``concurrency`` connections, one at a time on each.

    Raises:
        RuntimeError: requests were left unanswered.
    """
    body, log = directory / f"{name}.body", directory / "h2load.tsv"
    log.unlink(missing_ok=True)
    data = message(name)
    body.write_bytes(document(name) if http_too else b"\0" + len(data).to_bytes(4, "big") + data)
    kind = ["--h1", f"-Hcontent-type: {_JSON}"] if http_too else ["-Hcontent-type: application/grpc", "-Hte: trailers"]
    url = f"http://127.0.0.1:{port}{f'/{name}' if http_too else _METHOD}"
    command = ["h2load", f"-n{count}", f"-c{concurrency}", "-t1", "-d", str(body), f"--log-file={log}", *kind, url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    durations = [int(row[2]) for row in rows if row[1] == "200"]
    if len(durations) != count:
        raise RuntimeError(
            f"{name}: {len(durations)} of {count} were answered. {done.stdout[-500:]}{done.stderr[-500:]}"
        )
    begun = min(int(row[0]) for row in rows)
    ended = max(int(row[0]) + int(row[2]) for row in rows)
    return _latencies(durations, (ended - begun) / 1e6)


def stubs(port: int, name: str, http_too: bool, concurrency: int, count: int, directory: Path) -> Latencies:
    """Send ``count`` requests from ``concurrency`` threads of another process, each with a connection of its own.

    Raises:
        RuntimeError: requests were left unanswered.
    """
    body = directory / f"{name}.message"
    body.write_bytes(document(name) if http_too else message(name))
    url = f"127.0.0.1:{port}{f'/{name}' if http_too else ''}"
    command = [sys.executable, __file__, url, str(body), str(concurrency), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-1000:]}")
    return Latencies(*json.loads(done.stdout))


def _latencies(durations_us: list[float] | list[int], seconds: float) -> Latencies:
    p50, p99 = np.percentile(durations_us, [50, 99])
    return Latencies(float(np.mean(durations_us)), float(p50), float(p99), len(durations_us) / seconds)


def _caller(url: str, data: bytes) -> Callable[[], object]:
    address, slash, path = url.partition("/")
    if not slash:
        call = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]).unary_unary(_METHOD)
        return lambda: call(data, timeout=_SECONDS)
    connection = http.client.HTTPConnection(address, timeout=_SECONDS)

    def post() -> None:
        connection.request("POST", f"/{path}", data, {"content-type": _JSON})
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status

    return post


def main(url: str, path: str, concurrency: int, count: int) -> None:
    """Send the requests, and print their latencies as JSON."""
    data = Path(path).read_bytes()
    durations: list[float] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(concurrency + 1)

    def client() -> None:
        try:
            call = _caller(url, data)
            call()  # connects
            barrier.wait()
            for _ in range(count // concurrency):
                begun = time.perf_counter()
                call()
                durations.append((time.perf_counter() - begun) * 1e6)
        except BaseException as error:  # raised below
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=client) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    try:
        barrier.wait()
    except threading.BrokenBarrierError:
        raise failures[0] from None
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    print(json.dumps(_latencies(durations, time.perf_counter() - begun)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

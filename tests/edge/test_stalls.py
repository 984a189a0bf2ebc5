"""No request stalls the others: what another client waits for, and what the server's memory grows by.

The bounds come from the machine. Others wait for a while for a plain request of 60 MiB, which is refused for its size
after nothing but its copies, and for as long as Python's parser of JSON, which stops all threads, needs for 4 MiB of
numbers. No hostile request of that size may cost a multiple of it, in the processor time of the server.
"""

import json
import struct
import time
from functools import cache, partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from edge.launch import serving
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE
from edge.settings import TRANSPORTS
from tests.support.http_requests import INFER, JSON_LENGTH, ask
from tests.support.letters_model import completion, write_letters_bundle
from tests.support.models import ORACLE, graph_of, serialized, write_oracle_bundle
from tests.support.server_models import write_bundle_of
from tests.support.waiting_client import waiting_client

SIZE = 60 * 2**20
BODY = 4 * 2**20
WIDE, COLUMNS, WIDE_OUTPUTS, RANKS = "wide", 2**20, ("a", "b", "c"), 2**18
#: Times the plain request's.
MOST_WAITING, MOST_MEMORY = 4, 2
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
#: A busy machine also makes clients wait for reasons of its own; a stall is there each time.
ATTEMPTS = 5


def field(number, data):
    length, left = b"", len(data)
    while left > 127:
        length += bytes([left & 127 | 128])
        left >>= 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + data


def request(name, datatype, *shape, contents=b"", raw=None):
    """A serialized request to the oracle; ``contents`` are serialized typed ones."""
    message = pb.ModelInferRequest(model_name=ORACLE)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    data = message.SerializeToString()
    if raw is not None:
        return data + field(7, raw)
    head = pb.ModelInferRequest(model_name=ORACLE).SerializeToString()
    return head + field(5, message.inputs[0].SerializeToString() + field(5, contents))


def plain():
    return request("x", "FP32", 1, 15, raw=bytes(SIZE))


def ranks():
    message = pb.ModelInferRequest(model_name=WIDE)
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    message.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    for name in WIDE_OUTPUTS:
        message.outputs.add(name=name).parameters["classification"].int64_param = RANKS
    return message.SerializeToString()


MESSAGES = {
    "empty texts": lambda: request("expression", "BYTES", SIZE // 4, 1, raw=bytes(SIZE)),
    "typed texts": lambda: request("expression", "BYTES", SIZE // 2, 1, contents=field(8, b"") * (SIZE // 2)),
    "typed numbers": lambda: request("x", "FP32", SIZE // 60, 15, contents=field(6, bytes(SIZE))),
    "typed integers": lambda: request("x", "INT64", SIZE // 15, 15, contents=field(3, bytes(SIZE))),
    "inputs": lambda: field(5, b"") * (SIZE // 2),
    "raw contents": lambda: field(7, b"") * (SIZE // 2),
    "outputs": lambda: field(6, b"") * (SIZE // 2),
    "dimensions": lambda: field(5, field(3, b"\1" * SIZE)),
    "parameters of an input": lambda: field(5, field(4, b"") * (SIZE // 2)),
    "ranks": ranks,
}


def json_of(**fields):
    return json.dumps(fields).encode()


NUMBER = {"name": "n", "datatype": "FP32", "shape": [1], "data": [0]}
#: Path, body and headers.
BODIES = {
    "lists": lambda: (INFER, b'{"id": [' + b"[]," * (4 * 2**20 // 3 - 100) + b"0]}", {}),
    "inputs": lambda: (INFER, json_of(inputs=[NUMBER] * 50_000), {}),
    "answers": lambda: ("/v2/models/wide/infer", json_of(inputs=[{**NUMBER, "name": "x", "data": [0.1]}]), {}),
    "choices": lambda: ("/v1/completions", json.dumps(completion(n=256, prompt="a" * (BODY - 200))).encode(), {}),
    "tokens": lambda: ("/v1/completions", json.dumps(completion(n=256, prompt=[1] * 2**20)).encode(), {}),
    "empty texts": lambda: binary(request_of("expression", "BYTES", [SIZE // 4, 1], SIZE), bytes(SIZE)),
}


def request_of(name, datatype, shape, size):
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    return json_of(inputs=[tensor])


def binary(head, data):
    return INFER, head + data, {JSON_LENGTH: str(len(head))}


def write_models(repository):
    write_oracle_bundle(repository / "oracle")
    write_letters_bundle(repository / "letters")
    lines = "\n".join(f"{name} = Expand(x, size)" for name in WIDE_OUTPUTS)
    outputs = ", ".join(f"float[{COLUMNS}] {name}" for name in WIDE_OUTPUTS)
    graph = graph_of(f"wide (float[1] x) => ({outputs}) {{ {lines} }}", size=np.array([COLUMNS]))
    values = {name: np.ones(COLUMNS, np.float32) for name in WIDE_OUTPUTS}
    write_bundle_of(repository, WIDE, serialized(graph), {"x": np.ones(1, np.float32)}, values)


class Subject:
    """A server, a client that waits, and what a plain request costs."""

    def __init__(self, ready, channel, client):
        self.ready, self.client = ready, client
        self._infer = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        waiting, memory = zip(*(self.cost(partial(self.send, plain())) for _ in range(3)), strict=True)
        self._large, self._small, self._memory = min(waiting), min(_parsing() for _ in range(3)), max(memory)

    def answer(self, message):
        return self._infer(message, timeout=120)

    def send(self, message):
        call = self._infer.future(message, timeout=120)
        assert (call.exception() and call.code()) in (None, grpc.StatusCode.INVALID_ARGUMENT), call.exception()

    def post(self, path, body, headers):
        heard = ask(f"127.0.0.1:{self.ready.http_port}", path, body, headers=headers, timeout=120)
        assert heard.status in (200, 400), heard.body[:1000]

    def cost(self, attack):
        """Return the seconds of another client's slowest call meanwhile, and by how much memory grows at most."""
        process = Path(f"/proc/{self.ready.process_id}")
        (process / "clear_refs").write_text("5")  # sets the peak to the present
        before = self._peak_bytes(process)
        self.client.slowest()
        attack()
        return self.client.slowest(), self._peak_bytes(process) - before

    def check(self, attack, size):
        waiting = MOST_WAITING * (self._large if size > BODY else self._small)
        memory = MOST_MEMORY * self._memory
        costs = []
        for _ in range(ATTEMPTS):
            costs.append(self.cost(attack))
            if costs[-1][0] <= waiting and costs[-1][1] <= memory:
                return
        raise AssertionError(f"seconds and bytes: {costs}, at most {waiting}, {memory}")

    @staticmethod
    def _peak_bytes(process):
        (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


def _parsing():
    body = b"[" + b"0," * (BODY // 2 - 1) + b"0]"
    start = time.process_time()
    json.loads(body)
    return time.process_time() - start


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    directory = tmp_path_factory.mktemp("repository")
    write_models(directory)
    return directory


@pytest.fixture(scope="module", params=TRANSPORTS)
def subject(repository, tmp_path_factory, request):
    arguments = ["--http-port=0", f"--transport={request.param}"]
    cache = tmp_path_factory.mktemp("cache")
    with (
        serving(repository, target="onnxruntime", cache=cache, arguments=arguments) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}", options=OPTIONS) as channel,
        waiting_client(ready.grpc_port, ready.process_id) as client,
    ):
        yield Subject(ready, channel, client)


@cache
def message_of(kind):
    return MESSAGES[kind]()


def test_large_answers_are_right(subject):
    path, body, headers = BODIES["answers"]()
    answer = ask(f"127.0.0.1:{subject.ready.http_port}", path, body, headers=headers, timeout=60).json
    assert [output["name"] for output in answer["outputs"]] == list(WIDE_OUTPUTS)
    value = float(np.float32(0.1))
    assert all(output["data"] == [value] * COLUMNS for output in answer["outputs"])
    ranked = pb.ModelInferResponse.FromString(subject.answer(message_of("ranks"))).raw_output_contents[0]
    assert ranked.startswith(struct.pack("<I", 10) + b"1.000000:0" + struct.pack("<I", 10) + b"1.000000:1")
    assert ranked.endswith(f"1.000000:{RANKS - 1}".encode())


@pytest.mark.parametrize("kind", MESSAGES)
def test_message_does_not_stall_others(subject, kind):
    message = message_of(kind)
    subject.check(partial(subject.send, message), len(message))


@pytest.mark.parametrize("kind", BODIES)
def test_body_does_not_stall_others(subject, kind):
    path, body, headers = BODIES[kind]()
    subject.check(partial(subject.post, path, body, headers), len(body))

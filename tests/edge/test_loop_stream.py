"""Partial answers over ModelStreamInfer, with stock clients on every transport."""

from queue import Queue
from typing import NamedTuple

import grpc
import pytest
import tritonclient.grpc as triton

from edge.client import Client, InferRequest, InferResult
from edge.errors import UsageError
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from tests.support.loop_model import ENDLESS, MOST_LOOPS, NAME, array_of, loop_request, prompt, write_halving_bundle
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import Sender, expression, triton_input

ON_EVERY_TRANSPORT = True  # it tests the protocol

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
#: More steps than a client sees of them.
MANY = 6_000


@pytest.fixture(scope="module")
def loops(tmp_path_factory, transport):
    bundle = write_halving_bundle(tmp_path_factory.mktemp("loop") / NAME)
    arguments = [f"--transport={transport}", "--instances=1", "--allow-shared-memory"]
    with running_server([bundle.path, ORACLE_BUNDLE], arguments=arguments) as ready:
        yield ready


@pytest.fixture
def channel(loops):
    #: A client that grants the server little more than what it reads.
    window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024))
    with grpc.insecure_channel(f"127.0.0.1:{loops.grpc_port}", window) as channel:
        yield channel


class Part(NamedTuple):
    id: str
    loops: list[int]
    final: bool
    stopped: str


def part_of(message):
    assert not message.error_message
    return read(message.infer_response)


def read(response):
    final, stopped = (response.parameters[name] for name in ("triton_final_response", "stopped"))
    return Part(response.id, array_of(response, "loops").tolist(), final.bool_param, stopped.string_param)


def streamed(*values, **parameters):
    return loop_request(*values, stream_partial=True, **parameters)


def test_stock_client_gets_the_prediction_after_each_loop(loops):
    answers = Queue()
    limits = {"stream_partial": True, "max_loops": 6, "tolerance": 1 / 16}
    with triton.InferenceServerClient(f"127.0.0.1:{loops.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = [triton_input("xs", prompt(1, ENDLESS))]
        client.async_stream_infer(NAME, inputs, request_id="7", enable_empty_final_response=True, parameters=limits)
        received = [answers.get(timeout=20) for _ in range(6)]
        client.stop_stream()
    assert not any(error for _, error in received)
    halves = [1 - 2.0**-loops for loops in range(1, 7)]
    for step, (result, _) in enumerate(received, 1):
        first = min(step, 4)  # the first row has settled then
        assert result.as_numpy("loops").tolist() == [[first], [step]]
        assert result.as_numpy("prediction").tolist() == [[halves[first - 1]], [3 * halves[step - 1]]]
        assert result.as_numpy("residual").tolist() == [[2.0**-first], [1 + 2.0**-step]]
    parts = [read(result.get_response()) for result, _ in received]
    assert [(part.id, part.final, part.stopped) for part in parts] == [("7", False, "")] * 5 + [("7", True, "budget")]


def test_slow_client_misses_partial_answers_and_delays_nobody(loops, channel):
    sender, stub = Sender(), Stub(channel)
    stream, before = stub.ModelStreamInfer(iter(sender)), answered(stub)
    sender.queue.put(streamed(ENDLESS, max_loops=MANY))
    seen = [part_of(next(stream))]
    # It reads nothing, and the loop ends nevertheless.
    assert wait_until(lambda: answered(stub) > before, 60)
    while not seen[-1].final:
        seen.append(part_of(next(stream)))
    stream.cancel()
    parts = [part.loops[0] for part in seen]
    assert (parts[-1], seen[-1].stopped) == (MANY, "budget")
    assert parts == sorted(set(parts))
    assert len(parts) < MANY / 2
    assert parts[-2] > MANY - 20  # the latest ones are kept, not the first


def answered(stub):
    """Return how many requests the model has answered, while those of another model are answered, too."""
    assert stub.ModelInfer(expression(b"1 + 2"), timeout=20).raw_output_contents
    (statistics,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=NAME)).model_stats
    return int(statistics.inference_stats.success.count)


def test_requests_of_one_stream_answer_as_they_go(loops, channel):
    sender = Sender()
    stream = Stub(channel).ModelStreamInfer(iter(sender))
    requests = {
        "long": streamed(ENDLESS, max_loops=MOST_LOOPS),
        "whole": loop_request(ENDLESS, max_loops=MANY),
        "short": streamed(1, max_loops=3),
        "behind": loop_request(1),
    }
    for name, request in requests.items():
        request.id = name
        sender.queue.put(request)
    finals = []
    while len(finals) < 3:
        part = part_of(next(stream))
        finals += [part.id] if part.final else []
        assert not part.final or part.id != "long"
    assert finals.index("whole") < finals.index("behind")  # without partial answers, in the order of the requests
    assert "short" in finals
    stream.cancel()
    assert wait_until(lambda: is_at_rest(loops))


def test_our_client_gets_partial_answers(loops):
    inputs = {"xs": prompt(1)}
    requests = [
        InferRequest(NAME, inputs, request_id="whole"),
        InferRequest(NAME, inputs, request_id="parts", partial_answers=True, max_loops=6, tolerance=1e-9),
    ]
    with Client(f"127.0.0.1:{loops.grpc_port}") as client:
        answers = [answer for answer in client.infer_stream(requests) if isinstance(answer, InferResult)]
        with pytest.raises(UsageError, match="partial_answers of a single request: got True, expected False"):
            client.infer(NAME, inputs, partial_answers=True)
    (whole,) = [answer for answer in answers if answer.request_id == "whole"]
    assert (whole.final, whole.stopped) == (True, "tolerance")
    *parts, last = [answer for answer in answers if answer.request_id == "parts"]
    assert parts
    assert not any(part.final or part.stopped for part in parts)
    assert (last.final, last.stopped, last.outputs["loops"].tolist()) == (True, "budget", [[6]])
    assert all(answer.round_trip_ns > 0 for answer in answers)


def test_stream_ends_in_time_with_the_latest_prediction(channel):
    request = streamed(ENDLESS, max_loops=MOST_LOOPS, policy="deadline", timeout=500_000)
    *parts, last = [part_of(message) for message in Stub(channel).ModelStreamInfer(iter([request]))]
    assert (last.final, last.stopped) == (True, "deadline")
    assert parts
    assert parts[-1].loops[0] <= last.loops[0] < MOST_LOOPS


@pytest.mark.parametrize("reads", [False, True])
def test_cancelled_stream_frees_its_rows_at_once(loops, channel, reads):
    stub, sender = Stub(channel), Sender()
    beside = stub.ModelInfer.future(loop_request(ENDLESS, max_loops=MANY))
    stream = stub.ModelStreamInfer(iter(sender))
    sender.queue.put(streamed(ENDLESS, ENDLESS, ENDLESS, max_loops=MOST_LOOPS))
    assert not part_of(next(stream)).final
    waiting = stub.ModelInfer.future(loop_request(1, 2))  # there is no room for two more rows before the stream ends
    if reads:
        for _ in range(100):
            next(stream)
    assert not waiting.done()
    stream.cancel()
    sender.queue.put(None)
    assert waiting.result(20).parameters["stopped"].string_param == "tolerance"
    assert read(beside.result(60)).loops == [MANY]
    assert wait_until(lambda: is_at_rest(loops))


def test_what_cannot_be_streamed_is_an_invalid_argument(loops, channel):
    stub = Stub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(streamed(1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details()
    assert details == ("parameter 'stream_partial': expected a request in a stream. Use ModelStreamInfer.")
    plain = expression(b"1 + 2")
    plain.parameters["stream_partial"].bool_param = True
    (response,) = stub.ModelStreamInfer(iter([plain]))
    assert "'stream_partial': expected no such parameter: 'calculator-oracle' has one step" in response.error_message
    assert stub.ModelInfer(loop_request(1, stream_partial=False)).outputs
    assert is_at_rest(loops)


def test_a_failing_request_of_a_stream_fails_alone(loops, channel):
    requests = [streamed(1, max_loops=3), streamed(float("nan")), streamed(6.0), streamed(2, max_loops=2)]
    for number, request in enumerate(requests):
        request.id = str(number)
    finals = {}
    for message in Stub(channel).ModelStreamInfer(iter(requests)):
        if message.infer_response.parameters["triton_final_response"].bool_param:
            finals[message.infer_response.id] = message
    assert {name: part_of(finals[name]).loops for name in "03"} == {"0": [3], "3": [2]}
    assert "finite" in finals["1"].error_message
    assert "step" in finals["2"].error_message or "runtime" in finals["2"].error_message
    assert wait_until(lambda: is_at_rest(loops))

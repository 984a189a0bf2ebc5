"""Looped models: partial answers over ModelStreamInfer on every transport, and the commands."""

import json
import shutil
from queue import Queue
from typing import NamedTuple

import grpc
import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton

from edge.bundles import rules
from edge.client import Client, InferRequest, InferResult
from edge.client.connection import open_stub
from edge.errors import BundleError, InvalidRequest, UsageError
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.programs.tier_program import load_tier
from edge.repository.model import Model
from tests.support.commands import mistake, ran, shown
from tests.support.jobs import prepared
from tests.support.loop_model import ENDLESS, MOST_LOOPS, NAME, array_of, loop_request, prompt, write_halving_bundle
from tests.support.metrics import is_at_rest, wait_until
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import Sender, expression, triton_input

ON_EVERY_TRANSPORT = True  # it tests the protocol

#: More steps than a client sees of them.
MANY = 6_000


@pytest.fixture(scope="module")
def loops(loop_bundle, transport):
    arguments = [f"--transport={transport}", "--instances=1", "--allow-shared-memory"]
    with running_server([loop_bundle.path, ORACLE_BUNDLE], arguments=arguments) as ready:
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
    sender, stub = Sender(), open_stub(channel)
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
    stream = open_stub(channel).ModelStreamInfer(iter(sender))
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
    *parts, last = [part_of(message) for message in open_stub(channel).ModelStreamInfer(iter([request]))]
    assert (last.final, last.stopped) == (True, "deadline")
    assert parts
    assert parts[-1].loops[0] <= last.loops[0] < MOST_LOOPS


@pytest.mark.parametrize("reads", [False, True])
def test_cancelled_stream_frees_its_rows_at_once(loops, channel, reads):
    stub, sender = open_stub(channel), Sender()
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
    stub = open_stub(channel)
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
    for message in open_stub(channel).ModelStreamInfer(iter(requests)):
        if message.infer_response.parameters["triton_final_response"].bool_param:
            finals[message.infer_response.id] = message
    assert {name: part_of(finals[name]).loops for name in "03"} == {"0": [3], "3": [2]}
    assert "finite" in finals["1"].error_message
    assert "step" in finals["2"].error_message or "runtime" in finals["2"].error_message
    assert wait_until(lambda: is_at_rest(loops))


@pytest.fixture(scope="module")
def looped_url(loop_bundle, tmp_path_factory):
    with running_server([loop_bundle.path], cache=tmp_path_factory.mktemp("cache")) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


def found(*arguments):
    return json.loads(shown(*arguments, "--json"))


def test_infer_sends_a_file_with_limits_or_says_what_is_wrong_with_it(looped_url, tmp_path):
    file, archive, wrong = tmp_path / "prompts.json", tmp_path / "prompts.npz", tmp_path / "prompt.json"
    file.write_text(json.dumps({"xs": prompt(1, 2, ENDLESS).tolist()}))
    wrong.write_text('{"xy": [[[1]]]}')
    np.savez(archive, xs=prompt(1))
    infer = ("infer", NAME, "--url", looped_url)
    for options, loops, stopped in (
        ((f"--input=@{file}", "--max-loops=3"), [3, 3, 3], "budget"),
        ((f"--input=@{archive}", "--tolerance=0.5"), [1], "tolerance"),
    ):
        answer = found(*infer, *options)
        assert ([row[0] for row in answer["outputs"]["loops"]], answer["stopped"]) == (loops, stopped)
    assert "stopped by its budget" in shown(*infer, f"--input=@{file}")
    for tensor, message in (
        ("xs=[[1],[2]]", "got the shape [2, 1], expected [-1, -1, 1]. The first dimension is that of the rows"),
        ("xs=[[[1, 2]]]", "got the shape [1, 1, 2], expected [-1, -1, 1]. The model's metadata"),
        (f"@{wrong}", "got 'xy', expected tensors of ['xs']"),
        (f"@{tmp_path / 'none.json'}", "No such file"),
    ):
        assert message in mistake(*infer, "--input", tensor)


def test_bench_measures_the_loops_of_its_limits(loop_bundle, looped_url):
    bench = ("bench", loop_bundle.path, "--url", looped_url, "--requests", 20)
    for options, loops in (((), 4), (("--max-loops", 3), 3), (("--tolerance", 0.5, "--rows", 2), 1)):
        (report,) = found(*bench, *options)
        assert (report["in_process"]["loops"], report["served"]["loops"]) == (loops, loops)


def test_load_has_the_loops_of_its_limits(loop_bundle, looped_url):
    report = found(
        *("bench", loop_bundle.path, "--url", looped_url, "--rate", 100, "--arrivals", "constant", "--seconds", 0.3),
        *("--warm-up", 0, "--tolerance", 0.25, "--max-loops", 9),
    )
    assert [(name, group["requests"], group["loops"]) for name, group in report["groups"].items()] == [("all", 30, 2)]


def test_profile_times_files_and_loops(loop_bundle, tmp_path):
    out = tmp_path / "times.json"
    profile = ("profile", loop_bundle.path, "--calls", 3, "--cache", tmp_path)
    times = found(*profile, "--target", "onnxruntime", "--out", out)
    assert json.loads(out.read_bytes()) == times
    assert [(file["role"], file["rows"]) for file in times["files"]] == [
        (role, rows) for rows in (1, 4) for role in ("embed", "step")
    ]
    assert all(file["milliseconds"] > 0 for file in times["files"])
    assert [(loop["rows"], loop["golden_loops"]) for loop in times["loops"]] == [(1, 4), (4, 4)]
    assert "this takes minutes" in ran(*profile, "--json").stderr
    assert "got a file, expected a free path" in mistake(*profile, "--out", out)
    assert "--lengths: got (8,), expected none with a bundle" in mistake(*profile, "--lengths", 8)
    assert "--out: expected a file for the table" in mistake("profile", tmp_path)


def test_profile_times_one_loop_of_those_that_are_computed_at_once(tmp_path):
    grouped = write_halving_bundle(tmp_path / NAME, check_every=16)
    times = found("profile", grouped.path, "--calls", 21, "--target", "onnxruntime", "--cache", tmp_path)
    steps = [file["milliseconds"] for file in times["files"] if file["role"] == "step"]
    for loop, step in zip(times["loops"], steps, strict=True):
        assert step / 10 < loop["milliseconds"] < 4 * step  # a group of 16 is none, or 16 times as long


def test_on_device_measures_loops(loop_bundle, tmp_path):
    quick = ("--requests=10", "--rounds=2", "--idle-gaps=0.01", "--idle-requests=1", "--target=onnxruntime")
    record = found("bench", "--on-device", loop_bundle.path, *quick, "--cache", tmp_path)
    assert {(one["rows"], one["where"], one["loops"]) for one in record["series"]} == {
        (rows, where, 4) for rows in (1, 4) for where in ("in process", "served")
    }


def test_info_build_and_doctor_name_the_roles(loop_bundle, tmp_path):
    text = shown("info", loop_bundle.path)
    assert "step until residual is at most 0.1 (tolerance) or 20 loops are done (max_loops)" in text
    text = shown("build", loop_bundle.path, "--target", "onnxruntime", "--cache", tmp_path)
    assert all(f"{NAME} 1 (full {role})" in text for role in ("embed", "step"))
    checks = {check["name"]: check for check in found("doctor", loop_bundle.path)["checks"]}
    assert all(checks[f"{NAME} full {role}"]["status"] == "ok" for role in ("embed", "step"))
    broken = shutil.copytree(loop_bundle.path, tmp_path / "broken")
    (broken / "step.onnx").write_bytes(b"broken")
    done = ran("doctor", broken, "--json")
    assert done.exit_code == 1
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"].startswith("broken")]
    assert (check["status"], "step.onnx" in check["found"]) == ("failed", True)


def test_a_prompt_has_one_point_more_than_values(loop_bundle, tmp_path):
    manifest = loop_bundle.manifest
    for points, values in (("xs", None), ("xs", "zz"), ("xs", "xs")):
        program = msgspec.structs.replace(manifest.program, points=points, values=values)
        with pytest.raises(BundleError, match=r"loop points and values: got .*, expected two of \['xs'\], or neither"):
            rules.check(msgspec.structs.replace(manifest, program=program), "m")
    paired = write_halving_bundle(tmp_path / "paired", values=True)
    program = load_tier(paired, "onnxruntime", tmp_path)
    model = Model(paired, {("full", role): loaded for role, loaded in program.files.items()})
    good = {"xs": prompt(1, tokens=3), "ys": np.ones((1, 2), np.float32)}
    assert prepared(model, good)[0] == 1
    with pytest.raises(InvalidRequest, match=r"'xs' and 'ys' of 'halving': got 4 points and 2 values, expected one"):
        prepared(model, {**good, "xs": prompt(1, tokens=4)})
    program.close()

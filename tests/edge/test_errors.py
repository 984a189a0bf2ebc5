"""The errors: one message shape, one exit code and status per kind; unexpected ones leak nothing to clients."""

import asyncio
import gc
import inspect
import string
import sys
import weakref
from contextlib import contextmanager
from urllib.parse import quote

import grpc
import numpy as np
import pytest

from edge import errors
from edge.__main__ import cli
from edge.connections.quota import Quota
from edge.errors import INTERNAL, FewheadsError, InvalidRequest, Raw, RequestError, RunnerError, Whole, printable
from edge.health.health import Health
from edge.health.supervisor import Notifier, Supervisor
from edge.instruments import sampling
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE, TELEMETRY
from edge.repository.loader import Loader
from edge.repository.repository import Repository
from edge.rpc.servicers import InferenceServicer, TelemetryServicer
from edge.runtimes.cuda import fatal, fatal_name, is_out_of_memory
from edge.serving.call import Call
from edge.serving.inference import InferenceService
from edge.serving.statuses import STATUSES
from edge.settings import TRANSPORTS
from edge.telemetry.telemetry import Sources, Telemetry
from tests.support.commands import python
from tests.support.in_process import running_service, serving_here
from tests.support.loop_model import NAME, loop_request, write_halving_bundle
from tests.support.sample_requests import REQUESTS, good, methods

#: Kinds that are not listed have the exit code of their base.
EXIT_CODES = {
    errors.FewheadsError: 1,
    errors.UsageError: 2,
    errors.BundleError: 3,
    errors.GoldenError: 4,
    errors.BackendError: 5,
    errors.ServerError: 6,
    errors.RequestError: 7,
    errors.ServerRefused: 7,  # a RequestError, seen from the client
    errors.DeviceFailed: 8,
    errors.RunStuck: 9,
    errors.DrainTimeout: 10,
}


def subclasses(base):
    """Return every subclass of the device; the workstation adds its own."""
    for found in base.__subclasses__():
        if found.__module__.startswith("edge."):
            yield found
        yield from subclasses(found)


ALL = [FewheadsError, *subclasses(FewheadsError)]


def test_every_kind_has_its_codes_its_place_in_the_overview_and_four_parts():
    explained = (cli.epilog or "").replace("\n", " ")
    for kind in ALL:
        assert kind.__module__ == "edge.errors"
        assert kind.exit_code == EXIT_CODES.get(kind, EXIT_CODES[RequestError])
        assert kind in EXIT_CODES or issubclass(kind, RequestError)
        assert (f"{kind.__name__} {kind.exit_code}" if kind in EXIT_CODES else kind.__name__) in (errors.__doc__ or "")
        error = kind("the subject", given=3, expected="4", fix="Do this.")
        assert str(error) == "the subject: got 3, expected 4. Do this."
        assert (error.subject, error.given, error.expected, error.fix) == ("the subject", 3, "4", "Do this.")
        assert f" {kind.exit_code} " in explained
    assert " 130 " in explained
    assert set(STATUSES) == set(subclasses(RequestError))
    assert len({status.grpc for status in STATUSES.values()}) == len(STATUSES)


def test_values_are_quoted_and_cut_and_descriptions_are_not_quoted():
    for value, text in (
        ("x", "'x'"),
        (Raw("x"), "x"),
        (Raw(OSError("no such thing")), "no such thing"),
        (b"\xff", "b'\\xff'"),
        (Raw("x" * 160), "x" * 160),
        (Raw("x" * 161), "x" * 160 + "… (161 characters)"),
        ("x" * 10**6, f"'{'x' * 159}… (1000000 characters)"),
        (b"x" * 10**6, f"b'{'x' * 158}… (1000000 characters)"),
        (Whole("y" * 10**4), "y" * 10**4),
    ):
        error = FewheadsError("the subject", given=value, expected="4", fix="Do this.")
        assert str(error) == f"the subject: got {text}, expected 4. Do this."
    assert str(FewheadsError("the subject", expected="4", fix="Do this.")) == "the subject: expected 4. Do this."
    # Text of unknown origin becomes safe for a terminal, and can be encoded.
    assert printable("\udcff") == "\\udcff"
    assert printable("a\x1b[2J\nb\u202ec\x9b\x7fé") == "a\\x1b[2J\\nb\\u202ec\\x9b\\x7fé"


def test_every_part_is_bounded_and_safe():
    name = "\N{GRINNING FACE}" * 10**6
    error = FewheadsError(f"model {name!r}", given=name, expected="4", fix="Do this.")
    half = "\N{GRINNING FACE}" * 119
    assert error.subject == f"model '{half[6:]}…{half}' (1000008 characters)"
    assert len(quote(str(error), safe=string.printable)) < 8 * 1024  # as grpc-message, with which metadata must fit
    for part in ("subject", "given", "expected", "fix"):
        parts = {"subject": "a", "given": "b", "expected": "c", "fix": "d", part: Raw("x" * 10**6)}
        assert 100 < len(str(FewheadsError(parts.pop("subject"), **parts))) < 1100
        parts = {"subject": "a", "given": "b", "expected": "c", "fix": "d", part: Raw("\x1b[2J\udcff\n")}
        text = str(FewheadsError(parts.pop("subject"), **parts))
        assert "\\x1b[2J\\udcff\n" in text
        assert text.encode()


LOST = [
    "cuGraphLaunch failed: CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access was encountered",
    "cuStreamSynchronize failed: unspecified launch failure",
    "cuCtxSynchronize failed: unknown error",
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=jetson",
    "CUDA error code=710",
    "Cuda failure: 716",
    "[checkMacros.cpp::catchCudaError::203] Error Code 1: Cuda Runtime (misaligned address)",
    "CUDA_ERROR_LAUNCH_FAILED",
    "(<cudaError_t.cudaErrorLaunchFailure: 719>,)",
    "Unable to determine the device handle: GPU is lost. Reboot the system to recover this GPU",
]
OUT_OF_MEMORY = [
    "cuGraphInstantiateWithFlags failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory",
    "IRuntime::deserializeCudaEngine: Error Code 2: OutOfMemory (Requested size was 263168 bytes.)",
    "CUDA_ERROR_OUT_OF_MEMORY",
]
OTHERS = [
    "",
    "cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901), operation failed due to a previous error",
    "cuda runtime error 11: invalid argument",
    "indices element out of data bounds, idx=700 must be within the inclusive range [-5,4]",
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x index: 0 Got: 719 Expected: 710",
    "an unknown error",
]


@pytest.mark.parametrize("text", [*LOST, *OUT_OF_MEMORY, *OTHERS])
def test_messages_are_fatal_or_a_lack_of_memory_or_neither(text):
    assert bool(fatal_name(text)) == (text in LOST)
    assert is_out_of_memory(text) == (text in OUT_OF_MEMORY)


def test_fatal_errors_are_found_in_causes_and_not_in_quotes_or_circles():
    ours = RunnerError("m", given=Raw("RuntimeError"), expected="an answer", fix="See the log.")
    ours.__cause__ = RuntimeError(LOST[0])
    assert fatal(ours) == LOST[0]
    ours.__cause__ = RuntimeError(LOST[1])
    assert fatal(ours) == f"CUDA_ERROR_LAUNCH_FAILED: {LOST[1]}"
    assert fatal(InvalidRequest("text", given=LOST[0], expected="x", fix="y.")) is None  # a client's words
    one, two = ValueError("a"), ValueError("b")
    one.__cause__, two.__cause__ = two, one
    assert fatal(one) is None


def test_health_that_could_not_be_published_is_published_later(scheduler, tmp_path, caplog, monkeypatch):
    repository = Repository(tmp_path, Loader(scheduler))
    health, errors = Health(repository, scheduler.runs), [OSError("no file is left")]

    def models_ready():
        if errors:
            raise errors.pop()
        return True

    monkeypatch.setattr(health, "models_ready", models_ready)
    health.accepting = True
    supervisor = Supervisor(health, repository, scheduler, Notifier({}))
    for published in (False, True):
        changed = health.changed
        supervisor.publish()
        assert (health.serving[""], changed.is_set()) == (published, published)
    assert caplog.text.count("no file is left") == 1


async def test_samples_go_on_and_their_error_is_logged_once(scheduler, tmp_path, monkeypatch, caplog):
    sampled = asyncio.Event()
    errors = [OSError("no file is left")] * 3

    class Failing(MemorySampler):
        def observe(self):
            if errors:
                raise errors.pop()
            sampled.set()

    repository = Repository(tmp_path, Loader(scheduler))
    health = Health(repository, scheduler.runs)
    streams = None  # samples need none
    sources = Sources(scheduler, repository, health, Failing(), Sensors(), streams, Quota(1, 1))
    monkeypatch.setattr(sampling, "_SAMPLE_SECONDS", 0.01)
    watching = asyncio.create_task(Telemetry(sources).watch())
    await asyncio.wait_for(sampled.wait(), 10)
    watching.cancel()
    assert caplog.messages == ["memory and load cannot be sampled"]


def test_shutdown_ends_although_the_health_cannot_be_read():
    done = python(
        """
import time
from edge.health.supervisor import Watchdog

class Unreadable:
    def failure(self, seconds):
        raise OSError("no file is left")

Watchdog(Unreadable(), 1.0).bound_shutdown(0.5)
time.sleep(60)
"""
    )
    assert (done.returncode, "no file is left" in done.stderr) == (10, True)


SECRET = "/etc/a-path-that-no-client-should-see"
OURS = [rpc for rpc in methods() if rpc.split("/")[1] in (INFERENCE, TELEMETRY)]


@contextmanager
def failing(code):
    """Raise an error in the first frame that enters ``code``, as if it had failed by itself."""
    failed = []

    def look(frame, event, argument):
        if frame.f_code is code and event == "call" and not failed:
            failed.append(True)
            raise RuntimeError(SECRET)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert failed


def code_of(rpc, transport):
    _, service, method = rpc.split("/")
    if (method, transport) == ("ModelInfer", "nghttp2"):  # it has a function of its own
        method = "start_model_infer"
    servicer = InferenceServicer if service == INFERENCE else TelemetryServicer
    return inspect.unwrap(getattr(servicer, method)).__code__


async def end(channel, rpc):
    request = REQUESTS.get(rpc.rpartition("/")[2])
    answers = 0
    try:
        if rpc.endswith("ModelStreamInfer"):  # it may end before anything is written, which grpc.aio does not support
            await channel.stream_stream(rpc)(timeout=1).read()
            return grpc.StatusCode.OK, ""
        call = channel.stream_stream(rpc)(iter([request.SerializeToString() if request else b""]), timeout=10)
        async for _ in call:
            answers += 1
    except grpc.aio.AioRpcError as error:
        assert not answers
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def stream_errors(channel, *requests):
    method, parse = f"/{INFERENCE}/ModelStreamInfer", pb.ModelStreamInferResponse.FromString
    stream = channel.stream_stream(method, response_deserializer=parse)
    messages = iter([request.SerializeToString() for request in requests])
    return [answer.error_message async for answer in stream(messages, timeout=10)]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_failing_rpc_hides_its_error(tmp_path, caplog, transport):
    async with serving_here(tmp_path, transport) as channel:
        for rpc in OURS:
            caplog.clear()
            with failing(code_of(rpc, transport)):
                assert await end(channel, rpc) == (grpc.StatusCode.INTERNAL, INTERNAL), rpc
            assert SECRET in caplog.text  # for the operator
            if not rpc.endswith("/Watch"):  # it would not end
                assert SECRET not in (await end(channel, rpc))[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["wire.Sent.decode", "call.ResponseBuilder.build"])
async def test_failed_request_leaves_no_cycle_with_its_tensors(tmp_path, monkeypatch, transport, place):
    held = []

    def fail(*arguments, **options):
        tensor = np.ones(3)
        held.append(weakref.ref(tensor))
        raise InvalidRequest("x", given=tensor.size, expected="2", fix="Send 2.")

    monkeypatch.setattr(f"edge.serving.{place}", fail)
    async with serving_here(tmp_path, transport) as channel:
        call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
        gc.disable()  # it would free tensors in a cycle, too late
        try:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError, match=r"x: got 3, expected 2\. Send 2\."):
                    await call(good().SerializeToString(), timeout=10)
            await asyncio.sleep(0.1)
            assert [tensor() is None for tensor in held] == [True] * 3
        finally:
            gc.enable()


async def test_failing_stream_request_hides_its_error(tmp_path, caplog):
    async with serving_here(tmp_path) as channel:
        with failing(InferenceService._call.__code__):
            assert await stream_errors(channel, *[good()] * 3) == [INTERNAL, "", ""]
        assert SECRET in caplog.text


async def test_error_after_a_run_is_answered(tmp_path):
    request = loop_request(1)
    async with running_service(tmp_path, lambda repository: write_halving_bundle(repository / NAME)) as running:
        with failing(Call.end_of.__code__), pytest.raises(RuntimeError, match=SECRET):
            await running.infer(request)
        assert (await running.infer(request)).parameters["stopped"].string_param
        assert await running.at_rest(NAME)

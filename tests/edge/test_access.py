"""Access control of a server: every RPC and page by token and scope, and dangerous requests without any option."""

import http.client
import json
import re
import time
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import grpc
import pytest

import edge
from edge.cli.serve import serve
from edge.client.connection import open_stub
from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.protocol import INFERENCE
from edge.security.access import INFER_STREAM, OPEN, RPC_SCOPES, TELEMETRY_WATCH
from edge.security.tokens import SCOPES
from edge.server import Ready
from edge.settings import TRANSPORTS
from tests.support import http_requests
from tests.support.models import ORACLE_BUNDLE
from tests.support.sample_requests import (
    HEALTH_NAME,
    LOAD,
    REGION,
    REQUESTS,
    UNLOAD,
    changed,
    good,
    in_region,
    log_setting,
    methods,
    trace_setting,
)
from tests.support.secured_servers import bearer, tokens_file
from tests.support.server_processes import stub_of

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


class Guarded(NamedTuple):
    ready: Ready
    file: Path
    tokens: dict[str, str]


@pytest.fixture(scope="module", params=TRANSPORTS)
def guarded(request, tmp_path_factory):
    if request.param == "nghttp2":
        pytest.importorskip("ngh2")
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens = tokens_file(file, **{scope: [scope] for scope in SCOPES})
    arguments = [f"--tokens={file}", "--model-control=explicit", "--load-model=*"]
    arguments += ["--allow-shared-memory", "--allow-log-settings", f"--transport={request.param}"]
    with running_server([ORACLE_BUNDLE], cache=file.parent / "cache", arguments=arguments) as ready:
        yield Guarded(ready, file, tokens)


@pytest.fixture
def channel(guarded):
    with grpc.insecure_channel(f"127.0.0.1:{guarded.ready.grpc_port}") as channel:
        yield channel


def status(channel, rpc, token):
    request = HEALTH_NAME if rpc.startswith("/grpc.health") else REQUESTS.get(rpc.rpartition("/")[2])
    sent = iter([request.SerializeToString() if request else b""])
    call = channel.stream_stream(rpc)(sent, metadata=None if token is None else bearer(token), timeout=10)
    try:
        next(call, None)
        call.cancel()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_every_rpc_has_a_scope():
    assert set(RPC_SCOPES) == set(methods())
    assert all(scopes <= set(SCOPES) for scopes in RPC_SCOPES.values())
    assert {rpc for rpc, scopes in RPC_SCOPES.items() if scopes == OPEN} == {
        f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")
    }


def test_every_rpc_requires_its_scope(guarded, channel):
    for rpc in methods():
        scopes, name = RPC_SCOPES[rpc], rpc.rpartition("/")[2]
        wrong = {"": None, "unknown": "fewheads_wrong", "longer": guarded.tokens["infer"] + "x"}
        for scope, token in {**wrong, **guarded.tokens}.items():
            code, details = status(channel, rpc, token)
            if scopes == OPEN or scope in scopes:
                assert code not in (UNAUTHENTICATED, DENIED), (rpc, scope, details)
            elif scope in SCOPES:
                assert code is DENIED, (rpc, scope)
                assert details.startswith(f"{name}: got token '{scope}' with the scope {scope}, expected the scope ")
            else:
                assert code is UNAUTHENTICATED, (rpc, scope, details)
                assert details.startswith("authorization: got ")
                assert details.endswith("`fewheads token` makes tokens.")
                assert not token or token not in details


def test_rejected_call_is_not_read(channel):
    """The client sends forty megabytes, of which HTTP/2 accepts no more than its window."""
    sent = []

    def parts():
        for _ in range(40):
            sent.append(1)
            yield bytes(2**20)

    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(INFER_STREAM)(parts(), timeout=10))
    assert caught.value.code() is UNAUTHENTICATED
    assert len(sent) < 40


def page(guarded, path, token, method="GET"):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    got = http_requests.ask(f"127.0.0.1:{guarded.ready.metrics_port}", path, headers=headers, method=method)
    return got.status, got.body.decode()


def test_pages_require_the_scope_metrics(guarded):
    code, text = page(guarded, "/", None)  # the page itself is open; its data is not
    assert code == 200
    assert "/telemetry.json" in text
    assert "calculator-oracle" not in text
    rejected = [(token, 401, "authorization: got ") for token in (None, "", "fewheads_wrong")]
    rejected += [(guarded.tokens[scope], 403, f"Get: got token '{scope}'") for scope in ("infer", "control")]
    for path in ("/metrics", "/telemetry.json", "/none"):
        for token, expected, message in rejected:
            code, text = page(guarded, path, token)
            assert (code, text[: len(message)]) == (expected, message)
        assert page(guarded, path, guarded.tokens["infer"], "HEAD") == (403, "")
        assert page(guarded, path, guarded.tokens["metrics"])[0] == (404 if path == "/none" else 200)


def test_removed_token_ends_calls_and_streams(guarded, channel):
    requests = SimpleQueue()
    infer, metrics = bearer(guarded.tokens["infer"]), bearer(guarded.tokens["metrics"])
    stream = channel.stream_stream(INFER_STREAM)(iter(requests.get, None), metadata=infer, timeout=20)
    every = telemetry_pb2.WatchRequest(interval_ms=100).SerializeToString()
    watch = channel.unary_stream(TELEMETRY_WATCH)(every, metadata=metrics, timeout=20)
    requests.put(good().SerializeToString())
    assert next(stream)
    assert next(watch)
    kept = guarded.file.read_bytes()
    try:
        new = tokens_file(guarded.file, infer=["infer"])
        time.sleep(1.1)  # the file is checked once a second
        requests.put(good().SerializeToString())
        for call in (stream, watch):
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is UNAUTHENTICATED
        assert status(channel, INFER_STREAM, guarded.tokens["infer"])[0] is UNAUTHENTICATED
        assert status(channel, INFER_STREAM, new["infer"])[0] is grpc.StatusCode.OK
    finally:
        requests.put(None)
        stream.cancel()
        guarded.file.write_bytes(kept)


def test_rate_limit_counts_calls_and_streams(tmp_path):
    tokens = tokens_file(tmp_path / "tokens", a=["infer"], b=["infer"])
    arguments = ["--rate-limit=0.01:3", f"--tokens={tmp_path / 'tokens'}"]
    seen = []
    with running_server([ORACLE_BUNDLE], cache=tmp_path / "cache", arguments=arguments) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        for token in tokens.values():
            with grpc.insecure_channel(url) as channel:  # another port, the same address
                seen += [status(channel, f"/{INFERENCE}/ModelInfer", token)[0] for _ in range(2)]
                answers = channel.stream_stream(INFER_STREAM, None, pb.ModelStreamInferResponse.FromString)(
                    iter([good().SerializeToString()] * 3), metadata=bearer(token), timeout=10
                )
                for answer in answers:
                    full = answer.error_message.startswith("requests of this client: got more than 0.01 per second ")
                    assert full or not answer.error_message
                    if full:
                        assert 90_000 < answer.infer_response.parameters["retry_after_ms"].int64_param <= 100_000
                    seen.append(grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.OK)
        with grpc.insecure_channel(url) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{INFERENCE}/ModelInfer")(
                good().SerializeToString(), metadata=bearer(tokens["a"]), timeout=10
            )
        assert 80_000 < int(dict(caught.value.trailing_metadata())["retry-after-ms"]) <= 100_000
    assert seen.count(grpc.StatusCode.OK) == 6
    assert seen.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 4


def test_clients_without_tokens_have_one_rate_for_each_address_over_http_and_grpc(tmp_path):
    arguments = ["--rate-limit=0.01:3", "--http-port=0"]

    def post(source):
        address = "127.0.0.1", ready.http_port
        with closing(http.client.HTTPConnection(*address, timeout=10, source_address=(source, 0))) as connection:
            connection.request("POST", http_requests.INFER, json.dumps(http_requests.good()))
            return connection.getresponse().status

    with running_server([ORACLE_BUNDLE], cache=tmp_path / "cache", arguments=arguments) as ready:
        with stub_of(ready) as stub:
            stub.ModelInfer(good(), timeout=10)
        statuses = [post(source) for source in ("127.0.0.1",) * 3 + ("127.0.0.2",) * 4]
    assert statuses == [200, 200, 429, 200, 200, 200, 429]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stock_client_with_a_retry_policy_waits_as_long_as_the_server_says(tmp_path, transport):
    policy = {"maxAttempts": 2, "initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1}
    config = {
        "methodConfig": [{"name": [{}], "retryPolicy": {**policy, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]
    }
    options = [("grpc.service_config", json.dumps(config))]
    arguments = ["--rate-limit=1:1", f"--transport={transport}"]
    with (
        running_server([ORACLE_BUNDLE], cache=tmp_path, arguments=arguments) as ready,
        grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}", options=options) as channel,
    ):
        infer = open_stub(channel).ModelInfer
        assert [bool(infer(good(), timeout=10).outputs) for _ in range(2)] == [True, True]


def test_dangerous_requests_are_unimplemented(tmp_path):
    with running_server([ORACLE_BUNDLE], cache=tmp_path) as ready, stub_of(ready) as stub:
        for method, request, message in (
            ("RepositoryModelLoad", LOAD, "--model-control explicit"),
            ("RepositoryModelUnload", UNLOAD, "--model-control explicit"),
            ("SystemSharedMemoryRegister", REGION, "--allow-shared-memory"),
            ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(), "--allow-shared-memory"),
            ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(), "--allow-shared-memory"),
            ("ModelInfer", changed(lambda r: in_region(r.inputs[0], "a", 60)), "inputs: .*--allow-shared-memory"),
            (
                "ModelInfer",
                changed(lambda r: in_region(r.outputs.add(name="value"), "a", 4)),
                "'value': got shared mem",
            ),
            ("LogSettings", log_setting("log_info", bool_param=False), "--allow-log-settings"),
            ("TraceSetting", trace_setting("trace_level", "TIMESTAMPS"), "as the server was started"),
            ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="a"), "no CUDA IPC"),
        ):
            with pytest.raises(grpc.RpcError, match=message) as caught:
                getattr(stub, method)(request, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        # Reading the settings is harmless.
        assert stub.LogSettings(pb.LogSettingsRequest(), timeout=10).settings["log_info"].bool_param
        assert stub.TraceSetting(pb.TraceSettingRequest(), timeout=10).settings["trace_level"].value == ["OFF"]


def test_options_of_the_page_exist():
    page = (Path(edge.__file__).parents[1] / "deploy" / "THREATS.md").read_text()
    options = {option for parameter in serve.params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)", page)) <= options

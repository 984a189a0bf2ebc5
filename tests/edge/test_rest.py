"""The HTTP port: start, limits, tokens, clients that disconnect, drain, and the stock HTTP clients of Triton."""

import http.client
import os
import shutil
import signal
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from edge.bundles.expression import tokenize
from edge.launch import running_server, serving
from edge.pb import telemetry_pb2
from tests.support.http_requests import INFER, ask, busy, good
from tests.support.metrics import wait_until
from tests.support.models import ORACLE, ORACLE_BUNDLE, VERSIONED
from tests.support.sample_requests import TEXTS, TRUTH, column, triton_input
from tests.support.secured_servers import Authority, tokens_file
from tests.support.server_models import busy as busy_message
from tests.support.server_models import failures

BUSY = "/v2/models/busy/infer"
GOOD = good()
LIMIT = 2000


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    return {"file": str(path), **tokens_file(path, asker=["infer"], keeper=["control"])}


@pytest.fixture(scope="module")
def strict(bundles, tokens, tmp_path_factory):
    """A server with low limits and tokens."""
    only = [bundle for bundle in bundles if bundle.name in ("oracle", "busy-1")]
    arguments = ["--instances=1", "--max-queue-size=1", "--http-port=0"]
    arguments += [f"--max-message-bytes={LIMIT}", f"--tokens={tokens['file']}"]
    with running_server(only, cache=tmp_path_factory.mktemp("cache"), arguments=arguments) as ready:
        yield f"127.0.0.1:{ready.http_port}"


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def head(length, *headers, path=INFER):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *headers, "", ""]).encode()


def connect(url):
    host, _, port = url.partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def refuses(url):
    with suppress(ConnectionError), connect(url):
        return False
    return True


def send(url, *parts):
    with connect(url) as connection:
        for part in parts:
            connection.sendall(part)
        with closing(http.client.HTTPResponse(connection)) as response:
            response.begin()
            return response.status, response.read()


def test_too_large_body_is_refused_unread(strict, tokens):
    own = f"Authorization: Bearer {tokens['asker']}"
    # Not a byte of it is sent.
    for length in (LIMIT + 1, 10**12, 10**19):
        status, body = send(strict, head(length, own))
        assert status == 413
        assert f"at most {LIMIT} bytes. Send it in smaller parts, or raise --max-message-bytes.".encode() in body
    for length in ("9" * 5000, "-1", "1e3", "1, 2"):
        assert send(strict, head(length, own))[0] == 400
    assert ask(strict, INFER, GOOD, headers=bearer(tokens["asker"])).status == 200


def test_body_of_unknown_length_is_read_up_to_the_limit(strict, tokens):
    start = head(0, "Transfer-Encoding: chunked", f"Authorization: Bearer {tokens['asker']}")
    start = start.replace(b"Content-Length: 0\r\n", b"")
    chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
    status, body = send(strict, start, chunk, chunk)  # and no end
    assert (status, b"got more" in body) == (413, True)


def test_connection_stays_usable_after_a_refusal_but_not_before_the_body_is_read(strict, tokens):
    with closing(http.client.HTTPConnection(strict, timeout=10)) as connection:
        for body, status in ((b" " * (LIMIT + 1), 413), (b"{", 400), (None, 405)):
            connection.request("POST" if body else "GET", INFER, body, bearer(tokens["asker"]))
            response = connection.getresponse()
            assert (response.status, b"expected" in response.read()) == (status, True)
            assert (connection.sock is None) == (status == 413)
        port = connection.sock.getsockname()[1]
        times = []
        for _ in range(60):
            begun = time.perf_counter()
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read() == b'{"live":true}'
            times.append(time.perf_counter() - begun)
        assert connection.sock.getsockname()[1] == port
    assert min(times[-10:]) < 0.03  # TCP would wait 0.04 s for acknowledgements


def test_tokens(strict, tokens):
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert ask(strict, path).status == 200  # orchestrators have none
    nobody = ask(strict, INFER, GOOD)
    assert (nobody.status, nobody.headers["www-authenticate"]) == (401, "Bearer")
    assert "fewheads token" in nobody.error
    wrong = ask(strict, INFER, b"{", headers=bearer("fewheads_wrong"))
    assert (wrong.status, "fewheads_wrong" in wrong.error) == (401, False)
    assert ask(strict, INFER, GOOD, headers=bearer(tokens["asker"])).json["outputs"][0]["data"] == [9.0]
    unload = f"/v2/repository/models/{ORACLE}/unload"
    rows = ((INFER, "keeper", 403), (unload, "asker", 403), (unload, "keeper", 501), ("/v2/logging", "asker", 403))
    for path, token, status in rows:
        assert ask(strict, path, {}, headers=bearer(tokens[token])).status == status, path


@pytest.mark.parametrize("place", ["running", "queued"])
def test_disconnecting_cancels_the_request(http_url, stub, telemetry, take, place):
    def dropped():
        models = telemetry.Get(telemetry_pb2.GetRequest()).models
        drops = next(model.drops for model in models if model.name == "busy")
        return sum(drop.count for drop in drops if (drop.reason, drop.place) == ("Cancelled", place))

    before, failed = dropped(), failures(stub)
    ahead = stub.ModelInfer.future(busy_message(take(0.8))) if place == "queued" else None
    time.sleep(0.1)
    body = b'{"inputs":[{"name":"steps","datatype":"INT64","shape":[1],"data":[%d]}]}' % take(0.8)
    with connect(http_url) as connection:
        connection.sendall(head(len(body), path=BUSY) + body)
        time.sleep(0.2)
        assert failures(stub) == failed
    assert wait_until(lambda: dropped() == before + 1, 0.5)
    assert (failures(stub), telemetry.Get(telemetry_pb2.GetRequest()).queue_depth) == (failed + 1, 0)
    if ahead:
        assert ahead.result().raw_output_contents
    assert ask(http_url, BUSY, busy(3)).json["outputs"][0]["data"] == [3]


def test_disconnecting_within_the_body_counts_nothing(http_url, stub):
    before = failures(stub)
    with connect(http_url) as connection:
        connection.sendall(head(1000, path=BUSY) + b"{")
    assert (ask(http_url, BUSY, busy(3)).status, failures(stub)) == (200, before)


def test_signal_drains(bundles, tmp_path, take):
    only = [bundle for bundle in bundles if bundle.name == "busy-1"]
    with running_server(only, cache=tmp_path, arguments=["--http-port=0"]) as ready, ThreadPoolExecutor(1) as pool:
        url = f"127.0.0.1:{ready.http_port}"
        with closing(http.client.HTTPConnection(url, timeout=10)) as idle:
            idle.request("GET", "/v2/health/ready")
            assert idle.getresponse().read() == b'{"ready":true}'
            flying = pool.submit(ask, url, BUSY, busy(steps := take(1.0)), timeout=60)
            time.sleep(0.3)
            assert not flying.done()
            os.kill(ready.process_id, signal.SIGTERM)
            assert wait_until(lambda: refuses(url))
            assert idle.sock.recv(1) == b""
            assert not flying.done()
            heard = flying.result()
        assert (heard.status, heard.json["outputs"][0]["data"]) == (200, [steps])
    # running_server fails unless the exit code is 0.


def test_drain_ends_in_time(tmp_path):
    with running_server([ORACLE_BUNDLE], cache=tmp_path, arguments=["--http-port=0", "--drain-seconds=0.2"]) as ready:
        slow = connect(f"127.0.0.1:{ready.http_port}")
        slow.sendall(head(1000))
        time.sleep(0.1)
        begun = time.monotonic()
    assert time.monotonic() - begun < 3
    slow.close()


def test_tls(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("first")
    arguments = ["--http-port=0", f"--tls-certificate={certificate}", f"--tls-key={key}"]
    with running_server([ORACLE_BUNDLE], cache=tmp_path, arguments=arguments) as ready:
        context = ssl.create_default_context(cafile=str(authority.file))

        def shown():
            with closing(http.client.HTTPSConnection("127.0.0.1", ready.http_port, timeout=10, context=context)) as tls:
                tls.request("GET", "/v2/health/live")
                assert tls.getresponse().read() == b'{"live":true}'
                return dict(pair for part in tls.sock.getpeercert()["subject"] for pair in part)["commonName"]

        assert shown() == "first"
        for old, new in zip((key, certificate), reversed(authority.issue("second")), strict=True):
            new.replace(old)
        assert wait_until(lambda: shown() == "second")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(f"127.0.0.1:{ready.http_port}", "/v2/health/live")


@pytest.fixture
def client(http_url):
    with triton.InferenceServerClient(http_url) as client:
        yield client


def text_input(**how):
    return triton_input("expression", column(*TEXTS), triton, **how)


def token_input(**how):
    return triton_input("x", tokenize(TEXTS), triton, **how)


def test_server_and_models(client):
    assert client.is_server_live()
    assert not client.is_server_ready()  # one bundle of the repository is broken, and readiness is strict
    assert client.get_server_metadata()["name"] == "fewheads"
    models = ((ORACLE,), (ORACLE, "1"), (ORACLE, "2"), ("broken",))
    assert [client.is_model_ready(*model) for model in models] == [True, True, False, False]
    index = {(model["name"], model["version"]): model for model in client.get_model_repository_index()}
    assert index[ORACLE, "1"]["state"] == "READY"
    assert "model.onnx" in index["broken", ""]["reason"]


@pytest.mark.parametrize("call", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_descriptions_equal_those_of_grpc(client, url, call):
    with triton_grpc.InferenceServerClient(url) as other:
        over_grpc = getattr(other, call)(VERSIONED, "3", as_json=True)
    over_http = getattr(client, call)(VERSIONED, "3")
    assert over_grpc
    # gRPC's client writes whole numbers of 64 bits as strings, and leaves out what is empty.
    assert _plain(over_http) == _plain(over_grpc.get("config", over_grpc))


def _plain(value):
    if isinstance(value, dict):
        return {name: kept for name, kept in ((name, _plain(item)) for name, item in value.items()) if kept}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return "" if str(value) in ("0", "False") else str(value)


@pytest.mark.parametrize("tensor", [text_input, token_input])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client, tensor, binary_in, binary_out):
    wanted = [triton.InferRequestedOutput("value", binary_data=binary_out)]
    result = client.infer(ORACLE, [tensor(binary_data=binary_in)], request_id="abc", outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("value"), TRUTH)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("abc", ORACLE, "1")
    assert ("data" in response["outputs"][0]) is not binary_out


def test_versions_and_parameters(client):
    assert client.infer(VERSIONED, [token_input()]).get_response()["model_version"] == "3"
    timed = client.infer(VERSIONED, [token_input()], model_version="1", parameters={"timings": True}, priority=1)
    assert timed.get_response()["model_version"] == "1"
    assert timed.get_response()["parameters"]["request_ns"] > 0


def test_settings(client):
    assert client.get_log_settings()["log_info"] is True
    for wanted in (False, True):
        assert client.update_log_settings({"log_info": wanted, "log_format": "default"})["log_info"] is wanted
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings(model_name=ORACLE, settings={"trace_level": None})["trace_rate"] == "1000"


def test_shared_memory(tmp_path):
    arguments = ["--allow-shared-memory", "--http-port=0"]
    tokens, key = tokenize(TEXTS), f"/fewheads-rest-{tmp_path.name}"
    size = tokens.nbytes
    region = shared_memory.create_shared_memory_region("both", key, size + TRUTH.nbytes)
    try:
        with (
            running_server([ORACLE_BUNDLE], cache=tmp_path, arguments=arguments) as ready,
            triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as client,
        ):
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("both", key, size + TRUTH.nbytes)
            (status,) = client.get_system_shared_memory_status("both")
            assert (status["name"], status["offset"], status["byte_size"]) == ("both", 0, size + TRUTH.nbytes)
            assert client.get_system_shared_memory_status() == [status]
            with pytest.raises(InferenceServerException, match="'both'") as caught:
                client.register_system_shared_memory("both", key, 1)
            assert caught.value.status() == "409"
            shared_memory.set_shared_memory_region(region, [tokens])
            tensor = triton.InferInput("x", list(tokens.shape), "FP32")
            tensor.set_shared_memory("both", size)
            output = triton.InferRequestedOutput("value")
            output.set_shared_memory("both", TRUTH.nbytes, offset=size)
            response = client.infer(ORACLE, [tensor], outputs=[output]).get_response()
            assert response["outputs"] == [{"name": "value", "datatype": "FP32", "shape": list(TRUTH.shape)}]
            there = shared_memory.get_contents_as_numpy(region, np.float32, TRUTH.shape, size)
            np.testing.assert_array_equal(there, TRUTH)
            client.unregister_system_shared_memory("both")
            assert client.get_system_shared_memory_status() == []
    finally:
        shared_memory.destroy_shared_memory_region(region)


def test_load_and_unload(tmp_path):
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "repository" / "oracle")
    arguments = ["--model-control=explicit", "--http-port=0"]
    with (
        serving(tmp_path / "repository", cache=tmp_path, arguments=arguments) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.http_port}") as client,
    ):
        assert not client.is_model_ready(ORACLE)
        assert [model["state"] for model in client.get_model_repository_index()] == ["UNAVAILABLE"]
        client.load_model(ORACLE)
        np.testing.assert_array_equal(client.infer(ORACLE, [token_input()]).as_numpy("value"), TRUTH)
        with pytest.raises(InferenceServerException, match="load parameter"):
            client.load_model(ORACLE, config="{}")
        client.unload_model(ORACLE, unload_dependents=True)
        assert not client.is_model_ready(ORACLE)

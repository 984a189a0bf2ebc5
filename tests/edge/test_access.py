"""Who may call what, asked of a server: every RPC with no token, a wrong one, too little scope, and enough."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from edge.launch import running_server
from edge.pb import inference_pb2 as pb
from edge.pb import telemetry_pb2
from edge.protocol import INFERENCE
from edge.security.scopes import INFER_STREAM, OPEN, RPC_SCOPES, SCOPES
from edge.server import Ready
from edge.settings import TRANSPORTS
from tests.support.models import ORACLE_BUNDLE
from tests.support.rpcs import HEALTH_NAME, REQUESTS, methods
from tests.support.sample_requests import good
from tests.support.secured_servers import bearer, tokens_file


class Guarded(NamedTuple):
    """A server that asks for tokens."""

    ready: Ready
    file: Path
    tokens: dict[str, str]


@pytest.fixture(scope="module", params=TRANSPORTS)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if request.param == "nghttp2":
        pytest.importorskip("ngh2")
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens = tokens_file(file, **{scope: [scope] for scope in SCOPES})
    arguments = [f"--tokens={file}", "--model-control=explicit", "--load-model=*"]
    arguments += ["--allow-shared-memory", "--allow-log-settings", f"--transport={request.param}"]
    with running_server([ORACLE_BUNDLE], cache=file.parent / "cache", arguments=arguments) as ready:
        yield Guarded(ready, file, tokens)


@pytest.fixture
def channel(guarded: Guarded) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{guarded.ready.grpc_port}") as channel:
        yield channel


def status(channel: grpc.Channel, rpc: str, token: str | None) -> tuple[grpc.StatusCode, str]:
    """How an RPC ends; one that goes on is left after its first answer, or half a second without one."""
    request = REQUESTS.get(rpc.rpartition("/")[2])
    if rpc.startswith("/grpc.health"):
        request = HEALTH_NAME
    call = channel.stream_stream(rpc)(
        iter([request.SerializeToString() if request else b""]),
        metadata=None if token is None else bearer(token),
        timeout=10,
    )
    try:
        for _ in call:
            call.cancel()
            return grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_every_rpc_has_a_scope_and_nothing_else_has() -> None:
    where = "RPC_SCOPES in edge/security/scopes.py, one of _INFER, _CONTROL, _METRICS and _ANY for each"
    missing, gone = sorted(set(methods()) - set(RPC_SCOPES)), sorted(set(RPC_SCOPES) - set(methods()))
    assert not missing, f"nobody with a token may call {missing}: add them to {where}"
    assert not gone, f"no service has {gone}: remove them from {where}"
    assert all(scopes <= set(SCOPES) for scopes in RPC_SCOPES.values())
    assert {rpc for rpc, scopes in RPC_SCOPES.items() if scopes == OPEN} == {
        f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")
    }


@pytest.mark.parametrize("rpc", methods())
def test_every_rpc(guarded: Guarded, channel: grpc.Channel, rpc: str) -> None:
    scopes = RPC_SCOPES[rpc]
    refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    for token in (None, "", "fewheads_wrong", guarded.tokens["infer"] + "x"):
        code, details = status(channel, rpc, token)
        if scopes == OPEN:
            assert code not in refused
        else:
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert details.startswith("authorization: got ")
            assert details.endswith("`fewheads token` makes tokens.")
            assert not token or token not in details
    for scope, token in guarded.tokens.items():
        code, details = status(channel, rpc, token)
        if scopes == OPEN or scope in scopes:
            assert code not in refused, details
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert details.startswith(f"{rpc.rpartition('/')[2]}: got token '{scope}' for {scope}, expected one for ")


def test_a_refused_call_is_not_read(channel: grpc.Channel) -> None:
    """Forty megabytes, of which HTTP/2 takes no more than its window."""
    sent = []

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            sent.append(1)
            yield bytes(2**20)

    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(INFER_STREAM)(parts(), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(sent) < 40


def test_the_stock_client(guarded: Guarded) -> None:
    headers = {"authorization": f"Bearer {guarded.tokens['infer']}"}
    with triton.InferenceServerClient(f"127.0.0.1:{guarded.ready.grpc_port}") as client:
        assert client.is_server_live(headers=headers)
        tensor = triton.InferInput("expression", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"1 + 2"]], dtype=np.object_))
        result = client.infer("calculator-oracle", [tensor], headers=headers)
        assert result.as_numpy("value")[0, 0] == 3
        assert client.get_inference_statistics("calculator-oracle", headers=headers).model_stats
        answers: SimpleQueue[Any] = SimpleQueue()
        client.start_stream(lambda result, error: answers.put(error or result.as_numpy("value")[0, 0]), headers=headers)
        client.async_stream_infer("calculator-oracle", [tensor])
        assert answers.get(timeout=10) == 3
        client.stop_stream()


def page(guarded: Guarded, path: str, token: str | None, method: str = "GET") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    address = f"http://127.0.0.1:{guarded.ready.metrics_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers, method=method), timeout=10) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_page_itself_is_open_and_asks_for_the_token(guarded: Guarded) -> None:
    code, text = page(guarded, "/", None)
    assert code == 200
    assert "/telemetry.json" in text
    assert "calculator-oracle" not in text


@pytest.mark.parametrize("path", ["/metrics", "/telemetry.json", "/none"])
def test_pages(guarded: Guarded, path: str) -> None:
    for token in (None, "", "fewheads_wrong"):
        code, text = page(guarded, path, token)
        assert code == 401
        assert text.startswith("authorization: got ")
    for scope in ("infer", "control"):
        code, text = page(guarded, path, guarded.tokens[scope])
        assert code == 403
        assert text.startswith(f"Get: got token '{scope}'")
    assert page(guarded, path, guarded.tokens["infer"], "HEAD") == (403, "")
    assert page(guarded, path, guarded.tokens["metrics"])[0] == (404 if path == "/none" else 200)


def test_a_token_that_is_taken_away(guarded: Guarded, channel: grpc.Channel) -> None:
    """New calls fail, and so does the next request of a stream and the next reading of a watch."""
    old = bearer(guarded.tokens["infer"])
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    stream = channel.stream_stream(INFER_STREAM)(iter(requests.get, None), metadata=old, timeout=20)
    watch = channel.unary_stream("/fewheads.telemetry.v1.Telemetry/Watch")(
        telemetry_pb2.WatchRequest(interval_ms=100).SerializeToString(),
        metadata=bearer(guarded.tokens["metrics"]),
        timeout=20,
    )
    requests.put(good().SerializeToString())
    assert next(stream)
    assert next(watch)
    kept = guarded.file.read_bytes()
    try:
        new = tokens_file(guarded.file, infer=["infer"])
        time.sleep(1.1)  # for so long a look at the file holds
        requests.put(good().SerializeToString())
        for call in (stream, watch):
            with pytest.raises(grpc.RpcError) as caught:
                for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert status(channel, INFER_STREAM, guarded.tokens["infer"])[0] is grpc.StatusCode.UNAUTHENTICATED
        assert status(channel, INFER_STREAM, new["infer"])[0] is grpc.StatusCode.OK
    finally:
        requests.put(None)
        with suppress(grpc.RpcError):
            stream.cancel()
        guarded.file.write_bytes(kept)


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [(["--rate-limit=0.01:3"], 3), (["--rate-limit=0.01:3", "--tokens"], 6)],
)
def test_requests_beyond_the_rate(tmp_path: Path, arguments: list[str], calls: int) -> None:
    """Single ones and those of streams count alike: of an address, or of each token."""
    tokens = tokens_file(tmp_path / "tokens", a=["infer"], b=["infer"])
    if arguments[-1] == "--tokens":
        arguments = [*arguments, str(tmp_path / "tokens")]
    seen = []
    with running_server([ORACLE_BUNDLE], cache=tmp_path / "cache", arguments=arguments) as ready:
        for token in tokens.values():
            with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:  # another port, the same address
                seen += [status(channel, f"/{INFERENCE}/ModelInfer", token)[0] for _ in range(2)]
                answers = channel.stream_stream(INFER_STREAM, None, pb.ModelStreamInferResponse.FromString)(
                    iter([good().SerializeToString()] * 3), metadata=bearer(token), timeout=10
                )
                for answer in answers:
                    full = answer.error_message.startswith("requests of this client: got more than 0.01 per second ")
                    assert full or not answer.error_message
                    assert full == ("retry_after_ms" in answer.infer_response.parameters)
                    seen.append(grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.OK)
        with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{INFERENCE}/ModelInfer")(
                good().SerializeToString(), metadata=bearer(tokens["a"]), timeout=10
            )
        trailer = dict(caught.value.trailing_metadata())
        assert 0 < int(trailer["retry-after-ms"]) <= 100_000
    assert seen.count(grpc.StatusCode.OK) == calls
    assert seen.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 10 - calls

"""The HTTP server: limits on heads, bodies, answers and connections, each with a client that exceeds it."""

import asyncio
import gc
import re
import time
import weakref
from contextlib import ExitStack, suppress
from contextvars import ContextVar

import pytest

from edge.connections import quota
from edge.connections.quota import Quota, Refusal
from edge.errors import PermissionDenied, RequestError
from edge.http import server as http_server_module
from edge.http.exchange import Exchange
from edge.http.messages import accepted
from edge.launch import running_server
from edge.security.access import Hosts
from tests.support.http_requests import ask
from tests.support.http_server import everything, http_server
from tests.support.metrics import wait_until
from tests.support.models import ORACLE_BUNDLE
from tests.support.secured_servers import Authority

try:
    import uvloop
except ModuleNotFoundError:
    uvloop = None

#: What a request set, if a later one can see it.
SEEN = ContextVar("seen", default="")
MIB = 1024**2


async def application(scope, receive, send):
    """``/refuse`` refuses, ``/body`` answers with the size of the body, and ``/large/N`` with N bytes."""
    path, size, status, answer = scope["path"], 0, 200, SEEN.get().encode()
    SEEN.set(path)
    if path == "/refuse":
        status = 401
    else:
        accepted(scope)
    if path == "/body":
        try:
            while True:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    break
            answer = b"%d" % size
        except RequestError as error:
            status, answer = 400, f"{type(error).__name__} {error}".encode()
    elif path.startswith("/large/"):
        answer = bytes(int(path.rpartition("/")[2]))
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def server():
    with http_server(application) as running:
        yield running


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(quota, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(quota, "_READING_SECONDS", 0.3)
    monkeypatch.setattr(quota, "_SWEEP_SECONDS", 0.05)


def request(path, *headers, method="GET", body=b""):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode() + body


def post(path, body, *headers):
    return request(path, f"Content-Length: {len(body)}", *headers, method="POST", body=body)


LAST = request("/", "Connection: close")
CHUNKED = request("/body", "Transfer-Encoding: chunked", "Connection: close", method="POST")


@pytest.mark.parametrize("piece_bytes", [10**6, 1000])
@pytest.mark.parametrize("head", [request("/", f"X: {'x' * 40_000}"), request("/", *["X: y"] * 200)], ids=len)
def test_head_is_limited_in_size_and_number_however_it_arrives(tmp_path, head, piece_bytes):
    with http_server(application, authority=Authority(tmp_path)) as server, server.connect() as connection:
        for at in range(0, len(head), piece_bytes):
            connection.sendall(head[at : at + piece_bytes])
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")
        assert server.reasons == {"head"}


def test_largest_head_is_taken(server):
    many = request("/", *["X: y"] * 120, "Connection: close")
    for head in (many, request("/", f"X: {'x' * 32_000}", "Connection: close")):
        assert server.send(head).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\nX: ", post("/body", b"")[:-5] + b"9999\r\n\r\n"], ids=["head", "body"]
)
def test_client_that_drips_is_disconnected(server, start):
    with server.connect() as connection:
        connection.sendall(start)
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x")
                time.sleep(0.02)
            pytest.fail("the server waits")
    assert server.reasons <= {"head", "body"}
    assert len(server.reasons) == 1


@pytest.mark.usefixtures("_impatient")
def test_client_that_sends_much_may_take_longer(server):
    body = bytes(40 * 1024)  # for each 16 KiB a second
    with server.connect() as connection:
        connection.sendall(post("/body", body, "Connection: close")[: -len(body)])
        for at in range(0, len(body), 4096):
            connection.sendall(body[at : at + 4096])
            time.sleep(0.1)
        assert everything(connection).endswith(b"\r\n\r\n%d" % len(body))


@pytest.mark.usefixtures("_impatient")
def test_client_that_does_not_read_is_disconnected_and_its_answer_counts(server):
    with server.connect() as connection:
        quota._READING_SECONDS = -2000.0  # 30 MB are worth half an hour
        connection.sendall(request(f"/large/{30 * MIB}"))
        assert wait_until(lambda: server.reasons == {"answer"})
    assert server.quota.held_bytes == 0


LOOPS = [asyncio.new_event_loop, *([uvloop.new_event_loop] if uvloop else [])]


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("new_event_loop", LOOPS, ids=lambda new: new.__module__)
def test_answer_counts_until_it_is_read(tmp_path, secured, new_event_loop):
    authority = Authority(tmp_path) if secured else None
    with (
        http_server(application, authority=authority, new_event_loop=new_event_loop) as server,
        server.connect() as connection,
    ):
        connection.sendall(request(f"/large/{30 * MIB}"))
        assert wait_until(lambda: server.quota.held_bytes == 30 * MIB)
        connection.sendall(LAST)
        assert len(everything(connection)) > 30 * MIB
        assert wait_until(lambda: server.quota.held_bytes == 0)
        assert not server.quota.refusals


def test_body_and_answer_that_have_no_room_are_refused():
    with http_server(application, quota=Quota(3 * MIB, 2 * MIB)) as server:
        answer = server.send(request("/body", f"Content-Length: {9 * MIB}", method="POST") + bytes(3 * MIB))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"Overloaded memory for this request: got 9437184 bytes, expected no more than there is room" in answer
        with suppress(ConnectionError):  # before or after the answer
            server.send(CHUNKED + b"900000\r\n" + bytes(3 * MIB))
        answer = server.send(request(f"/large/{9 * MIB}", "Connection: close"))
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in answer.lower()
        assert server.reasons == {"memory"}
        assert server.send(post("/body", bytes(MIB), "Connection: close")).endswith(b"\r\n%d" % MIB)
        assert server.quota.held_bytes == 0


def test_refused_body_is_not_parsed_and_its_client_reads_the_answer(server):
    chunks = b"1\r\na\r\n" * 500_000  # parsing them takes seconds
    with server.connect() as connection:
        connection.sendall(CHUNKED.replace(b"/body", b"/refuse") + chunks)
        began = time.process_time()
        answer = everything(connection)
        assert time.process_time() - began < 0.5
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()


def test_small_chunks_are_limited(server):
    answer = server.send(CHUNKED + b"1\r\na\r\n" * 2000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert re.search(rb"InvalidRequest chunks of the body: got 10.. in 10.. bytes, expected 256 bytes or more", answer)
    assert server.reasons == {"chunks"}
    for chunk, count in ((b"3e8\r\n" + bytes(1000), 3000), (b"1\r\na", 1000)):
        answer = server.send(CHUNKED + (chunk + b"\r\n") * count + b"0\r\n\r\n")
        assert answer.endswith(b"\r\n%d" % (count * len(chunk.partition(b"\n")[2])))


@pytest.mark.parametrize("wrong", [b"zz\r\n", b"1\r\nabc\r\n", b"1;" + b"x" * 9000, b"0\r\n" + b"X: y\r\n" * 3000])
def test_malformed_chunks_are_refused(server, wrong):
    answer = server.send(CHUNKED, b"1\r\na\r\n" + wrong)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"InvalidRequest request: got other bytes, expected HTTP/1.1" in answer


def test_malformed_request_is_refused_after_those_before_it(server):
    hidden = request("/large/5")
    smuggled = [  # a request inside the body of another one, whose length is said twice
        request("/body", *lengths, f"Content-Length: {len(hidden)}", method="POST", body=hidden)
        for lengths in (("Content-Length: 0",), ("Transfer-Encoding: chunked",), ("Transfer-Encoding: x, identity",))
    ]
    wrong = (b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", post("/", b"")[:-5] + b"+1\r\n\r\n")
    for each in (*wrong, *smuggled):
        answer = server.send(request("/large/3") + each)
        assert re.findall(rb"HTTP/1.1 (\d+) ", answer) in ([b"200", b"400"], [b"200", b"501"])
    assert server.send(LAST).startswith(b"HTTP/1.1 200 ")


def test_requests_share_a_connection_one_after_another_and_nothing_else(server):
    answer = server.send(request("/large/1") * 3 + post("/body", bytes(100_000)) + request("/", method="HEAD") + LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 6
    assert answer.endswith(b"\r\n\r\n")  # the last one has not seen the path of the one before it
    assert server.send(request("/").replace(b"1.1", b"1.0")).startswith(b"HTTP/1.1 200 OK")


def test_client_that_waits_for_permission_gets_it(server):
    for path, expected in (("/body", b"HTTP/1.1 100 Continue\r\n\r\n"), ("/refuse", b"HTTP/1.1 401 Unauthorized\r\n")):
        with server.connect() as connection:
            connection.sendall(request(path, "Content-Length: 1", "Expect: 100-continue", method="POST"))
            assert connection.recv(1000).startswith(expected)


def test_client_that_leaves_frees_its_request_at_once(server):
    created = []
    init = Exchange.__init__

    def spy(self, *rest):
        created.append(weakref.ref(self))
        init(self, *rest)

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Exchange, "__init__", spy)
            for start in (post("/body", bytes(MIB))[:-1], request(f"/large/{30 * MIB}"), CHUNKED + b"100\r\n"):
                with server.connect() as connection:
                    connection.sendall(start)
                    assert wait_until(lambda: bool(created))
                assert wait_until(lambda: not server.quota.connections_of_ports())
                assert wait_until(lambda: created[-1]() is None)
                created.clear()
    finally:
        gc.enable()
    assert server.quota.held_bytes == 0


def test_client_that_leaves_is_noticed_after_any_body():
    """Also after one of which a part waited for the application, so that the server read nothing more."""
    left = []

    async def slow(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        left.append(await receive())

    with http_server(slow) as server:
        with server.connect() as connection:
            connection.sendall(post("/", bytes(100_000)))
            time.sleep(0.2)
        assert wait_until(lambda: bool(left))


def test_answer_that_is_too_short_ends_the_connection():
    async def short(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"x"})

    with http_server(short) as server:
        with suppress(ConnectionError):
            assert server.send(request("/")) == b""
        assert wait_until(lambda: not server.quota.connections_of_ports())


def idle(server, count, stack, first):
    made = []
    for _ in range(count):
        made.append(stack.enter_context(server.connect()))
        made[-1].sendall(first)
        if first:
            assert made[-1].recv(1000)
    return made


def test_connection_without_a_request_closes(server, monkeypatch):
    monkeypatch.setattr(quota, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(http_server_module, "_KEEP_ALIVE_SECONDS", 0.2)
    assert server.send(request("/")).startswith(b"HTTP/1.1 200 ")
    assert not server.reasons


@pytest.mark.parametrize("first", [b"", request("/")], ids=["new", "kept alive"])
def test_idle_connections_make_room_the_oldest_first(first):
    with http_server(application, max_connections=4) as server, ExitStack() as stack:
        opened = idle(server, 4, stack, first)
        assert wait_until(lambda: server.quota.connections_of_ports().total() == 4)
        assert server.send(LAST).startswith(b"HTTP/1.1 200 ")
        assert opened[0].recv(100) == b""
        opened[1].sendall(LAST)
        assert opened[1].recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.quota.refusals == {Refusal("metrics", "connections"): 1}


ADDRESSES = ["127.0.0.1:8002", "[::1]:80", "::1", "localhost", "LOCALHOST.:1"]
NAMES = ["jetson", "jetson.local:1", "a.internal", "api.example.com"]


@pytest.mark.parametrize("host", [*ADDRESSES, *NAMES, None])
def test_local_and_named_hosts_are_answered(host):
    Hosts(["API.example.com"]).check(host)


@pytest.mark.parametrize("host", ["evil.example:8002", "127.0.0.1.evil.example", "evillocal.example.", "local.com"])
def test_host_that_anyone_may_register_is_refused(host):
    with pytest.raises(PermissionDenied, match=r"^Host: got '.*', expected an address, a local name, or one that "):
        Hosts(["api.example.com"]).check(host)


def test_web_page_whose_name_leads_to_the_server_is_refused():
    with running_server([ORACLE_BUNDLE], arguments=["--http-port=0", "--allow-host=api.example.com"]) as ready:
        for port, path in ((ready.http_port, "/v2"), (ready.metrics_port, "/metrics"), (ready.metrics_port, "/")):
            for host, status in (("evil.example", 403), ("api.example.com", 200), ("localhost", 200)):
                answer = ask(f"127.0.0.1:{port}", path, headers={"Host": host})
                assert (answer.status, b"--allow-host" in answer.body) == (status, status == 403)

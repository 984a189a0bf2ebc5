"""Bearer tokens: their file, authorization by it, its changes and the command; the rate limit of each client."""

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from edge.errors import Overloaded, PermissionDenied, Unauthenticated, UsageError
from edge.protocol import INFERENCE
from edge.security.access import TELEMETRY_GET, Access
from edge.security.rate import MAX_BUCKETS, Rate, RateLimit, client_of, parse_rate
from edge.security.tokens import MAX_TOKENS, Token, find_token, new_token, read_token, read_tokens
from edge.security.watched import read_limited
from tests.support.commands import mistake, ran, shown
from tests.support.secured_servers import tokens_file

INFER, LIVE = f"/{INFERENCE}/ModelInfer", f"/{INFERENCE}/ServerLive"
SHAPE = 'expected {"name": "…", "scopes": ["…"], "sha256": "…"}. Make one with `fewheads token NAME --scope SCOPE`.'


def digest(number):
    return hashlib.sha256(b"%d" % number).hexdigest()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens"


def written(file, *lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    file.write_text(text, errors="surrogateescape")
    file.chmod(0o600)
    return file


def entry(**changed):
    return {"name": "camera", "scopes": ["infer"], "sha256": digest(0), **changed}


def test_file_holds_only_the_hash_of_a_new_token(file):
    secret, line = new_token("camera", ["infer", "metrics", "infer"])
    assert line == Token("camera", ("infer", "metrics"), hashlib.sha256(secret.encode()).hexdigest())
    assert secret.startswith("fewheads_")
    assert len(secret) == len("fewheads_") + 43  # 32 random bytes
    assert new_token("camera", ["infer"])[0] != secret
    others = [entry(name="n" * 64 if number == 1 else f"{number}._-", sha256=digest(number)) for number in range(255)]
    written(file, " # the cameras", "", msgspec.to_builtins(line), *others)
    assert len(read_tokens(file)) == MAX_TOKENS == 256
    assert secret not in file.read_text()
    assert find_token(read_tokens(file), secret) == line
    assert find_token(read_tokens(file), secret[:-1]) is None
    assert find_token(read_tokens(file), line.sha256) is None


def test_invalid_file_is_rejected_without_quoting_it(file):
    for lines, message in (
        ((), ": got 0 tokens, expected 1 to 256. Make one with `fewheads token NAME --scope SCOPE`."),
        ([entry(name=f"n{i}", sha256=digest(i)) for i in range(257)], ": got 257 tokens, expected 1 to 256."),
        (("x" * 300_000,), ": got something else, expected a regular file of at most 262144 bytes. Give the path"),
        (("# comment", "", "fewheads_secret"), f" line 3: got something else, {SHAPE}"),
        (('{"name": "\udcff"}',), f" line 1: got something else, {SHAPE}"),
        ((entry(token="fewheads_secret"),), f" line 1: got something else, {SHAPE}"),
        ((entry(sha256="fewheads_secret"),), " sha256: got 15 characters of another form, expected the token's"),
        ((entry(sha256=digest(0).upper()),), " sha256: got 64 characters of another form, expected the token's"),
        ((entry(name="fewheads_secret" * 9),), " name: got a token, expected 1 to 64 letters, digits and . _ -, the"),
        ((entry(name="n" * 65),), f" name: got '{'n' * 65}', expected 1 to 64"),
        ((entry(scopes=[]),), " scopes: got none, expected some of infer, control, metrics. List the scopes"),
        ((entry(scopes=["infer", "fewheads_secret"]),), " scopes: got 1 unknown, expected some of infer, control"),
        ((entry(), entry(sha256=digest(1))), " line 2: got the name or the token of an earlier line"),
        ((entry(), entry(name="other")), " line 2: got the name or the token of an earlier line"),
    ):
        with pytest.raises(UsageError) as caught:
            read_tokens(written(file, *lines))
        assert str(caught.value).startswith(f"--tokens {file}")
        assert message in str(caught.value)
        assert "secret" not in str(caught.value)


def test_file_must_belong_to_the_server_alone(file, tmp_path):
    for mode in (0o620, 0o602):
        written(file, entry()).chmod(mode)
        with pytest.raises(UsageError, match=f"got mode {mode:o}: others may add tokens of their own"):
            read_tokens(file)
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(written(file, entry()), 4321, -1)
        with pytest.raises(UsageError, match="got a file of user 4321, expected a file of user 0 or root"):
            read_tokens(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, given in (("", "Is a directory"), ("none", "No such file or directory"), ("pipe", "something else")):
        with pytest.raises(UsageError, match=f"got {given}, expected a re"):
            read_tokens(tmp_path / name)


def test_scopes_decide_which_rpcs_a_token_may_call(file):
    secrets = tokens_file(file, camera=["infer"], grafana=["metrics", "infer"], all=["infer", "control", "metrics"])
    access = Access(file)
    for header in ("Bearer {}", "bearer  {} "):
        assert access.authorize(header.format(secrets["camera"]), INFER) == "camera"
    for header in (None, "Bearer unknown"):
        assert access.authorize(header, "/grpc.health.v1.Health/Check") == ""
    assert access.authorize(f"Bearer {secrets['grafana']}", LIVE) == "grafana"
    for name, rpc, message in (
        ("camera", TELEMETRY_GET, "infer, expected the scope metrics."),
        ("grafana", f"/{INFERENCE}/LogSettings", "metrics, infer, expected the scope control."),
        ("all", f"/{INFERENCE}/New", "infer, control, metrics, expected no call: the RPC has no scope."),
    ):
        with pytest.raises(PermissionDenied) as caught:
            access.authorize(f"Bearer {secrets[name]}", rpc)
        method = rpc.rpartition("/")[2]
        assert str(caught.value).startswith(f"{method}: got token {name!r} with the scope {message}")


def test_changed_file_takes_effect_and_an_invalid_one_does_not(file, caplog):
    old = tokens_file(file, camera=["infer"])["camera"]
    access = Access(file, check_seconds=0)
    caplog.set_level(logging.INFO)
    new = tokens_file(file, door=["infer"])["door"]
    assert (access.authorize(f"Bearer {new}", INFER), caplog.messages) == ("door", [f"--tokens {file}: read again"])
    with pytest.raises(Unauthenticated):
        access.authorize(f"Bearer {old}", INFER)
    for damage in (lambda: written(file, "{"), lambda: written(file), lambda: file.chmod(0o666), file.unlink):
        damage()
        assert access.authorize(f"Bearer {new}", INFER) == "door"
        assert access.problem.endswith("The previous version stays in force.")
        assert caplog.messages[-1] == f"--tokens {file}: {access.problem}"
    assert len(caplog.messages) == 5  # each damage is logged once
    newest = tokens_file(file, gate=["infer"])["gate"]
    assert (access.problem, access.authorize(f"Bearer {newest}", INFER)) == ("", "gate")


def test_command_prints_the_line_and_the_token(file):
    done = ran("token", "camera", "--scope", "infer", "--scope", "metrics")
    file.write_text(done.stdout)
    file.chmod(0o600)
    found = find_token(read_tokens(file), done.stderr.split()[-1])
    assert (found.name, found.scopes) == ("camera", ("infer", "metrics"))
    made = json.loads(shown("token", "camera", "--scope=control", "--json"))
    assert hashlib.sha256(made["token"].encode()).hexdigest() == made["line"]["sha256"]
    out = file.parent / "camera.token"
    done = ran("token", "camera", "--scope=infer", "--out", out)
    file.write_text(done.stdout)
    found = find_token(read_tokens(file), read_token(out))  # which refuses a file that others may read
    assert found
    assert out.read_text().strip() not in done.stdout + done.stderr
    made = json.loads(shown("token", "camera", "--scope=infer", "--out", f"{out}2", "--json"))
    assert made["token_file"] == f"{out}2"
    before = out.read_bytes()
    for wrong in (out, file.parent / "none" / "token"):  # an earlier token stays
        assert mistake("token", "camera", "--scope=infer", "--out", wrong).startswith(f"--out {wrong}: got ")
    assert out.read_bytes() == before
    assert "token name: got 'two words'" in mistake("token", "two words", "--scope=infer")


def test_file_of_unknown_size_is_read_up_to_the_limit():
    path = Path("/proc/self/status")  # the system reports a size of 0
    data, _ = read_limited("tokens", path, 2**20, "")
    assert data
    assert read_limited("tokens", path, 10, "")[0] is None


@pytest.fixture
def clock():
    """A clock that tests move by hand: its return value is the time."""
    return Mock(return_value=100.0)


def allowed(limit, caller, requests=100):
    refused = limit.refused
    for _ in range(requests):
        with suppress(Overloaded):
            limit.take(caller)
    return requests - (limit.refused - refused)


def test_option_gives_rate_and_burst():
    rates = [Rate(0.5, 1), Rate(2.5, 3), Rate(1e6, 1), Rate(1, 10**6)]
    assert [parse_rate(text) for text in ("0.5", "2.5", "1e6:1", "1:1000000")] == rates


def test_first_requests_are_allowed_at_any_time(clock):
    for clock.return_value in (seconds / 7 for seconds in range(1, 10_000)):
        assert allowed(RateLimit(Rate(0.01, 1), clock=clock), "a", 1) == 1


FORM = "REQUESTS_PER_SECOND or REQUESTS_PER_SECOND:BURST. For example 50:10."
RANGE = "more than 0 and at most 1e+06 requests per second, and a burst of 1 to 1e+06. Leave it out for no limit."


def test_invalid_option_is_rejected():
    for text, expected in (
        *((text, f"{text!r}, expected {FORM}") for text in ("x", "1:", "1:2.5", "nan")),
        *((text, f"{text}, expected {RANGE}") for text in ("0:1", "nan:1", "1.00001e+06:1", "1:0", "1:1000001")),
    ):
        with pytest.raises(UsageError) as caught:
            parse_rate(text)
        assert str(caught.value) == f"--rate-limit: got {expected}"


def test_client_gets_its_burst_and_then_the_rate(clock):
    limit = RateLimit(Rate(4, 6), clock=clock)
    assert [allowed(limit, caller) for caller in ("a", "b", "", "a")] == [6, 6, 6, 0]
    for seconds, more in ((0.24, 0), (0.02, 1), (0.5, 2), (60, 6)):
        clock.return_value += seconds
        assert allowed(limit, "a") == more
    assert limit.refused == 8 * 100 - 27


def test_further_runs_of_a_request_count_without_a_refusal(clock):
    limit = RateLimit(Rate(4, 2), clock=clock)
    for _ in range(10):
        limit.take("a", refuse=False)
    with pytest.raises(Overloaded) as refused:
        limit.take("a")
    assert (refused.value.retry_after_ms, limit.refused) == (9 * 250, 1)
    assert allowed(limit, "b") == 2
    clock.return_value += 9 / 4
    assert allowed(limit, "a") == 1


def test_refusal_says_when_there_is_room(clock):
    limit = RateLimit(Rate(4, 2), clock=clock)
    for _ in range(2):
        limit.take("a")
    clock.return_value += 0.125
    with pytest.raises(Overloaded) as caught:
        limit.take("a")
    assert str(caught.value) == (
        "requests of this client: got more than 4 per second after a burst of 2, expected no more than that. "
        "Send it again in 125 ms."
    )
    assert (caught.value.retry_after_ms, caught.value.cause) == (125, "rate")
    clock.return_value += 0.125
    limit.take("a")


def test_changing_addresses_does_not_evade_the_limit(clock):
    limit = RateLimit(Rate(1, 2), clock=clock, max_buckets=10)
    assert sum(allowed(limit, f"address {i}", 3) for i in range(100)) == 10 * 2 + 2  # the others share one bucket
    clock.return_value += 1.5
    assert allowed(limit, "address 0") == 1  # its bucket was kept
    clock.return_value += 0.5
    assert allowed(limit, "new 0") == 2  # replaces address 1, whose bucket is full
    assert [allowed(limit, f"address {i}") for i in (0, 1)] == [1, 2]
    assert MAX_BUCKETS == 1024


def test_ipv6_clients_are_networks():
    addresses = ("127.0.0.1", "::ffff:10.0.0.1", "2001:db8:1:2:3:4:5:6", "fe80::1%eth0", "x:y")
    clients = ["127.0.0.1", "10.0.0.1", "2001:db8:1:2::/64", "fe80::/64", "x:y"]
    assert [client_of(address) for address in addresses] == clients


TOKEN = "token, expected one of the server's tokens"


def test_caller_without_a_known_token_is_unauthenticated(file):
    secret = tokens_file(file, camera=["infer"])["camera"]
    for header, message in (
        *((header, "got nothing, expected a token") for header in (None, "")),
        *((header, "got another scheme, expected the scheme Bearer") for header in (f"Basic {secret}", secret)),
        *((f"Bearer{rest}", f"got an unknown {TOKEN}") for rest in ("", f" {secret}x", f" x {secret}")),
    ):
        for rpc in (INFER, "/no.Such/Rpc"):
            with pytest.raises(Unauthenticated) as caught:
                Access(file).authorize(header, rpc)
            assert str(caught.value).startswith(f"authorization: {message}. Send `authorization: Bearer TOKEN`;")
            assert secret not in str(caught.value)


def test_file_is_checked_once_a_second(file, monkeypatch):
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    old = tokens_file(file, camera=["infer"])["camera"]
    access = Access(file)
    for changed in range(2):
        new = tokens_file(file, camera=["infer"])["camera"]
        now += 0.9
        assert access.authorize(f"Bearer {old}", INFER) == "camera", changed
        now += 0.125
        assert access.authorize(f"Bearer {new}", INFER) == "camera", changed
        old = new

"""Tokens: made once, known by their hashes, and no error that quotes one."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from edge.errors import PermissionDenied, Unauthenticated, UsageError
from edge.security.access import Access
from edge.security.scopes import TELEMETRY_GET
from edge.security.tokens import MAX_TOKENS, Token, holder, new_token, read_tokens
from edge.security.watched import Watched
from tests.support.commands import answer, fewheads, refusal
from tests.support.secured_servers import tokens_file, write_tokens

INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
DIGEST = hashlib.sha256(b"x").hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def written(file: Path, *lines: object) -> Path:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    file.chmod(0o600)
    return file


def entry(**changed: Any) -> dict[str, Any]:
    return {"name": "camera", "scopes": ["infer"], "sha256": DIGEST, **changed}


def test_a_new_token_is_in_no_line(file: Path) -> None:
    secret, line = new_token("camera", ["infer", "metrics", "infer"])
    assert line == Token("camera", ("infer", "metrics"), hashlib.sha256(secret.encode()).hexdigest())
    assert len(secret) > 40
    assert secret.startswith("fewheads_")
    assert new_token("camera", ["infer"])[0] != secret
    write_tokens(file, line)
    assert secret not in file.read_text()
    assert holder(read_tokens(file), secret) == line
    assert holder(read_tokens(file), secret[:-1]) is None


def test_remarks_and_empty_lines(file: Path) -> None:
    assert [token.name for token in read_tokens(written(file, "# the cameras", "", entry()))] == ["camera"]


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("# nobody",),
        ("fewheads_secret",),
        ('{"name": "camera"',),
        (["fewheads_secret"],),
        (entry(token="fewheads_secret"),),
        ({"name": "camera", "scopes": ["infer"]},),
        (entry(sha256="fewheads_secret"),),
        (entry(sha256=DIGEST.upper()),),
        (entry(sha256=DIGEST[:-1]),),
        (entry(name="fewheads_secret" * 9),),
        (entry(name=""),),
        (entry(name="two words"),),
        (entry(scopes=[]),),
        (entry(scopes=["fewheads_secret"]),),
        (entry(scopes="infer"),),
        (entry(), entry(sha256=hashlib.sha256(b"y").hexdigest())),
        (entry(), entry(name="other")),
        tuple(entry(name=f"n{i}", sha256=hashlib.sha256(b"%d" % i).hexdigest()) for i in range(MAX_TOKENS + 1)),
        ("x" * 300_000,),
    ],
)
def test_a_wrong_file_is_refused_and_not_quoted(file: Path, lines: tuple[object, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        read_tokens(written(file, *lines))
    assert str(file) in caught.value.subject
    assert "secret" not in str(caught.value)
    assert caught.value.fix.endswith(".")


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write(file: Path, mode: int) -> None:
    written(file, entry()).chmod(mode)
    with pytest.raises(UsageError, match="others may add tokens of their own"):
        read_tokens(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user(file: Path) -> None:
    os.chown(written(file, entry()), 4321, -1)
    with pytest.raises(UsageError, match="a file of user 4321"):
        read_tokens(file)


def test_no_file(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_tokens(file)
    os.mkfifo(file, 0o600)
    with pytest.raises(UsageError, match="a regular file"):
        read_tokens(file)
    with pytest.raises(UsageError):
        read_tokens(tmp_path)


def test_who_may_call_what(file: Path) -> None:
    secrets = tokens_file(file, camera=["infer"], grafana=["metrics"])
    access = Access(file)
    assert access.authorize(f"Bearer {secrets['camera']}", INFER) == "camera"
    assert access.authorize(f"bearer  {secrets['camera']} ", INFER) == "camera"
    assert access.authorize(None, "/grpc.health.v1.Health/Check") == ""
    assert access.authorize("Bearer nobody's", "/grpc.health.v1.Health/Check") == ""
    for name in secrets:
        assert access.authorize(f"Bearer {secrets[name]}", LIVE) == name
    with pytest.raises(
        PermissionDenied, match=r"ModelInfer: got token 'grafana' for metrics, expected one for infer\."
    ):
        access.authorize(f"Bearer {secrets['grafana']}", INFER)
    with pytest.raises(PermissionDenied):
        access.authorize(f"Bearer {secrets['camera']}", TELEMETRY_GET)


def test_an_rpc_without_a_scope_is_nobodys(file: Path) -> None:
    secrets = tokens_file(file, all=["infer", "control", "metrics"])
    with pytest.raises(PermissionDenied, match="the RPC has no scope"):
        Access(file).authorize(f"Bearer {secrets['all']}", "/inference.GRPCInferenceService/New")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic {0}", "{0}", "Bearer {0}x", "Bearer x {0}"])
def test_who_is_nobody(file: Path, header: str | None) -> None:
    secret = tokens_file(file, camera=["infer"])["camera"]
    for rpc in (INFER, LIVE, "/no.Such/Rpc"):
        with pytest.raises(Unauthenticated) as caught:
            Access(file).authorize(header and header.format(secret), rpc)
        assert secret not in str(caught.value)
        assert caught.value.fix.endswith(".")


def test_a_hash_is_no_token(file: Path) -> None:
    tokens_file(file, camera=["infer"])
    with pytest.raises(Unauthenticated):
        Access(file).authorize(f"Bearer {read_tokens(file)[0].sha256}", INFER)


def test_a_changed_file(file: Path) -> None:
    old = tokens_file(file, camera=["infer"])["camera"]
    access = Access(file, look_seconds=0)
    new = tokens_file(file, door=["infer"])["door"]
    assert access.authorize(f"Bearer {new}", INFER) == "door"
    with pytest.raises(Unauthenticated):
        access.authorize(f"Bearer {old}", INFER)
    for break_it in (lambda: written(file, "{"), lambda: written(file), lambda: file.chmod(0o666), file.unlink):
        break_it()
        assert access.authorize(f"Bearer {new}", INFER) == "door"
        assert access.problem.endswith("What was read before stays in force.")
    newest = tokens_file(file, gate=["infer"])["gate"]
    assert access.problem == ""
    assert access.authorize(f"Bearer {newest}", INFER) == "gate"


def test_a_look_holds_for_a_while(file: Path) -> None:
    file.write_text("1")
    seen = Watched("numbers", [file], lambda: int(file.read_text()), look_seconds=0.2)
    file.write_text("22")
    assert seen.value == 1
    time.sleep(0.25)
    assert seen.value == 22


def test_the_command_prints_a_line_for_the_file_and_a_token_beside_it(file: Path) -> None:
    done = fewheads("token", "camera", "--scope", "infer", "--scope", "metrics")
    line = answer(done)
    file.write_text(line)
    file.chmod(0o600)
    secret = done.stderr.split()[-1]
    assert holder(read_tokens(file), secret) == Token("camera", ("infer", "metrics"), json.loads(line)["sha256"])


def test_the_command_in_json() -> None:
    made = json.loads(answer(fewheads("token", "camera", "--scope=control", "--json")))
    assert hashlib.sha256(made["token"].encode()).hexdigest() == made["line"]["sha256"]


def test_a_name_that_is_none() -> None:
    assert "token name: got 'two words'" in refusal(fewheads("token", "two words", "--scope=infer"), 2)

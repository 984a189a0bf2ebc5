"""``push.py`` with a directory that a server follows, over a substitute for ssh or a real sshd."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.client import Client, Retries
from edge.launch import serving
from tests.support.commands import free_port
from tests.support.models import ORACLE_BUNDLE, write_oracle_bundle
from tests.support.tools import DEPLOY, run, tool
from tests.support.traffic import traffic

PUSH = DEPLOY / "push.py"
POLL = ("--model-control=poll", "--poll-seconds=0.1")


def push(*arguments, code=0):
    """Push, and return the log; the exit code is ``code``."""
    done = run(sys.executable, PUSH, "--wait-seconds=60", *map(str, arguments))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    return done.stderr


def bundle(directory, version, *, broken=False):
    """Write the oracle; a broken one is well formed, but its golden outputs are wrong."""
    path = directory / f"oracle-{version}"
    opened = write_oracle_bundle(path, "oracle", version)
    if broken:
        good = opened.golden
        wrong = Golden(good.inputs, {name: values + 1 for name, values in good.outputs.items()}, good.raw)
        files = {name: opened.read(name) for name in opened.manifest.files} | {opened.manifest.golden: wrong.encode()}
        write_bundle(path, opened.manifest, files, replace=True)
    return path


def names(repository):
    return {path.name for path in repository.iterdir()}


def index(url):
    with Client(url) as client:
        return {model["version"]: model["state"] for model in client.index() if model["name"] == "oracle"}


@pytest.fixture
def repository(tmp_path):
    repository = tmp_path / "board"
    bundle(repository, 1)
    shutil.copytree(ORACLE_BUNDLE, repository / "other")
    return repository


@pytest.mark.parametrize("options", [(), ("--load",)], ids=["poll", "load"])
def test_push_and_back_lose_no_request(tmp_path, repository, options):
    """The board also keeps one earlier version."""
    mode = ("--model-control=explicit", "--load-model=*") if options else POLL
    with serving(repository, arguments=mode) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        where = ("--to", repository, "--url", url, *options)
        with traffic(url, "oracle", Retries(), threads=1) as sent:
            for version in (2, 3):
                push(bundle(tmp_path / "new", version), *where)
                assert index(url)[str(version)] == "READY"
            assert names(repository) == {"oracle-3", ".oracle-2.previous", "other"}
            push("--back", "oracle", *where)
        assert index(url)["2"] == "READY"
        assert (sent.failures, set(sent.versions())) == ([], {"1", "2", "3"})
    assert names(repository) == {"oracle-2", ".oracle-3.previous", "other"}


def test_version_that_does_not_load_is_reverted(tmp_path, repository):
    with serving(repository, arguments=POLL) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        with traffic(url, "oracle", Retries(), threads=1) as sent:
            log = push(bundle(tmp_path / "new", 2, broken=True), "--to", repository, "--url", url, code=6)
        assert log.splitlines()[-1].startswith("push: oracle version 2: got UNAVAILABLE ")
        assert "expected READY within 60 s. Version 1 is served again." in log
        assert "golden" in log
        assert index(url) == {"1": "READY"}
        assert (sent.failures, set(sent.versions())) == ([], {"1"})
        assert names(repository) == {"oracle-1", "other"}
        # The same version, now correct.
        push(bundle(tmp_path / "good", 2), "--to", repository, "--url", url)


@contextmanager
def restarted_server(repository):
    """Run a server that restarts whenever it ends; yield its address and the command that ends it."""
    port, stop, log = free_port(), repository.parent / "stop", (repository.parent / "log").open("w")
    serve = f"{sys.executable} -m edge serve {repository} --grpc-port={port} --metrics-port=0"
    loop = f"while [ ! -e {stop} ]; do {serve} & echo $! > {stop}.pid; wait; done"
    end = f"kill -TERM $(cat {stop}.pid)"
    with log, subprocess.Popen(["sh", "-c", loop], stderr=log) as process:
        try:
            yield f"127.0.0.1:{port}", end
        finally:
            stop.touch()
            run("sh", "-c", end)
            process.wait(timeout=60)


def test_push_restarts_a_server(tmp_path, repository):
    with restarted_server(repository) as (url, end):
        push(bundle(tmp_path / "new", 2), "--to", repository, "--url", url, "--restart", end)
        assert index(url) == {"2": "READY"}
        where = ("--to", repository, "--url", url, "--restart", end)
        assert "Version 2 is served again." in push(bundle(tmp_path / "new", 3, broken=True), *where, code=6)
    assert names(repository) == {"oracle-2", ".oracle-1.previous", "other"}


def test_push_to_a_silent_server_is_reverted(tmp_path, repository):
    """Nothing listens at the address, as after a crash during the load."""
    where = ("--to", repository, "--url", "127.0.0.1:1")
    log = push(bundle(tmp_path / "new", 2), *where, "--wait-seconds=0.2", code=6)
    assert "127.0.0.1:1 does not answer; is the server running, and its port forwarded to --url?" in log
    assert "expected READY within 0.2 s. Version 1 is in its place again, but the server does not serve it." in log
    assert names(repository) == {"oracle-1", "other"}


def test_interrupted_push_is_reverted(tmp_path, repository):
    new = bundle(tmp_path / "new", 2)
    command = [sys.executable, str(PUSH), str(new), "--to", str(repository), "--url", "127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("127.0.0.1:1 does not answer" in line for line in process.stderr)
            assert "oracle-2" in names(repository)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 1
        finally:
            process.kill()
    assert names(repository) == {"oracle-1", "other", ".oracle-2.incoming"}


def stand_in(directory, script):
    path = directory / "ssh"
    path.write_text(f"#!/bin/sh\nshift\n{script}\n")
    path.chmod(0o755)
    return path


def test_interrupted_copy_resumes(tmp_path, repository):
    new = bundle(tmp_path / "new", 2)
    cut = stand_in(tmp_path, 'case $1 in *tar*) head -c 6000 | sh -c "$1" ;; *) sh -c "$1" ;; esac')
    with serving(repository, arguments=POLL) as ready:
        url = f"127.0.0.1:{ready.grpc_port}"
        where = (new, "--to", f"board:{repository}", "--url", url, "--ssh")
        log = push(*where, cut, code=6)
        assert f"board board:{repository}: got tar: " in log
        assert "Push again: the copy resumes. The server still serves what it served before." in log
        time.sleep(0.3)
        assert index(url) == {"1": "READY"}
        copied = {path.name for path in (repository / ".oracle-2.incoming").iterdir()}
        log = push(*where, stand_in(tmp_path, 'sh -c "$1"'))
        assert index(url)["2"] == "READY"
    # The last file was cut; the others are not copied again.
    assert len(copied) > 1
    again = dict(re.findall(r"^  (\S+), (\d+\.\d kB)$", log, re.MULTILINE))
    assert again
    assert again.keys() < {path.name for path in new.iterdir()}
    assert all(size == f"{(new / name).stat().st_size / 1000:.1f} kB" for name, size in again.items())
    assert names(repository) == {"oracle-2", ".oracle-1.previous", "other"}


def test_corrupted_copy_is_not_used(tmp_path, repository):
    new = bundle(tmp_path / "new", 2)
    harm = f"case $1 in *tar*) echo x >> {repository}/.oracle-2.incoming/model.onnx ;; esac"
    worse = stand_in(tmp_path, f'sh -c "$1"; code=$?; {harm}; exit $code')
    log = push(new, "--to", f"board:{repository}", "--url", "127.0.0.1:1", "--ssh", worse, code=6)
    assert "got model.onnx: FAILED" in log
    assert "expected the SHA-256 of its manifest for each file" in log
    assert names(repository) == {"oracle-1", "other", ".oracle-2.incoming"}


def test_mistakes_change_nothing_on_the_board(tmp_path, repository):
    new, changed = bundle(tmp_path / "new", 2), bundle(tmp_path / "changed", 1, broken=True)
    none = f"--back: got none of 'oracle' on {repository}, expected a model with a previous version."
    for arguments, code, message in (
        ((), 2, "BUNDLE and --back: got neither, expected one of them."),
        ((new, "--back", "oracle"), 2, "BUNDLE and --back: got both"),
        (("--back", "oracle"), 2, none),
        ((changed,), 3, f"oracle-1 on {repository}: got another bundle in oracle-1, expected none, or this one."),
        ((new / "model.onnx",), 3, "expected a bundle directory"),
        ((new, "--to", "b:path"), 2, "--to: got 'b:path', expected HOST:/DIRECTORY or /DIRECTORY."),
        ((new, "--to", "/proc/repository"), 6, "board /proc/repository: got "),
    ):
        assert message in push("--to", repository, "--url", "127.0.0.1:1", *arguments, code=code)
        assert names(repository) == {"oracle-1", "other"}


@contextmanager
def sshd(directory):
    """Run a real sshd on loopback; yield the command that connects to it."""
    program, keygen = (tool(name, "apt-get install openssh-server") for name in ("sshd", "ssh-keygen"))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        assert run(keygen, "-q", "-t", "ed25519", "-N", "", "-f", directory / key).returncode == 0
    port = free_port()  # sshd cannot choose one by itself
    options = {"ListenAddress": f"127.0.0.1:{port}", "HostKey": directory / "host", "StrictModes": "no", "UsePAM": "no"}
    options |= {"AuthorizedKeysFile": directory / "user.pub", "PidFile": "none"}
    command = [program, "-D", "-e", "-f", "/dev/null", *(f"-o{name}={value}" for name, value in options.items())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "listening" in process.stderr.readline()
            safe = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o BatchMode=yes"
            yield f"ssh -F none -i {directory / 'user'} -p {port} {safe}"
        finally:
            process.terminate()


def test_push_over_ssh(tmp_path, repository):
    with sshd(tmp_path) as ssh, serving(repository, arguments=POLL) as ready:
        where = ("--to", f"127.0.0.1:{repository}", "--url", f"127.0.0.1:{ready.grpc_port}", "--ssh", ssh)
        new = bundle(tmp_path / "new", 2)
        for shown in ("to 127.0.0.1:", "is there already"):
            assert shown in push(new, *where)
    assert names(repository) == {"oracle-2", ".oracle-1.previous", "other"}
    assert (repository / "oracle-2").stat().st_mode & 0o777 == 0o755

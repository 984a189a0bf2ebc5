"""A server to attack, with its repository and tokens, and its witness."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec
import numpy as np

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Profile
from edge.pb import inference_pb2 as pb
from edge.protocol import INFERENCE
from edge.server import Ready
from tests.attacks.witness import HOST, Call, Reading, Watched
from tests.support import image_model, text_model
from tests.support.letters_model import write_letters_bundle
from tests.support.models import ORACLE_BUNDLE, graph_of, serialized
from tests.support.sample_requests import good
from tests.support.secured_servers import Authority, tokens_file
from tests.support.server_models import write_bundle_of, write_busy_bundle

#: The files that a process may open by default.
FILES = 1024
SECONDS = 60
TOKENS = ("infer", "metrics")
#: A model with outputs of a million numbers each.
WIDE, WIDE_OUTPUTS, COLUMNS = "wide", "abc", 2**20


class Home(NamedTuple):
    directory: Path
    tokens: dict[str, str]
    authority: Authority


def make_home(directory):
    """Write a repository of toys with the limits of our exports, tokens and a certificate."""
    repository = directory / "repository"
    repository.mkdir()
    (repository / ORACLE_BUNDLE.name).symlink_to(ORACLE_BUNDLE, target_is_directory=True)
    image_model.write_image_bundle(repository / "halves-1")
    write_letters_bundle(repository / "letters-1")
    write_busy_bundle(repository)
    shape = Profile(min=(1, 1), opt=(1, 8), max=(32, 16))
    manifest = msgspec.structs.replace(
        text_model.manifest(),
        preprocess=msgspec.structs.replace(text_model.tokenizer_step(16), max_text_bytes=16 * 1024),
        profile={"input_ids": shape, "attention_mask": shape},
        max_batch_size=32,
    )
    write_bundle(repository / "sentiment-1", manifest, text_model.files())
    graph = graph_of(
        f"wide (float[1] x) => ({', '.join(f'float[{COLUMNS}] {name}' for name in WIDE_OUTPUTS)})"
        f" {{ {' '.join(f'{name} = Expand(x, size)' for name in WIDE_OUTPUTS)} }}",
        size=np.array([COLUMNS]),
    )
    wide = {name: np.ones(COLUMNS, np.float32) for name in WIDE_OUTPUTS}
    write_bundle_of(repository, WIDE, serialized(graph), {"x": np.ones(1, np.float32)}, wide)
    tokens = tokens_file(directory / "tokens", **{scope: (scope,) for scope in TOKENS})
    authority = Authority(directory / "authority")
    authority.issue()
    return Home(directory, tokens, authority)


class Setup(NamedTuple):
    """What is special about a server.

    Attributes:
        arguments: beside the usual ones.
    """

    arguments: tuple[str, ...] = ()
    tls: bool = False


def picture_request(picture):
    request = pb.ModelInferRequest(model_name=image_model.NAME)
    request.inputs.add(name="image", datatype="BYTES", shape=(1, 1)).contents.bytes_contents.append(picture)
    return request


class NotStarted(Exception):
    """A server ended before it took requests; with the last line of its log."""


class Target:
    """A running server, and what its witness has seen.

    Attributes:
        calls: of the well-behaved client, by door, in the order of their ends.
    """

    def __init__(self, home, transport, setup):
        self.home, self.transport, self.setup = home, transport, setup
        self.log = home.directory / f"{transport}.log"
        options = ["--grpc-port=0", "--http-port=0", "--metrics-port=0", "--json", "--target=onnxruntime"]
        options += [f"--transport={transport}", f"--cache={home.directory / 'cache'}", *setup.arguments]
        options.append(f"--tokens={home.directory / 'tokens'}")
        if setup.tls:
            options += [f"--tls-{part}={home.authority.file.parent / f'server.{end}'}" for part, end in _TLS]
        command = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", sys.executable, "-m", "edge", "serve"]
        with open(self.log, "wb") as log:
            command += [str(home.directory / "repository"), *options]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise NotStarted(self.log.read_text(errors="replace").strip().rpartition("\n")[2])
        ready = msgspec.json.decode(line, type=Ready)
        assert not ready.unavailable, ready.unavailable
        assert ready.http_port
        assert ready.metrics_port
        self.grpc_port, self.http_port, self.metrics_port = ready.grpc_port, ready.http_port, ready.metrics_port
        self.calls = {}
        self.readings = []
        self._watch()

    def bearer(self):
        return (("authorization", f"Bearer {self.home.tokens['infer']}"),)

    def channel(self):
        """Return a channel without limits, with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        options += [("grpc.max_receive_message_length", -1)]
        return grpc.insecure_channel(f"{HOST}:{self.grpc_port}", options)

    def call(self, channel, method, content):
        """Start a call; a server that takes longer than 20 s for one has fallen."""
        rpc = channel.unary_unary(f"/{INFERENCE}/{method}")
        return rpc.future(content, timeout=20, metadata=self.bearer())

    @property
    def alive(self):
        return self._process.poll() is None

    def pause(self, seconds):
        """Stop the whole server for so long."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def stop(self):
        """End the server as systemd does; return what was wrong with its end."""
        start = time.monotonic()
        try:
            self._process.send_signal(signal.SIGTERM)
            code = self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = f"none for {SECONDS} s"
        finally:
            self._process.kill()
            self._process.communicate()
            self._witness.kill()
            self._witness.communicate()
            self._reading.join()
        return "" if code == 0 else f"exit code {code} after {time.monotonic() - start:.0f} s"

    def _watch(self):
        picture = picture_request(image_model.encoded(image_model.bright(200, 10)))
        ports = self.grpc_port, self.http_port, self.metrics_port
        tokens = self.home.tokens["infer"], self.home.tokens["metrics"]
        requests = good().SerializeToString(), picture.SerializeToString()
        authority = str(self.home.authority.file) if self.setup.tls else ""
        watched = Watched(self._process.pid, str(self.log), *ports, *tokens, *requests, authority)
        command = [sys.executable, "-m", "tests.attacks.witness"]
        self._witness = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._witness.stdin.write(msgspec.json.encode(watched) + b"\n")
        self._witness.stdin.flush()
        self._reading = threading.Thread(target=self._listen, daemon=True)
        self._reading.start()

    def _listen(self):
        for line in self._witness.stdout:
            seen = msgspec.json.decode(line, type=Call | Reading)
            if isinstance(seen, Call):
                self.calls.setdefault(seen.door, []).append(seen)
            else:
                self.readings.append(seen)


_TLS = (("certificate", "pem"), ("key", "key"))

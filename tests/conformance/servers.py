"""Both servers as processes, with the same models and the same features enabled."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import grpc

from edge.client.connection import open_stub
from edge.launch import serving
from edge.pb import inference_pb2 as pb
from tests.conformance.models import QUEUE_SIZE, write_bundles, write_repository
from tests.support.commands import free_port

#: Where ``deploy/peers/install.sh triton`` puts it.
TRITON = Path(os.environ.get("FEWHEADS_PEERS", Path.home() / ".cache" / "fewheads-peers")) / "triton"
NO_TRITON = f"needs a real Triton in {TRITON}: deploy/peers/install.sh triton"
#: The limit of this server here; Triton has a fixed limit of 2 GiB.
MAX_MESSAGE_BYTES = 1_000_000
_START_SECONDS = 120


IS_INSTALLED = (TRITON / "versions.txt").is_file()


@contextmanager
def ours(directory, transport):
    """Serve with Fewheads, and yield the address; what Triton allows is allowed, late requests included."""
    repository = directory / "repository"
    write_bundles(repository)
    arguments = ["--model-control=explicit", "--load-model=*", "--allow-shared-memory", "--allow-log-settings"]
    arguments += ["--instances=1", f"--max-queue-size={QUEUE_SIZE}", f"--max-message-bytes={MAX_MESSAGE_BYTES}"]
    arguments += ["--no-admission", "--no-metrics", f"--transport={transport}"]
    with serving(repository, cache=directory / "cache", arguments=arguments) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


@contextmanager
def triton(directory):
    """Serve the models of :mod:`tests.conformance.models`, and yield the address."""
    write_repository(directory / "repository")
    with serving_with_triton(directory, TRITON / "backends", ["mixed"]) as url:
        yield url


@contextmanager
def serving_with_triton(directory, backends, models, *options):
    """Serve ``directory/repository``, and yield the address when these models are ready."""
    url = f"127.0.0.1:{free_port()}"
    site = TRITON / "lib" / "python3.11" / "site-packages"
    command = [site / "pytriton" / "tritonserver" / "bin" / "tritonserver"]
    command += [f"--model-repository={directory / 'repository'}", f"--backend-directory={backends}"]
    command += ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", "--allow-http=false"]
    command += [*options, "--allow-metrics=false", "--grpc-address=127.0.0.1", f"--grpc-port={url.partition(':')[2]}"]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
        "PATH": f"{TRITON / 'bin'}:{os.environ['PATH']}",  # where the Python that it embeds finds its packages
    }
    with (directory / "triton.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait(url, process, directory / "triton.log", models)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait(url, process, log, models):
    """Wait until these models answer."""
    limit = time.monotonic() + _START_SECONDS
    with grpc.insecure_channel(url) as channel:
        stub = open_stub(channel)
        while time.monotonic() < limit and process.poll() is None:
            try:
                if all(stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=1).ready for name in models):
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.1)
    raise RuntimeError(f"Triton did not start: {log.read_text()[-2000:]}")

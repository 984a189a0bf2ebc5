"""One real server for the whole run: it serves good bundles, and a broken one among them."""

import shutil
import threading
import time
from collections import Counter

import grpc
import hypothesis
import pytest

from edge.client.connection import open_stub
from edge.datatypes import NUMPY_TYPES
from edge.launch import running_server
from edge.repository import loader
from edge.scheduling.scheduler import Scheduler
from edge.settings import TRANSPORTS, Settings
from tests.support.letters_blocks import write_letters_in_blocks
from tests.support.letters_model import NAME as LETTERS
from tests.support.letters_model import open_letters, write_letters_bundle
from tests.support.loop_model import NAME, open_loop, write_halving_bundle
from tests.support.models import ORACLE_BUNDLE, VERSIONED, write_oracle_bundle
from tests.support.server_models import busy, write_busy_bundle, write_echo_bundle

#: Their first example may wait for a model.
hypothesis.settings.register_profile("edge", deadline=None)
hypothesis.settings.load_profile("edge")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """Keep tests away from the user's cache."""
    monkeypatch.setenv("FEWHEADS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def scheduler():
    scheduler = Scheduler(10_000)
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="session")
def loop_bundle(tmp_path_factory):
    return write_halving_bundle(tmp_path_factory.mktemp("loop") / NAME)


@pytest.fixture(scope="session")
def loop(loop_bundle, tmp_path_factory):
    with open_loop(loop_bundle, tmp_path_factory.mktemp("cache")) as loop:
        yield loop


@pytest.fixture(scope="session")
def letters_bundle(tmp_path_factory):
    return write_letters_bundle(tmp_path_factory.mktemp("letters") / LETTERS)


@pytest.fixture(scope="session")
def letters(letters_bundle, tmp_path_factory):
    with open_letters(letters_bundle, tmp_path_factory.mktemp("cache")) as letters:
        yield letters


@pytest.fixture(scope="session")
def blocks_bundle(tmp_path_factory):
    return write_letters_in_blocks(tmp_path_factory.mktemp("blocks") / LETTERS)


@pytest.fixture(scope="session")
def writer(letters_bundle, tmp_path_factory):
    """A server of a model that generates text, and of one that does not."""
    cache = tmp_path_factory.mktemp("cache")
    with running_server([letters_bundle.path, ORACLE_BUNDLE], cache=cache, arguments=["--http-port=0"]) as ready:
        yield ready


@pytest.fixture(scope="session")
def slow_writer(letters_bundle, tmp_path_factory):
    """A server with 40 ms for each token and two seconds for each request."""
    arguments = ["--http-port=0", "--default-timeout-ms=2000", "--no-admission"]
    cache = tmp_path_factory.mktemp("cache")
    with running_server([letters_bundle.path], target="simulated:40", cache=cache, arguments=arguments) as ready:
        yield ready


@pytest.fixture(scope="session")
def bundles(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundles")
    shutil.copytree(ORACLE_BUNDLE, directory / "oracle")
    for version in (1, 3):
        write_oracle_bundle(directory / f"versioned-{version}", VERSIONED, version)
    for datatype in NUMPY_TYPES:
        write_echo_bundle(directory, datatype)
    write_busy_bundle(directory)
    shutil.copytree(ORACLE_BUNDLE, directory / "broken")
    (directory / "broken" / "model.onnx").write_bytes(b"broken")
    return sorted(directory.iterdir())


def pytest_generate_tests(metafunc):
    """Run the tests of modules that say so on every transport; the others run on the default one."""
    if "transport" in metafunc.fixturenames and getattr(metafunc.module, "ON_EVERY_TRANSPORT", False):
        metafunc.parametrize("transport", TRANSPORTS, indirect=True, scope="session")


@pytest.fixture(scope="session")
def transport(request):
    return getattr(request, "param", Settings.transport)


@pytest.fixture(scope="session")
def server(bundles, tmp_path_factory, transport):
    cache = tmp_path_factory.mktemp("cache")
    # Without admission, so that time may run out in the queue too.
    with running_server(
        bundles,
        cache=cache,
        arguments=[
            "--instances=1",  # so that one request keeps another waiting
            "--max-queue-size=32",
            "--no-admission",
            "--allow-log-settings",
            "--http-port=0",
            f"--transport={transport}",
        ],
    ) as ready:
        yield ready


@pytest.fixture(scope="session")
def url(server):
    return f"127.0.0.1:{server.grpc_port}"


@pytest.fixture(scope="session")
def http_url(server):
    return f"127.0.0.1:{server.http_port}"


@pytest.fixture
def channel(url):
    with grpc.insecure_channel(url) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return open_stub(channel)


@pytest.fixture
def telemetry(channel):
    return open_stub(channel)


@pytest.fixture(scope="module")
def steps_per_second(url):
    with grpc.insecure_channel(url) as channel:
        stub = open_stub(channel)
        return max(_steps_per_second(stub) for _ in range(5))  # the fastest: a neighbour may go away at any time


def _steps_per_second(stub):
    begun = time.perf_counter()
    stub.ModelInfer(busy(200))
    return 200 / (time.perf_counter() - begun)


@pytest.fixture
def take(steps_per_second):
    """Return how many steps take about so many seconds."""
    return lambda seconds: max(int(seconds * steps_per_second), 1)


@pytest.fixture
def loads(monkeypatch):
    """Count the loads by model; those whose name is in ``held`` wait."""
    counted, real = Held(), loader.load_with

    def load_with(runtime, bundle, *rest):
        counted.add(bundle.manifest.name)
        return real(runtime, bundle, *rest)

    monkeypatch.setattr(loader, "load_with", load_with)
    yield counted
    counted.goes_on.set()


@pytest.fixture
def preparing(monkeypatch):
    """Count what comes before the turn of a load, such as a build, by directory without version, as ``loads``."""
    counted, real = Held(), loader.Loader.prepare

    def prepare(self, bundle, *rest):
        counted.add(bundle.path.name.partition("-")[0])
        return real(self, bundle, *rest)

    monkeypatch.setattr(loader.Loader, "prepare", prepare)
    yield counted
    counted.goes_on.set()


class Held(Counter):
    """Counts names; those in ``held`` wait until ``goes_on`` is set."""

    def __init__(self):
        super().__init__()
        self.held, self.goes_on = "", threading.Event()

    def add(self, name):
        self[name] += 1
        if name in self.held:
            assert self.goes_on.wait(20)

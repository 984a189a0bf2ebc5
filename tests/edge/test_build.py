"""Builds: the cache, its records, loading, and builds in a child process that may be killed."""

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden
from edge.errors import BackendError, GoldenError, LoadFailed, UsageError
from edge.files import replaced_directory, sha256
from edge.instruments.memory import MemorySampler
from edge.runtimes import build_child, cache
from edge.runtimes.build import build, build_with, load_runner
from edge.runtimes.build_child import BuildMessage, Request, check_memory
from edge.runtimes.cache import BuildRecord, cache_directory
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.runtimes.runtime import BuildMemory, BuildOptions, BuildProgress, Source
from edge.runtimes.table import choose
from tests.support.boards import write
from tests.support.builds import ROOT, children, pause_builds
from tests.support.commands import mistake
from tests.support.marks import with_rtx
from tests.support.models import ORACLE_BUNDLE, oracle_golden, oracle_manifest, oracle_onnx, write_oracle_bundle

ORT = "onnxruntime"
RTX = "tensorrt-rtx:SM86"


@pytest.fixture
def oracle():
    return Bundle.open(ORACLE_BUNDLE)


def cached(bundle, cache_dir):
    key = cache.key_of(Source.of(bundle, choose(ORT)), choose(ORT))
    return cache.find(cache.entry(cache_dir, key), key)


def test_build_for_onnxruntime(oracle, tmp_path):
    assert cached(oracle, tmp_path) is None
    straight = load_runner(oracle, ORT, tmp_path)
    built = build(oracle, ORT, tmp_path)
    record = built.record
    assert not built.reused
    assert built.directory.parent == tmp_path
    assert (record.name, record.version, record.tier) == ("calculator-oracle", 1, "full")
    assert (record.runtime, record.device, record.reason) == (ORT, "CPU", "The target names it.")
    assert record.onnx_sha256 == oracle.manifest.files["model.onnx"].sha256
    assert (record.golden, record.engine) == (straight.golden_report, None)
    data = (built.directory / record.file).read_bytes()
    assert (record.size_bytes, record.sha256) == (len(data), sha256(data))
    stored = (built.directory / "build.json").read_bytes()
    assert msgspec.json.decode(stored, type=BuildRecord) == record
    assert sorted(os.listdir(tmp_path)) == [built.directory.name]
    assert build(oracle, ORT, tmp_path) == (built.directory, record, True)
    through = load_runner(oracle, ORT, tmp_path)
    assert (straight.source, through.source) == ("bundle", "cache")
    assert through.golden_report == record.golden
    second = write_oracle_bundle(tmp_path / "second", version=2)
    assert build(second, ORT, tmp_path).directory != built.directory


def test_corrupted_build_is_ignored_and_repeated(oracle, tmp_path, caplog):
    built = build(oracle, ORT, tmp_path)
    for file, contents, why in (
        ("model.onnx", b"shorter", "got 7 bytes"),
        ("model.onnx", (built.directory / "model.onnx").read_bytes()[:-1] + b"\0", "sha256: got"),
        ("model.onnx", None, "No such file or directory"),
        ("build.json", b"{}", "missing required field"),
    ):
        caplog.clear()
        (built.directory / file).unlink()
        if contents is not None:
            (built.directory / file).write_bytes(contents)
        assert load_runner(oracle, ORT, tmp_path).source == "bundle"
        assert f"the build in {built.directory} is ignored, build it again" in caplog.text
        assert why in caplog.text
        again = build(oracle, ORT, tmp_path)
        assert not again.reused
        assert again.record.sha256 == built.record.sha256
        assert load_runner(oracle, ORT, tmp_path).source == "cache"
        assert os.listdir(tmp_path) == [built.directory.name]
    # Nor can a record name a file outside its directory.
    (tmp_path / "elsewhere.onnx").write_bytes((built.directory / built.record.file).read_bytes())
    moved = msgspec.structs.replace(built.record, file="../elsewhere.onnx")
    (built.directory / "build.json").write_bytes(msgspec.json.encode(moved))
    assert cached(oracle, tmp_path) is None


def test_full_disk_keeps_nothing(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from edge.bundles.bundle import Bundle; from edge.runtimes.build import build\n"
        "bundle = Bundle.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "build(bundle, 'onnxruntime', Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(ORACLE_BUNDLE), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "edge.errors.UsageError: --cache: got [Errno 27] File too large, expected a cache at" in done.stderr
    assert "or make room in this one." in done.stderr
    assert os.listdir(tmp_path) == []


@with_rtx
def test_build_for_tensorrt_rtx_cannot_be_loaded(oracle, tmp_path):
    record = build(oracle, RTX, tmp_path).record
    assert (record.golden, record.golden_skipped) == (None, "golden check not run: it needs a GPU of SM86")
    assert build(oracle, RTX, tmp_path).reused
    wrong = "--target: got 'tensorrt-rtx:SM86', expected a target that this program can run"
    with pytest.raises(UsageError, match=wrong):
        load_runner(oracle, RTX, tmp_path)
    assert wrong in mistake("serve", tmp_path, "--target", RTX)


MIB = 1024**2


@pytest.fixture
def runtime(request, monkeypatch):
    """A runtime of this machine whose builds go to a child process, as those of TensorRT do."""
    chosen = choose(getattr(request, "param", ORT))
    monkeypatch.setattr(type(chosen), "isolated_build", True)
    return chosen


def built(runtime, bundle, cache, **more):
    return build_with(runtime, bundle, cache, None, **more)


def process(bundle, cache, *command):
    """Start a build process, or another command that reads the same request."""
    options = BuildOptions()
    return build_child.start(
        Request(str(bundle.path), "full", "model", str(cache), "onnxruntime", "", "A test.", options), *command
    )


@pytest.mark.parametrize("runtime", [ORT, pytest.param(RTX, marks=with_rtx)], indirect=True)
def test_build_in_a_child_equals_one_in_this_process(runtime, oracle, tmp_path, monkeypatch):
    reported = []
    started = []
    scores = set()
    popen = subprocess.Popen

    def progress(position):
        reported.append(position)
        # When memory runs out, the system kills the build and no server. A child that has ended still has its score.
        scores.update(Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() for child in started)

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    found = built(runtime, oracle, tmp_path / "child", progress=progress)
    monkeypatch.setattr(type(runtime), "isolated_build", False)
    assert (len(started), scores) == (1, {"800"})
    assert not children()
    assert found.record.reason == runtime.reason
    assert reported[-1] == BuildProgress("done", 1.0, 0.0)
    assert [one.fraction for one in reported] == sorted(one.fraction for one in reported)
    here = built(runtime, oracle, tmp_path / "here")
    assert here.record.key == found.record.key
    assert here.record.golden == found.record.golden
    assert sorted(os.listdir(tmp_path / "child")) == sorted(os.listdir(tmp_path / "here"))


def test_load_without_a_build_names_the_command(oracle, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)
    fix = f"Build it on this machine: fewheads build {ORACLE_BUNDLE} --target onnxruntime --cache {tmp_path}"
    with pytest.raises(BackendError, match=rf"got no build in {tmp_path}, expected one for this machine. {fix}"):
        load_runner(oracle, "onnxruntime", tmp_path)
    made = build(oracle, "onnxruntime", tmp_path)
    assert load_runner(oracle, "onnxruntime", tmp_path).source == "cache"
    # The same board after an upgrade: the build of the older release is there, and is not used.
    monkeypatch.setattr(OnnxRuntimeCpu, "version", classmethod(lambda _: "99.1"))
    older = made.record.runtime_version
    with pytest.raises(BackendError, match=rf"got a build for version {older}, expected a build for version 99.1. "):
        load_runner(oracle, "onnxruntime", tmp_path)
    caplog.set_level("INFO")
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", False)
    build(oracle, "onnxruntime", tmp_path)
    assert f"is built again: the cache has a build for version {older}, and this is version 99.1" in caplog.text
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)
    # Copied by hand to where the other board would look for its own.
    monkeypatch.setattr(OnnxRuntimeCpu, "cache_key", lambda self: {"runtime": self.name, "device_name": "Orin"})
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", False)
    copied = build(oracle, "onnxruntime", tmp_path / "other").directory
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)
    for name in os.listdir(copied):
        (copied / name).write_bytes((made.directory / name).read_bytes())
    with pytest.raises(BackendError):
        load_runner(oracle, "onnxruntime", tmp_path / "other")
    assert f"the build in {copied} is ignored" in caplog.text
    assert f"it was built for device CPU, device_name unknown, version {older}" in caplog.text


def test_errors_are_those_of_a_build_in_this_process(oracle, tmp_path, monkeypatch):
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)
    good = oracle_golden()
    wrong = Golden(good.inputs, {"value": good.outputs["value"] + np.float32(1)}, good.raw)
    files = {"model.onnx": oracle_onnx(), "golden.npz": wrong.encode()}
    bundle = write_bundle(tmp_path / "wrong", oracle_manifest(), files)
    (tmp_path / "file").write_bytes(b"")
    raised = []
    for isolated in (True, False):
        monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", isolated)
        with pytest.raises(GoldenError, match="a largest difference of 1, expected at most") as golden:
            build(bundle, "onnxruntime", tmp_path / "cache")
        with pytest.raises(UsageError, match=r"--cache: got .*FEWHEADS_CACHE") as usage:
            build(oracle, "onnxruntime", tmp_path / "file")
        raised.append((str(golden.value), str(usage.value)))
        assert os.listdir(tmp_path / "cache") == []
    assert raised[0] == raised[1]


def test_killed_child(runtime, oracle, tmp_path, monkeypatch):
    def kill(number, progress):
        for pid in children():
            os.kill(pid, number)

    pause_builds(monkeypatch, tmp_path / "site")
    options = BuildOptions(workspace_bytes=256 * MIB)
    killed = (
        r"was ended by SIGKILL, at [\d,]+ MiB of its own, with [\d,]+ MiB available at the least; the system kills "
        r"processes so when memory runs out, expected a build that ends. Stop other models and programs, add swap, "
        r"or lower --workspace-mib \(256 now\)"
    )
    crashed = r"was ended by SIGSEGV, at [\d,]+ MiB of its own.* See its last lines above"
    for number, says in ((signal.SIGKILL, killed), (signal.SIGSEGV, crashed)):
        with pytest.raises(BackendError, match=f"model .*onnx: got a build process that {says}"):
            built(runtime, oracle, tmp_path / "cache", progress=partial(kill, number), options=options)
        assert not children()
        assert os.listdir(tmp_path / "cache") == []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert not built(runtime, oracle, tmp_path / "cache").reused


def test_child_ends_with_an_interrupt_or_cannot_start(runtime, oracle, tmp_path, monkeypatch):
    def interrupt(progress):
        raise KeyboardInterrupt

    stop = threading.Event()
    stop.set()
    pause_builds(monkeypatch, tmp_path / "site")
    with pytest.raises(LoadFailed, match=r"build of model .* got a request to end it, expected none"):
        built(runtime, oracle, tmp_path / "cache", stop=stop)
    with pytest.raises(KeyboardInterrupt):
        built(runtime, oracle, tmp_path / "cache", progress=interrupt)
    assert not children()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(BackendError, match=r"model .*onnx: got .*missing.*, expected a build process. Stop other"):
        built(runtime, oracle, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_child_ends_with_its_parent_and_the_next_cleans_up(oracle, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    pause_builds(monkeypatch, tmp_path / "site")
    child, messages = process(oracle, cache)
    with child, messages:
        while b"golden check" not in messages.recv_bytes():
            pass
        child.stdin.close()  # as the system closes it when the parent dies
        assert child.wait(10) == 1
    (rest,) = os.listdir(cache)
    assert rest.startswith(".")
    with replaced_directory(cache / ("f" * 16)) as living:  # of a build that still runs
        made = build(oracle, "onnxruntime", cache)
        assert sorted(os.listdir(cache)) == sorted([living.parent.name, made.directory.name])
    assert sorted(os.listdir(cache)) == sorted(["f" * 16, made.directory.name])


def test_builds_that_end_at_the_same_time_replace_each_other(tmp_path):
    directory = tmp_path / "build"

    def end_often(name):
        for _ in range(100):
            with replaced_directory(directory) as new:
                (new / name).touch()

    with ThreadPoolExecutor(4) as builders:
        list(builders.map(end_often, "abcd"))
    assert len(os.listdir(directory)) == 1
    assert os.listdir(tmp_path) == [directory.name]


def test_child_without_memory_reports_it(oracle, tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
    code += "from edge.runtimes import build_process\n"
    code += "build_process.build_here = lambda *_: bytearray(4 * 1024**3)\n"
    code += "build_process.main()"
    child, messages = process(oracle, tmp_path, "-c", code)
    with child, messages:
        failure = msgspec.json.decode(messages.recv_bytes(), type=BuildMessage).failure
        with pytest.raises(EOFError):  # it has ended
            messages.recv_bytes()
    assert "got a build process without memory, expected a build that ends. Stop other models" in str(failure.error)
    assert child.returncode == BackendError.exit_code


LIMIT = build_child.MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("sends", "error"),
    [
        (
            f"b' ' * {LIMIT + 1}",
            f"of its build process: got more than {LIMIT} bytes, expected JSON of at most {LIMIT} ",
        ),
        ("b'{'", "of its build process: got Input data was truncated, expected JSON"),
        (f"b'{{}}'.rjust({LIMIT})", "got none, expected its build in"),
    ],
)
def test_messages_of_a_child_are_limited(oracle, tmp_path, monkeypatch, sends, error):
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)
    code = "import sys; from multiprocessing.connection import Connection\n"
    code += f"Connection(int(sys.argv[1])).send_bytes({sends}); sys.stdin.read()"
    monkeypatch.setattr(build_child, "start", lambda request, start=build_child.start: start(request, "-c", code))
    with pytest.raises(BackendError, match=f"model .*onnx.*{re.escape(error)}"):
        build(oracle, ORT, tmp_path)


def test_long_record_of_a_child_is_cut(oracle, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(OnnxRuntimeCpu, "isolated_build", True)
    code = "from edge.runtimes import build_process\n"
    code += "build_process.build_here = lambda *_: build_process.log.warning(chr(1) * 10**6)\n"
    code += "build_process.main()"
    monkeypatch.setattr(build_child, "start", lambda request, start=build_child.start: start(request, "-c", code))
    with pytest.raises(BackendError, match="got none, expected its build in"):
        build(oracle, ORT, tmp_path)
    assert "(1000000 characters)" in caplog.text


def test_memory_is_checked_before_a_build(oracle, tmp_path, monkeypatch):
    runtime = choose("onnxruntime")
    monkeypatch.setattr(OnnxRuntimeCpu, "build_memory", lambda *_: BuildMemory(2000 * MIB, 1000 * MIB))
    memory, source = MemorySampler(tmp_path), Source.of(oracle, runtime)
    for available, swap, refused in ((3000, 0, False), (1500, 2000, False), (1500, 200, True), (900, 9000, True)):
        kib = {"MemTotal": 9999999, "MemAvailable": available * 1024, "SwapTotal": swap * 1024, "SwapFree": swap * 1024}
        write(tmp_path, {"proc/meminfo": "".join(f"{name}: {size} kB\n" for name, size in kib.items())})
        check_memory(runtime, source, BuildOptions(ignore_memory=True), memory)
        if not refused:
            check_memory(runtime, source, BuildOptions(), memory)
            continue
        with pytest.raises(BackendError) as caught:
            check_memory(runtime, source, BuildOptions(), memory)
        assert str(caught.value) == (
            f"memory to build model {ORACLE_BUNDLE}/model.onnx: got {available:,} MiB available (/proc/meminfo "
            f"MemAvailable) and {swap:,} MiB of free swap, expected 2,000 MiB by the estimate, of which 1,000 MiB "
            "cannot be swapped. Stop other models and programs, add swap, or lower --workspace-mib (512 now); "
            "--ignore-memory builds all the same."
        )


def test_default_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEWHEADS_CACHE", raising=False)
    assert cache_directory(None) == tmp_path / ".cache" / "fewheads"
    monkeypatch.setenv("FEWHEADS_CACHE", str(tmp_path / "elsewhere"))
    assert cache_directory(None) == tmp_path / "elsewhere"
    assert cache_directory(tmp_path) == tmp_path

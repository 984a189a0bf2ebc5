"""Run every step on the GPU in a process of its own, within its time, and write what each one found into one record.

A step that fails or takes too long does not keep the others from running.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.gpu import IMAGE, RECORD, ROOT

FORMAT = 1
PACKAGES = (*IMAGE, "torch", "pycuda", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu12")
#: What a machine without a module leaves untested.
NEEDS = {
    "tensorrt": "building and running engines (`tests/device`): no TensorRT on this machine",
    "tensorrt_rtx": "TensorRT-RTX's runtime: its 200 MiB do not travel with the wheels",
}


class Step(NamedTuple):
    """A command, and the seconds after which it is ended.

    It prints a line of JSON, unless it is pytest, which writes its report to the file that takes ``{report}``'s place.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float


def marked_tests():
    """Return the files with tests marked ``gpu``, but those of tests/device, where every test needs a GPU."""
    marked = [path for path in sorted((ROOT / "tests").glob("*/test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in marked]


def steps():
    """Return the steps in their order. Their limits add up to eight minutes."""
    pytest = ("pytest", "-m", "gpu", "-W", "default", "-q", "-p", "no:cacheprovider", "--timeout=120")
    report = "--junitxml={report}"
    return [
        Step("device", ("tests.gpu.record", "device"), 40),
        Step("times", ("tests.gpu.times",), 80),
        Step("training", ("tests.gpu.training",), 180),
        Step("tests/device", (*pytest, report, "tests/device"), 120),
        Step("other tests", (*pytest, report, *marked_tests()), 60),
    ]


def device():
    """Return what CUDA, torch and the driver say of the GPU.

    Raises:
        AssertionError: torch does not find a GPU, or computes something else on it.
    """
    import torch

    from edge.runtimes.cuda import facts

    driver = Path("/sys/module/nvidia/version")
    found = facts()._asdict() | {"driver": driver.read_text().strip() if driver.exists() else "unknown"}
    assert torch.cuda.is_available(), f"torch {torch.__version__} finds no GPU"
    factor = torch.rand(512, 512, generator=torch.Generator().manual_seed(0))
    difference = float(((factor.cuda() @ factor.cuda()).cpu() - factor @ factor).abs().max())
    assert difference < 0.01, f"a product of torch on the GPU differs by {difference}"
    properties = torch.cuda.get_device_properties(0)
    memory = {"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
    return found | memory | {"torch_cuda": torch.version.cuda, "product_difference": difference}


def versions():
    present = {distribution.name.lower().replace("_", "-"): distribution.version for distribution in distributions()}
    return {"python": platform.python_version(), **{package: present.get(package) for package in PACKAGES}}


def run(step):
    """Run a step; return its ``result``, its ``error`` (None if it succeeded), and its seconds."""
    begun, error, result = time.monotonic(), None, None
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", *(part.format(report=report) for part in step.command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=step.limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # servers of tests, too
                output, error = process.communicate()[0], f"not finished after {step.limit_s:g} s"
        if report.exists():
            result = counted(report)
        else:
            for line in output.splitlines():
                with suppress(ValueError):
                    result = json.loads(line)
        if error is None and process.returncode:
            error = f"exit code {process.returncode}"
    found = {"seconds": round(time.monotonic() - begun, 1), "error": error, "result": result}
    return found if error is None else found | {"output": output[-4000:]}


def counted(report):
    """Return the numbers of tests by outcome in pytest's report, the failed ones, and the reasons of the others."""
    outcomes = {"passed": 0, "failed": [], "skipped": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"].append(name)
        elif (skipped := case.find("skipped")) is not None:
            reason = skipped.get("message") or "unknown"
            outcomes["skipped"][reason] = outcomes["skipped"].get(reason, 0) + 1
        else:
            outcomes["passed"] += 1
    return outcomes


def record(chosen, path=RECORD):
    """Run steps, write the record after each of them, and return whether all succeeded."""
    missing = [reason for module, reason in NEEDS.items() if find_spec(module) is None]
    found = {
        "format": FORMAT,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "untested": missing,
        "passed": False,
        "steps": {},
    }
    for number, step in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {step.name}, at most {step.limit_s:g} s", flush=True)
        done = found["steps"][step.name] = run(step)
        found["passed"] = number == len(chosen) and all(one["error"] is None for one in found["steps"].values())
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"    {done['error'] or 'passed'} after {done['seconds']} s", flush=True)
    for reason in missing:
        print(f"not tested: {reason}")
    print(path)
    return bool(found["passed"])


def main():
    """Run all steps; with the argument ``device``, print what that step finds."""
    if sys.argv[1:] == ["device"]:
        print(json.dumps(device()))
        return
    sys.exit(0 if record(steps()) else 1)


if __name__ == "__main__":
    main()

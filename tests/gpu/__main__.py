"""``make gpu``: install from the collected wheels beside the machine's own torch, then measure and test on the GPU.

Nothing but the standard library is imported here.
"""

import ctypes
import os
import platform
import subprocess
import sys
import venv
from importlib.metadata import distributions
from importlib.util import find_spec

from edge.errors import BackendError, FewheadsError, Raw
from tests.gpu import ENVIRONMENT, IMAGE, ROOT, WHEELS


def check(wheels=WHEELS):
    """Raise a BackendError if this machine cannot be checked, before anything is installed."""
    fix = "Run `make gpu` on a machine with an NVIDIA GPU and its driver; `make test-device` needs neither."
    if problem := gpu_problem():
        raise BackendError("make gpu", given=Raw(problem), expected="an NVIDIA GPU", fix=fix)
    if sys.version_info[:2] != (3, 12):
        given = Raw(f"Python {platform.python_version()}")
        fix = "Give one that has a torch for CUDA: `make gpu PYTHON=...`."
        raise BackendError("make gpu", given=given, expected="Python 3.12", fix=fix)
    if not list(wheels.glob("pip-*.whl")):
        fix = f"Run `make gpu-wheels` on a machine with network, and copy {WHEELS.name} beside the working tree."
        raise BackendError("make gpu", given=Raw(f"no wheels in {wheels}"), expected="those it installs", fix=fix)
    collected = {wheel.name.split("-")[0] for wheel in wheels.glob("*.whl")}
    modules = [name for name in ("torch", *IMAGE.values()) if name not in collected and find_spec(name) is None]
    if modules:
        given = Raw(f"no {', '.join(modules)} in {sys.executable}")
        expected = f"a torch for CUDA, {', '.join(IMAGE.values())}"
        fix = f"Install them there; `make gpu-wheels COLLECT='{' '.join(IMAGE)}'` collects all but torch."
        raise BackendError("make gpu", given=given, expected=expected, fix=fix)


def gpu_problem():
    """Return why CUDA cannot be used; None if there is a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int()
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"a CUDA driver without a GPU (error {code})"
    return None if count.value else "a CUDA driver without a GPU"


def install(wheels=WHEELS, directory=ENVIRONMENT):
    """Make an environment that sees the packages of this Python, and return its Python.

    Collected wheels come before the machine's packages there, and change none of them. torch is not among them.
    """
    venv.EnvBuilder(system_site_packages=True, clear=True, symlinks=True).create(directory)  # without ensurepip
    python = directory / "bin" / "python"
    # If this Python is in an environment itself, the new one would only see the packages below that.
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (place,) = directory.glob("lib/python3.*/site-packages")
    (place / "machine.pth").write_text("\n".join(ours))
    present = {distribution.name.lower() for distribution in distributions()}
    # A wheel for CPUs would hide the machine's ONNX Runtime for CUDA.
    hides = ("onnxruntime-",) if "onnxruntime-gpu" in present else ()
    chosen = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if not wheel.name.startswith(hides or "\0")]
    (carried,) = wheels.glob("pip-*.whl")
    # Images constrain pip by variables such as PIP_CONSTRAINT.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = [str(python), str(carried / "pip"), "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, *chosen], check=True, env=variables)
    subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT)], check=True, env=variables)
    return python


def main():
    """Check, install, and replace this process by the measuring one."""
    try:
        check()
    except FewheadsError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"installing {WHEELS.name} into {ENVIRONMENT.name}", flush=True)
    python = install()
    os.execv(python, [str(python), "-m", "tests.gpu.record"])


if __name__ == "__main__":
    main()

"""``make gpu-wheels``: collect what a machine with a GPU lacks, for Python 3.12 on x86-64, and compile pycuda for it.

The dependencies are those of pyproject.toml. torch and what it requires are never collected.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import tomllib

from tests.gpu import IMAGE, ROOT, WHEELS

EXTRAS = ("cpu", "fast", "jetson", "export", "test")
#: Needed to install the working tree in the end.
TOOLS = ("pip", "hatchling", "editables")
#: What no step imports, with what only that requires, by reason.
UNUSED = {
    "torch and its requirements, of the machine": ("torch", "sympy", "mpmath", "fsspec", "filelock"),
    "speed of servers and of the suite": ("uvloop", "pytest-xdist", "execnet"),
    "images, random tests, coverage": ("pillow", "hypothesis", "sortedcontainers", "coverage"),
    "clients of OpenAI": ("openai", "pydantic", "pydantic-core", "httpx2", "httpcore2", "truststore", "jiter"),
    "clients of Cohere": ("cohere", "fastavro", "types-requests", "httpx", "httpcore", "sniffio"),
    "LangChain": (
        "langchain-openai",
        "langchain-core",
        "langchain-protocol",
        "langsmith",
        "tiktoken",
        "regex",
        "orjson",
    ),
    "more of it": ("xxhash", "zstandard", "jsonpatch", "jsonpointer", "tenacity", "uuid-utils", "requests-toolbelt"),
    "distributions": ("build", "pyproject-hooks"),
    "Python 3.10": ("tomli",),
    "certificates": ("trustme", "cryptography", "cffi", "pycparser"),
    "downloads of models": ("huggingface-hub", "hf-xet", "pyyaml", "tqdm"),
    "routes of inputs, digits, baselines": ("scikit-learn", "joblib", "threadpoolctl", "narwhals"),
    "HTTP clients of Triton": ("aiohttp", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache"),
    "more of them": ("yarl", "geventhttpclient", "gevent", "greenlet", "brotli", "zope-event", "zope-interface"),
}
ELSEWHERE = {*IMAGE, *(name for names in UNUSED.values() for name in names)}
HEADERS = ("cuda_runtime", "cuda_profiler_api")
MIB = 2**20
#: Of the wheels and the working tree together: what a borrowed machine accepts, with a reserve.
LIMIT_MIB = 60


def name_of(requirement):
    """Return the canonical name in a requirement or in the name of a wheel."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def dependencies(extras=EXTRAS):
    """Yield the requirements of the project and some extras, with those that they refer to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from project["dependencies"]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            if inner := re.match(r"fewheads\[(.*)\]", line):
                yield from dependencies(tuple(inner[1].split(",")))
            else:
                yield line


def wanted():
    """Return the requirements to collect; pycuda is compiled, not collected."""
    left_out = {*ELSEWHERE, "pycuda"}
    return [*TOOLS, *sorted({line for line in dependencies() if name_of(line) not in left_out})]


def pip(*arguments, **variables):
    command = [sys.executable, "-m", "pip", *map(str, arguments), "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables})


def compile_pycuda(place, wheels):
    """Compile pycuda's wheel, which needs no more than the driver's libcuda.so.1 from the other machine.

    NVIDIA's wheels hold the headers, and the software driver has every name that the linker looks for.
    """
    pip("download", "--no-deps", "-d", place, *(f"nvidia-{name.replace('_', '-')}-cu12" for name in HEADERS))
    for wheel in place.glob("nvidia_*.whl"):
        shutil.unpack_archive(wheel, place, "zip")
    includes = [str(place / "nvidia" / name / "include") for name in HEADERS]
    subprocess.run([ROOT / "tests/device/driver/build.sh", includes[0], place], check=True)
    # pycuda's setup reads this file from the home directory; pip's settings stay where they are.
    settings = {"CUDA_INC_DIR": includes, "CUDADRV_LIB_DIR": [str(place)], "CUDA_ENABLE_CURAND": False}
    settings |= {"CXXFLAGS": ["-O1", "-g0", "-w"], "LDFLAGS": ["-s"]}
    (place / ".aksetup-defaults.py").write_text("\n".join(f"{name} = {value!r}" for name, value in settings.items()))
    pip_settings = os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config"))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pip" / "gpu-wheels"
    options = ("wheel", "--no-deps", "--no-binary", "pycuda", "--cache-dir", cache, "-w", wheels)
    pip(*options, "pycuda", HOME=str(place), XDG_CONFIG_HOME=pip_settings)
    (wheel,) = wheels.glob("pycuda-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (library,) = [name for name in archive.namelist() if name.startswith("pycuda/_driver")]
        if b"libcuda.so.1" not in archive.read(library):
            sys.exit(f"gpu-wheels: got a pycuda that is not linked to libcuda.so.1, expected one. Delete {cache}.")


def tree_bytes():
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return sum(path.stat().st_size for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def main():
    """Replace the folder of wheels; with names as arguments, of which the machine's Python lacks some of ``IMAGE``."""
    if sys.version_info[:2] != (3, 12):
        sys.exit(f"gpu-wheels: got Python {platform.python_version()}, expected 3.12. Set PYTHON_JETPACK7 to one.")
    collected = {name_of(name) for name in sys.argv[1:]}
    left_out = ELSEWHERE - collected
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch) / "wheels"
        pip("download", "--only-binary=:all:", "-d", wheels, *wanted(), "mako", "platformdirs", "pytools", *collected)
        for wheel in wheels.iterdir():
            if name_of(wheel.name.split("-")[0]) in left_out:
                wheel.unlink()
        print("compiling pycuda: three minutes, once", flush=True)
        compile_pycuda(Path(scratch), wheels)
        shutil.rmtree(WHEELS, ignore_errors=True)
        shutil.copytree(wheels, WHEELS)
    size_mib, tree_mib = sum(wheel.stat().st_size for wheel in WHEELS.iterdir()) / MIB, tree_bytes() / MIB
    both = f"{size_mib + tree_mib:.1f} MiB"
    print(f"{WHEELS.name}: {size_mib:.1f} MiB, with the working tree {both}; a borrowed machine takes {LIMIT_MIB}.")
    print("TensorRT-RTX, 200 MiB and more, is not among them, so its runtime stays untested on the GPU.")
    if not collected and size_mib + tree_mib > LIMIT_MIB:
        sys.exit(f"gpu-wheels: got {both}, expected {LIMIT_MIB} MiB at most. Collect less: tests/gpu/collect.py.")


if __name__ == "__main__":
    main()

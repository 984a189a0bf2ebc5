"""The surface of NVIDIA's TensorRT Python bindings: classes, methods, parameters and enum members of each version.

The wheels hold the bindings alone. They import on a machine without TensorRT and without a GPU once the nine C
functions that they need are stubbed, and pybind11 writes every signature into the docstrings. The directory
``bindings`` beside this file keeps what the double and the programs use, one file for each version, so that no test
needs the network.

``python -m tests.device.bindings`` derives those files again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

#: 10.5 is the oldest one with wheels and the nearest to JetPack 6's 10.3; JetPack 7.2 has 10.16.2.
VERSIONS = ("10.5.0", "10.16.1.11", "11.4.0.106")
DIRECTORY = Path(__file__).with_suffix("")
#: What the double and the programs use.
CLASSES = (
    *("Builder", "Dims", "EngineInspector", "IBuilderConfig", "ICudaEngine", "IExecutionContext", "IGatherLayer"),
    *("IHostMemory", "ILayer", "ILogger", "INetworkDefinition", "IOptimizationProfile", "IProgressMonitor", "ITensor"),
    *("ITimingCache", "Logger", "OnnxParser", "ParserError", "Runtime"),
)
ENUMS = (
    *("BuilderFlag", "DataType", "ExecutionContextAllocationStrategy", "GatherMode", "LayerInformationFormat"),
    *("LayerType", "MemoryPoolType", "NetworkDefinitionCreationFlag", "ProfilingVerbosity", "TensorIOMode"),
    "TensorLocation",
)

_FUNCTIONS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry"),
    *("getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins"),
)
_PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64")


def read(version):
    """Return the kept surface of a version.

    Keys: ``names``, all names of the module; ``enums``, each a map from member to value; ``classes``, each with its
    ``methods`` (a list of parameter names for every overload) and its ``properties`` (``r`` or ``rw``).
    """
    return json.loads((DIRECTORY / f"{version}.json").read_text())


def derive(version, directory):
    """Download the wheel of a version into a directory, import it in a process of its own, and return its surface."""
    with zipfile.ZipFile(_download(version, directory)) as wheel:
        wheel.extractall(directory)
    library = next(directory.glob("*/tensorrt.so"))
    stubs = directory / "stubs"
    stubs.mkdir()
    source = stubs / "stubs.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in _FUNCTIONS))
    for needed in sorted(set(re.findall(rb"libnv(?:infer|onnx)\w*\.so[.\d]*", library.read_bytes()))):
        name = needed.decode()
        command = [compiler() or "cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(stubs / name), str(source)]
        subprocess.run(command, check=True)
    paths = {"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(directory)}
    command = [sys.executable, str(DIRECTORY.with_suffix(".py")), library.parent.name]
    done = subprocess.run(command, check=True, env={**os.environ, **paths}, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def write(surface, path):
    """Write a surface with one class or enum a line, so that a difference shows where it is."""
    parts = []
    for key in ("enums", "classes"):
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in surface[key].items())
        parts.append(f"{json.dumps(key)}: {{\n{lines}\n}}")
    path.write_text(f'{{"names": {json.dumps(surface["names"])},\n' + ",\n".join(parts) + "}\n")


def compiler():
    return shutil.which(os.environ.get("CC", "cc"))


def _download(version, directory):
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    platforms = [argument for platform in _PLATFORMS for argument in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms]
    subprocess.run([*command, "-d", str(directory), f"tensorrt-cu12-bindings=={version}"], check=True)
    return next(directory.glob("*.whl"))


def _surface(module):
    enums = {name: getattr(module, name) for name in ENUMS} | {"ILogger.Severity": module.ILogger.Severity}
    return {
        "names": sorted(name for name in vars(module) if not name.startswith("_")),
        "enums": {name: {m: int(v) for m, v in kind.__members__.items()} for name, kind in sorted(enums.items())},
        "classes": {name: _class(getattr(module, name)) for name in CLASSES if hasattr(module, name)},
    }


def _class(kind):
    methods = {}
    properties = {}
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            properties[name] = "rw" if member.fset else "r"
        elif callable(member) and not isinstance(member, type):
            methods[name] = [_parameters(line) for line in _signatures(name, member.__doc__ or "")]
    return {"methods": methods, "properties": properties}


def _signatures(name, documentation):
    lines = [line for line in documentation.splitlines() if re.match(rf"(\d+\. )?{re.escape(name)}\(", line)]
    return lines[1:] if len(lines) > 1 and "*args" in lines[0] else lines


def _parameters(signature):
    """Return the names of the parameters in a signature as pybind11 writes it, without ``self``."""
    rest, before = signature.partition("(")[2], ""
    while rest != before:
        before, rest = rest, re.sub(r"\[[^][]*\]|\{[^{}]*\}|<[^<>]*>|\([^()]*\)", "", rest)
    names = [re.split("[:=]", part)[0].strip() for part in rest.partition(")")[0].split(",")]
    return [name for name in names if name not in ("", "self", "/", "*")]


def main():
    """Derive the kept files again; with an argument, print the surface of that package as JSON."""
    if len(sys.argv) > 1:
        print(json.dumps(_surface(__import__(sys.argv[1]))))
        return
    DIRECTORY.mkdir(exist_ok=True)
    for version in VERSIONS:
        with TemporaryDirectory() as directory:
            write(derive(version, Path(directory)), DIRECTORY / f"{version}.json")


if __name__ == "__main__":
    main()

import inspect
import re
from enum import Enum
from pathlib import Path

import pytest

from tests.device import bindings
from tests.device.doubles import double
from tests.device.uses import Use, uses

ROOT = Path(__file__).parents[2]
#: Version of the double to the nearest version of the bindings.
DOUBLES = {"10.3.0": "10.5.0", "10.16.2.10": "10.16.1.11", "11.4.1": "11.4.0.106"}
SOURCES = sorted((ROOT / "edge/runtimes").glob("tensorrt*.py"))
#: Uses that some versions lack: the program asks with ``hasattr`` first, or only for TensorRT-RTX.
BRANCHES = {
    ("module", "ComputeCapability"): "TensorRT-RTX compiles for other GPUs, TensorRT for that of the machine",
    ("IBuilderConfig", "num_compute_capabilities"): "as ComputeCapability",
    ("IBuilderConfig", "set_compute_capability"): "as ComputeCapability",
}


def has(surface, owner, name):
    if owner == "module":
        return name in surface["names"] or name.startswith("__")
    if owner in surface["enums"]:
        return name in surface["enums"][owner] or name in ("name", "value", "__members__")
    if owner.startswith("class "):  # a constant of a class, such as ILogger.ERROR
        return name in surface["enums"]["ILogger.Severity"] or has(surface, owner[len("class ") :], name)
    kind = surface["classes"][owner]
    return name in kind["methods"] or name in kind["properties"] or name.startswith("__")


def deviations(module, surface):
    """Yield the differences of the double from the bindings, except missing names."""
    for name in module.__all__:
        if not name.startswith("__") and name not in surface["names"]:
            yield f"{name} does not exist"
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, Enum):
            if {member: kind[member].value for member in kind.__members__} != surface["enums"][name]:
                yield f"{name} has other members"
        elif isinstance(kind, type):
            yield from members(name, kind, surface["classes"][name])


def members(owner, kind, surface):
    for name, member in vars(kind).items():
        if name.startswith("_") and not (name == "__init__" and surface["methods"]["__init__"]):
            continue
        if inspect.isfunction(member):
            parameters = list(inspect.signature(member).parameters)[1:]
            if parameters not in surface["methods"].get(name, []):
                yield f"{owner}.{name}{tuple(parameters)}, expected {surface['methods'].get(name)}"
        elif not isinstance(member, (type, Enum, int)):
            writable = not isinstance(member, property) or member.fset is not None
            found = surface["properties"].get(name)
            if found is None or (writable and found != "rw"):
                yield f"{owner}.{name}, expected {found}"


@pytest.mark.parametrize("version", DOUBLES)
def test_double_has_only_names_of_the_bindings(version):
    module = double(version)
    assert module.__version__ == version
    assert not list(deviations(module, bindings.read(DOUBLES[version])))


def test_double_lacks_names_that_a_version_lacks():
    old, new = double("10.3.0"), double("11.4.1")
    assert hasattr(old.BuilderFlag, "FP16")
    assert not hasattr(new.BuilderFlag, "FP16")
    assert hasattr(old.ICudaEngine, "create_execution_context_without_device_memory")
    assert not hasattr(new.ICudaEngine, "create_execution_context_without_device_memory")
    assert int(old.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 1
    assert int(new.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 0


@pytest.mark.parametrize("version", bindings.VERSIONS)
def test_program_uses_only_names_of_every_version(version):
    surface = bindings.read(version)
    found = [use for source in SOURCES for use in uses(source, surface)]
    missing = [use for use in found if not has(surface, use.owner, use.name) and (use.owner, use.name) not in BRANCHES]
    assert not missing


def test_every_use_of_the_module_is_found():
    surface = bindings.read(bindings.VERSIONS[0])
    for source in SOURCES:
        for name in re.findall(r"\btrt\.([A-Z]\w+)", source.read_text()):
            assert ("module", name) in {use[:2] for use in uses(source, surface)}, source


def test_uses_are_found(tmp_path):
    source = tmp_path / "program.py"
    source.write_text(
        "trt = import_tensorrt('tensorrt')\n"
        "class Engine:\n"
        "    def __init__(self, data):\n"
        "        self.engine = trt.Runtime(logger).deserialize_cuda_engine(data)\n"
        "        self.context = self.engine.create_execution_context()\n"
        "    def run(self, stream):\n"
        "        return self.context.execute_async_v2(stream)\n"
        "def axis(layer):\n"
        "    layer.__class__ = trt.IGatherLayer\n"
        "    return layer.dimension\n"
    )
    assert Use("IGatherLayer", "dimension", "program.py:10") in uses(source, bindings.read("10.5.0"))
    assert Use("IExecutionContext", "execute_async_v2", "program.py:7") in uses(source, bindings.read("10.5.0"))


@pytest.mark.slow
@pytest.mark.parametrize("version", bindings.VERSIONS)
def test_stored_surface_is_that_of_the_wheel(version, tmp_path):
    if bindings.compiler() is None:
        pytest.skip("needs a C compiler")
    derived = tmp_path / "derived.json"
    bindings.write(bindings.derive(version, tmp_path), derived)
    assert derived.read_text() == (bindings.DIRECTORY / f"{version}.json").read_text()

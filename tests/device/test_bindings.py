import ast
import inspect
from enum import Enum
from pathlib import Path

import pytest

from tests.device import bindings
from tests.device.doubles import double

ROOT = Path(__file__).parents[2]
#: Version of the double to the nearest version of the bindings.
DOUBLES = {"10.3.0": "10.5.0", "10.16.2.10": "10.16.1.11", "11.4.1": "11.4.0.106"}
#: The name that the program uses and every version lacks: a class of TensorRT-RTX alone.
NOWHERE = {"ComputeCapability"}


def all_names(surface):
    found = set(surface["names"]).union(*surface["enums"].values())
    return found.union(*(kind[part] for kind in surface["classes"].values() for part in ("methods", "properties")))


def deviations(module, surface):
    """Yield the differences of the double from the bindings, except missing names."""
    for name, kind in vars(module).items():
        if name.startswith("_") or inspect.ismodule(kind):
            continue
        if name not in surface["names"]:
            yield f"{name} does not exist"
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


def test_program_uses_only_names_of_every_version():
    sources = (ROOT / "edge/runtimes/tensorrt").glob("*.py")
    nodes = [node for source in sources for node in ast.walk(ast.parse(source.read_text()))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    surfaces = [all_names(bindings.read(version)) for version in bindings.VERSIONS]
    some, every = set.union(*surfaces), set.intersection(*surfaces)
    assert not {node.attr for node in attributes} & (some - every)
    module = {node.attr for node in attributes if ast.unparse(node.value) in ("trt", "tensorrt")}
    assert {name for name in module - some if not name.startswith("__")} == NOWHERE
    assert {name for name in module & some if name[0].isupper()} <= {*bindings.CLASSES, *bindings.ENUMS}, "keep it, too"


@pytest.mark.slow
@pytest.mark.parametrize("version", bindings.VERSIONS)
def test_stored_surface_is_that_of_the_wheel(version, tmp_path):
    if bindings.compiler() is None:
        pytest.skip("needs a C compiler")
    derived = tmp_path / "derived.json"
    bindings.write(bindings.derive(version, tmp_path), derived)
    assert derived.read_text() == (bindings.DIRECTORY / f"{version}.json").read_text()

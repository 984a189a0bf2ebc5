"""Import rules of the architecture, read from the sources, and the generated messages."""

import ast
import importlib.util
import subprocess
import sys
from itertools import permutations
from typing import get_args

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto
from tritonclient.grpc import service_pb2  # noqa: F401 (it adds its messages to the default pool)

from edge.pb import inference_pb2
from edge.runtimes.tensorrt.package import Flavor
from tests.support.imports import (
    EDGE,
    EXPORT,
    EXPORT_LEAVES,
    EXPORT_ORDER,
    GENERATED,
    ORDER,
    ROOT,
    WRITTEN,
    graph_of,
    imports,
    module_of,
    name_of,
    part_of,
    reached,
    sources,
    tree_of,
)

HEAVY = ("torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "pycuda", "opentelemetry", "matplotlib", "PIL")
#: Package to the only parts of edge/ that may import it. TensorRT is imported by import_module only, see below.
OWNERS = {
    "grpc": ("edge/client/", "edge/grpcio/", "edge/bench/sender.py"),
    "grpc_health": ("edge/rpc/",),
    "grpc_reflection": ("edge/rpc/",),
    "ngh2": ("edge/settings.py", "edge/http2/"),
    "prometheus_client": ("edge/telemetry/board.py", "edge/telemetry/metrics.py"),
    "opentelemetry": ("edge/serving/traces.py",),
    "onnxruntime": ("edge/runtimes/onnxruntime_runner.py",),
    "pycuda": ("edge/runtimes/cuda.py",),
    "starlette": ("edge/rest/",),
    "h11": ("edge/http/",),
    "uvloop": ("edge/cli/serve.py",),
    "click": ("edge/__main__.py", "edge/cli/"),
    "rich": ("edge/cli/",),
    "PIL": ("edge/bundles/image.py",),
    **dict.fromkeys(("matplotlib", "tensorrt", "tensorrt_rtx", "torch", "onnx", "tritonclient", "export", "tests"), ()),
}
#: The packages that see the protocol's messages; others get tensors and plain values.
USERS_OF_MESSAGES = {"serving", "telemetry", "rpc", "rest", "client", "bench"}
#: The parts of edge/ that the workstation uses: it writes bundles, and neither serves nor calls a server.
FOR_EXPORT = {
    *("", "__version__", "errors", "datatypes", "files", "child", "runner", "bundles", "runtimes", "instruments"),
    *("bench", "programs", "protocol", "pb", "cli"),
}


def users_of(package):
    return {found.file for found in imports(EDGE) if found.is_of(package)}


def test_packages_are_imported_by_their_owners_only():
    for package, owners in OWNERS.items():
        users = users_of(package)
        assert [file for file in users if not file.startswith(owners)] == []
        assert [owner for owner in owners if not any(file.startswith(owner) for file in users)] == []
    eager = [f for f in imports(EDGE) if any(f.is_of(heavy) for heavy in HEAVY) and not f.lazy and not f.typing]
    assert not eager


def test_imports_by_name():
    """TensorRT is imported by a string, and nothing else is but commands and the client's names."""
    ways = {"import_module", "__import__", "load", "spec_from_file_location", "exec", "eval", "run_module", "run_path"}
    found = set()
    for path in EDGE:
        for call in ast.walk(tree_of(path)):
            if isinstance(call, ast.Call):
                name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
                # Arrays, models and images are no modules.
                others = ("np.load(", "runtime.load(", "super().load(", "image.load(")
                if name in ways and not ast.unparse(call).startswith(others):
                    found.add((name_of(path), ast.unparse(call)))
    assert found == {
        ("edge/runtimes/tensorrt/package.py", "import_module(flavor)"),
        ("edge/__main__.py", "point.load()"),  # the commands' entry points
    }
    assert set(get_args(Flavor)) == {"tensorrt", "tensorrt_rtx"}


def test_few_files_read_the_environment():
    names = {"environ", "environb", "getenv", "putenv"}
    readers = {
        name_of(path)
        for path in [*EDGE, *EXPORT]
        for node in ast.walk(tree_of(path))
        if getattr(node, "attr", "") in names
        or (isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & names)
    }
    script = "export/papers/backward/generate_mathematics.py"  # it starts itself again with a fixed seed of hashes
    jobs = "export/training/jobs.py"  # each has one thread, and may have a GPU of its own
    serve = "edge/cli/serve.py"  # sets what gRPC's core logs
    variables = "edge/cli/configuration.py"  # refuses those that no option has
    launch = "edge/launch.py"  # keeps the variables of a server from another one
    device = {"edge/runtimes/cache.py", launch, "edge/health/supervisor.py", "edge/cli/doctor.py", serve, variables}
    assert readers == {*device, script, jobs}


def test_no_part_of_edge_imports_a_later_one():
    assert {part_of(module_of(path)) for path in EDGE} - {""} == set(ORDER)

    def is_upward(found):
        here, there = part_of(found.file.removesuffix(".py").replace("/", ".")), part_of(found.module)
        return found.is_of("edge") and {here, there} <= set(ORDER) and ORDER.index(here) < ORDER.index(there)

    assert not [found for found in imports(EDGE) if is_upward(found)]
    leaves = ("edge/errors.py", "edge/datatypes.py")
    assert not [found for found in imports(EDGE) if found.file in leaves and found.is_of("edge")]


@pytest.mark.parametrize("files", [WRITTEN, EXPORT], ids=["edge", "export"])
def test_no_module_imports_itself_in_a_circle(files):
    graph = graph_of(files)
    assert not [module for module in graph if module in reached(graph, module)]


def test_messages_commands_and_transports_stay_in_their_packages():
    users = {file for file in users_of("edge.pb") if not file.startswith(GENERATED)}
    assert {file.split("/")[1] for file in users} == USERS_OF_MESSAGES
    assert all(file.startswith("edge/cli/") for file in users_of("edge.cli"))
    for transport in ("grpcio", "http2", "rest"):
        users = users_of(f"edge.{transport}")
        assert {file for file in users if not file.startswith(f"edge/{transport}/")} == {"edge/assembly.py"}


def test_export_reaches_no_part_of_the_server():
    graph = graph_of([*EDGE, *EXPORT], only_at_import=True)
    for found in imports(EXPORT):
        assert not found.is_of("grpc")
        modules = {found.module} | reached(graph, found.module)
        wrong = {module for module in modules if module.startswith("edge.") and part_of(module) not in FOR_EXPORT}
        assert not wrong, f"{found.file}:{found.line} by {found.module}"


def test_no_room_of_export_imports_a_later_one_and_no_paper_another():
    assert {part_of(module_of(path)) for path in EXPORT} - {""} == set(EXPORT_ORDER)
    levels = {name: level for level, name in enumerate(EXPORT_ORDER)}
    for found in imports(EXPORT):
        here, there = part_of(module_of(ROOT / found.file)), part_of(found.module)
        if found.is_of("export") and here and found.module not in EXPORT_LEAVES:
            here = "training" if module_of(ROOT / found.file) in EXPORT_LEAVES else here
            assert levels[there] <= levels[here], f"{found.file}:{found.line}"
    papers = {path.parent.name for path in (ROOT / "export" / "papers").glob("*/__init__.py")}
    for paper, other in permutations(papers, 2):
        uses = imports(sources(f"export/papers/{paper}"))
        assert not [found for found in uses if found.is_of(f"export.papers.{other}")]


def imported_by(*modules):
    """Return the modules that a new process has loaded after it imported ``modules``."""
    code = f"import {', '.join(modules)}, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_imports_load_no_runtime():
    assert not {"numpy", "msgspec", "grpc", "click", *HEAVY} & imported_by("edge")
    modules = [module_of(path) for path in EDGE]
    loaded = imported_by(*modules)
    assert set(modules) <= loaded
    assert not set(HEAVY) & loaded


def test_exporter_takes_little_memory():
    assert not {"numpy", "grpc", "google.protobuf", "starlette"} & imported_by("edge.cli.exporter", "edge.exporter")


def test_server_models_and_commands_load_without_grpc():
    wanted = ["runtimes.build", "server", "http2.server", "rest.paths", "__main__"]
    commands = [module_of(path) for path in EDGE if path.parent.name == "cli"]
    assert "grpc" not in imported_by(*(f"edge.{module}" for module in wanted), *commands)


OURS = inference_pb2.DESCRIPTOR
THEIRS = descriptor_pool.Default()


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpc_tools (extra 'dev') generates them")
def test_generated_files_are_fresh(tmp_path):
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == 4
    for name, data in made.items():
        assert (ROOT / name).read_bytes() == data, f"{name} is stale: run make generate"
    kept = {path.name for path in (ROOT / "edge" / "pb").iterdir() if path.is_file()}
    assert kept == {name.name for name in made} | {"__init__.py", "pool.py"}


def fields(message):
    """Return everything of each field that both sides of a wire must agree on."""
    described = DescriptorProto()
    message.CopyToProto(described)
    return {field.name: field.SerializeToString() for field in described.field}


def test_messages_enums_and_rpcs_are_tritons():
    messages, enums = list(OURS.message_types_by_name.values()), list(OURS.enum_types_by_name.values())
    while messages:
        message = messages.pop()
        messages += message.nested_types
        theirs = THEIRS.FindMessageTypeByName(message.full_name)
        assert fields(message).items() <= fields(theirs).items()
        assert message.GetOptions().map_entry == theirs.GetOptions().map_entry
        enums += message.enum_types
    assert {enum.name for enum in enums} == {"DataType", "Kind"}
    for enum in enums:
        other = THEIRS.FindEnumTypeByName(enum.full_name)
        assert {(v.name, v.number) for v in enum.values} <= {(v.name, v.number) for v in other.values}
    (service,) = OURS.services_by_name.values()
    for method in service.methods:
        other = THEIRS.FindServiceByName(service.full_name).methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)

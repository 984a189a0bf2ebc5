"""Manifests for Kubernetes and KServe: their schemas, and the server that they start."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from edge.cli.serve import serve
from edge.client import Client, text
from edge.launch import serving
from tests.support.http_requests import ask
from tests.support.models import ORACLE_BUNDLE
from tests.support.server_processes import SERVING, health_of

yaml = pytest.importorskip("yaml")
DIRECTORY = Path(__file__).parents[1] / "deploy" / "kserve"
#: Releases of Kubernetes: the oldest supported one, and a new one.
VERSIONS = ("1.30", "1.37")
KSERVE = Path(__file__).parent / "data" / "kserve.json"


def documents(file):
    return list(yaml.safe_load_all((DIRECTORY / file).read_text()))


def container(file):
    spec = documents(file)[-1]["spec"]
    return (spec["template"]["spec"] if "template" in spec else spec)["containers"][0]


@functools.cache
def read(file):
    return json.loads(file.read_text())


def errors(document, version):
    """Return the violations of the schemas of a release of Kubernetes and of KServe 0.21."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    folder = Path(validate.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    registry = referencing.Resource.from_contents(read(folder / "_definitions.json")) @ referencing.Registry()
    kind, kinds = document["kind"], read(KSERVE)["kinds"]
    if kind in kinds:
        assert document["apiVersion"] == kinds[kind]["apiVersion"]
        schema = {**read(KSERVE), "$ref": f"#/$defs/{kind}"}
    else:
        schema = read(folder / f"{'-'.join([kind.lower(), *document['apiVersion'].split('/')])}.json")
    found = jsonschema.Draft202012Validator(schema, registry=registry).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


MANIFESTS = [
    pytest.param(document, id=f"{file.stem}-{document['kind']}")
    for file in sorted(DIRECTORY.glob("*.yaml"))
    for document in documents(file.name)
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", MANIFESTS)
def test_manifests_follow_the_schemas(document, version):
    assert errors(document, version) == []


@pytest.mark.parametrize("file", ["serving-runtime.yaml", "k3s.yaml"])
def test_manifests_give_the_server_options_and_ports_that_exist(file):
    found = container(file)
    command, *arguments = found["args"]
    assert command == "serve"
    assert "command" not in found, "it would replace the image's entry point, and its checks"
    assert "/etc/nv_tegra_release" in {mount["mountPath"] for mount in found["volumeMounts"]}
    context = serve.make_context("serve", list(arguments))
    assert context.params["repository"] == Path("/mnt/models")
    names = ("grpc_port", "http_port", "metrics_port")
    ports = {f"{port['name'].replace('h2c', 'grpc')}_port": port["containerPort"] for port in found["ports"]}
    assert ports == {name: context.params[name] for name in names}
    assert found["readinessProbe"]["grpc"] == {"port": context.params["grpc_port"]}
    assert found["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": context.params["http_port"]}
    assert context.params["cache"] in {Path(mount["mountPath"]) for mount in found["volumeMounts"]}


@pytest.mark.slow
def test_started_server_answers_the_probes(tmp_path):
    """KServe copies the contents of its URI into /mnt/models; here they are one bundle."""
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "models")
    found = container("serving-runtime.yaml")
    changed = ("--host", "--grpc-port", "--http-port", "--metrics-port", "--cache")
    arguments = [argument for argument in found["args"][2:] if not argument.startswith(changed)]
    with serving(tmp_path / "models", cache=tmp_path / "cache", arguments=[*arguments, "--http-port=0"]) as ready:
        assert health_of(ready, "") == [SERVING]
        path = found["livenessProbe"]["httpGet"]["path"]
        assert ask(f"127.0.0.1:{ready.http_port}", path).status == 200
        with Client(f"127.0.0.1:{ready.grpc_port}") as client:
            result = client.infer("calculator-oracle", {"expression": text(["1 + 1"])})
    assert result.outputs["value"][0, 0] == 2


def test_pod_has_time_to_drain():
    (service,), pod = documents("inference-service.yaml"), documents("k3s.yaml")[-1]["spec"]["template"]["spec"]
    for file, spec in (("serving-runtime.yaml", service["spec"]["predictor"]), ("k3s.yaml", pod)):
        found, grace = container(file), spec["terminationGracePeriodSeconds"]
        drain = serve.make_context("serve", list(found["args"][1:])).params["drain_seconds"]
        assert found["lifecycle"]["preStop"]["sleep"]["seconds"] + drain + 3 < grace


def test_service_requests_a_format_of_the_runtime():
    (runtime,), (service,) = documents("serving-runtime.yaml"), documents("inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    offered = [(one["name"], one["version"]) for one in runtime["spec"]["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in offered

"""A board keeps after an update: bundles and their answers, metrics, telemetry, the client, and records."""

import json
import subprocess
import sys
import urllib.request

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from tests.compatibility.changes import announced, copy_image, server, signatures, types
from tests.compatibility.paths import BUNDLES, DATA, OLDER_BUNDLES, board_families, program, public, telemetry_messages
from tests.support.boards import orin_nano

#: Options of the requests for a text; its log-probabilities show more of the logits than the text does.
GENERATED = {"max_tokens": 8, "logprobs": True}


def data(name):
    return json.loads((DATA / name).read_text())


def test_every_file_of_every_bundle_computes_its_golden_outputs(tmp_path):
    options = ("--target=onnxruntime", f"--cache={tmp_path}", "--json")
    bundles = map(str, (*BUNDLES, *OLDER_BUNDLES))
    done = CliRunner().invoke(program(), ["build", *bundles, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    built = [one["build"] for one in json.loads(done.stdout)]
    assert {one["name"] for one in built} == {path.name[:-2] for path in (*BUNDLES, *OLDER_BUNDLES)}
    checked = {(one["name"], one["tier"], one["key"]["role"]) for one in built if one["golden"]}
    assert {("text", "lean-int8", "model"), ("looped-linear", "lean", "step"), ("head", "x1", "head")} <= checked
    assert len(checked) > len(BUNDLES)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a directory with the files of the container's image, and the announcement of the server in it."""
    root = tmp_path_factory.mktemp("image")
    (root / "cache").mkdir()
    image = copy_image(root / "image")
    with server(image, DATA / "bundles", root / "cache") as ready:
        yield image, ready


def test_the_image_serves_every_bundle_with_the_same_answers(served):
    image, ready = served
    assert {name.partition(":")[0] for name in ready["ready"]} == {path.name[:-2] for path in BUNDLES}
    cases = {}
    with np.load(DATA / "answers.npz") as arrays:
        for key, array in arrays.items():
            model, tier, head, direction, name = key.split("/")
            cases.setdefault(f"{model}/{tier}/{head}", {}).setdefault(direction, {})[name] = array
    url = f"127.0.0.1:{ready['grpc_port']}"
    with public("edge.client", "Client")(url) as client:
        for case, tensors in cases.items():
            model, tier, head = case.split("/")
            options = {**(GENERATED if model == "language" else {}), **({"head": head, "alpha": 40.0} if head else {})}
            outputs = client.infer(model, tensors["inputs"], tier=tier, **options).outputs
            assert outputs.keys() == tensors["outputs"].keys(), case
            for name, expected in tensors["outputs"].items():
                if expected.dtype.kind == "f":  # the order of sums, and INT8's products, differ between processors
                    limit = 0.02 if "int8" in tier else 1e-4
                    np.testing.assert_allclose(outputs[name], expected, limit, limit, err_msg=f"{case} {name}")
                else:
                    assert outputs[name].tolist() == expected.tolist(), (case, name)
    script = image / "opt" / "fewheads" / "container" / "healthcheck.py"
    environment = {"PYTHONPATH": str(image), "PATH": ""}
    checked = subprocess.run([sys.executable, script, url], capture_output=True, text=True, env=environment, timeout=60)
    assert checked.stdout == "ready\n", checked.stderr


def test_server_and_jetson_have_every_metric(served, tmp_path):
    with urllib.request.urlopen(f"http://127.0.0.1:{served[1]['metrics_port']}/metrics", timeout=20) as page:
        found = types(text_string_to_metric_families(page.read().decode()))
    found_on_board = types(board_families(orin_nano(tmp_path, 6)))
    expected = data("metrics.json")
    assert {name: found.get(name) for name in expected["server"]} == expected["server"]
    assert {name: found_on_board.get(name) for name in expected["board"]} == expected["board"]


def test_telemetry_has_every_field_with_its_number_and_type():
    messages = telemetry_messages().message_types_by_name
    for name, expected in data("telemetry.json").items():
        fields = messages[name.rpartition(".")[2]].fields
        found = {one.name: [one.number, one.type, one.is_repeated, one.has_presence] for one in fields}
        assert {field: found.get(field) for field in expected} == expected, name


def test_the_client_keeps_its_names_and_parameters():
    for name, methods in data("client.json").items():
        if announced(name) or announced(name.removeprefix("edge.client.")):
            continue
        found = signatures(public(*name.rpartition(".")[::2]))
        for method, parameters in methods.items():
            assert method in found, (name, method)
            expected = [one for one in parameters if one in found[method] or not announced(one.partition("=")[0])]
            assert [one for one in found[method] if one in parameters] == expected, (name, method)
            added = [one for one in found[method] if one not in parameters]
            assert all("=" in one for one in added), (name, method, added)


def test_scripts_on_a_device_find_what_they_import():
    for name in data("imports.json"):
        assert announced(name) or public(*name.rpartition(".")[::2]) is not None


def test_a_record_of_a_board_reads_back_equal_and_has_the_same_table():
    path = DATA / "device_record.json"
    record = public("deploy.device_table", "read_record")(path)
    assert json.loads(msgspec.json.encode(record)) == data(path.name)
    shown = CliRunner().invoke(public("deploy.device_table", "table"), [str(path)], catch_exceptions=False)
    assert shown.stdout == (DATA / "device_table.md").read_text()

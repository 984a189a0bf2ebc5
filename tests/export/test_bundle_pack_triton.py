"""Bundles of Triton's model repositories: their configurations, what is refused, and hostile ones."""

import json
import os
from contextlib import closing

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Serving
from edge.errors import UsageError
from edge.runtimes.build import load_runner
from export.cli.pack import pack
from tests.support.onnx_graphs import model_of, node, value
from tests.support.task_data import invoke
from tests.support.triton_repository import LABELS, RESHAPED, reshaped, unbatched, write_model, write_repository


def packed(repository, *options):
    arguments = (repository, "--triton", "--repository", repository.parent / "bundles", "--json", *options)
    return json.loads(invoke(pack, *arguments))


def computed(bundle, x, directory):
    with closing(load_runner(bundle, "onnxruntime", directory / "cache").runner) as runner:
        return runner.infer({"x": x})


def test_clients_of_triton_get_the_same_tensors(tmp_path):
    """Their values are compared with a real Triton's in tests/conformance."""
    first, *others = packed(write_repository(tmp_path / "triton"))
    assert first["not_taken"] == ["dynamic_batching.preserve_ordering", "model_warmup", "instance_group"]
    bundles = [Bundle.open(one["bundle"]) for one in (first, *others)]
    assert [bundle.path.name for bundle in bundles] == ["reshaped-1", "unbatched-1", "unbatched-3"]
    manifest = bundles[0].manifest
    assert (manifest.max_batch_size, manifest.postprocess.labels) == (4, LABELS)
    assert manifest.serving == Serving(max_queue_delay_us=100, preferred_batch_sizes=(2, 4))
    column, numbers = np.array([[1], [-2]], np.float32), np.arange(6, dtype=np.float32)
    found = computed(bundles[0], column, tmp_path)
    np.testing.assert_array_equal(found["same"], -column)
    assert [LABELS[place] for place in found["logits"].argmax(axis=1)] == ["green", "blue"]
    for factor, bundle in ((2, bundles[1]), (3, bundles[2])):
        found = computed(bundle, numbers.reshape(2, 3), tmp_path)
        np.testing.assert_array_equal(found["y"], factor * numbers)


def test_a_model_without_a_configuration_has_that_of_its_file(tmp_path):
    write_model(tmp_path / "triton" / "plain", None, {1: reshaped(), 2: reshaped()})
    (one,) = packed(tmp_path / "triton")
    assert (one["bundle"].rpartition("/")[2], one["max_batch_size"]) == ("plain-2", 8)


def test_what_cannot_be_packed_leaves_the_others(tmp_path):
    repository = write_repository(tmp_path / "triton")
    write_model(repository / "ResNet", None, {1: reshaped()})
    (repository / "unbatched" / "2").mkdir()
    (repository / "unbatched" / "2" / "model.onnx").write_bytes(b"no model")
    write_model(repository / "steps", 'platform: "ensemble" ensemble_scheduling { step [ { model_name: "a" } ] }', {})
    arguments = [str(repository), "--triton", "--repository", str(tmp_path / "bundles")]
    result = CliRunner().invoke(pack, arguments)
    assert isinstance(result.exception, UsageError)
    assert "got 3 left out" in str(result.exception)
    assert "ResNet is left out: name of " in result.stderr
    assert "unbatched-2 is left out: " in result.stderr
    assert "steps is left out: " in result.stderr
    assert "bundles/reshaped-1: a bundle has no place for dynamic_batching.preserve_ordering," in result.stderr
    assert "10/10" in result.stderr  # the bar: three steps of each bundle, and one of what is no model
    assert len(list((tmp_path / "bundles").glob("*/manifest.json"))) == 3


def test_labels_are_of_the_output_that_names_them(tmp_path):
    graph = model_of(
        [node("Neg", ["x"], ["a"]), node("Neg", ["x"], ["b"])],
        [value("x", ("n", 3))],
        [value("a", ("n", 3)), value("b", ("n", 3))],
    )
    config = 'max_batch_size: 2 output { name: "b" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }'
    write_model(tmp_path / "triton" / "two", config, {1: graph})
    (one,) = packed(tmp_path / "triton")
    assert Bundle.open(one["bundle"]).manifest.postprocess.logits == "b"


OWN = RESHAPED.replace("reshaped", "m")
INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { shape: [ ] } }'


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("input {", r'config.pbtxt: got 1:7 : Expected "}", expected Triton\'s configuration of a model as protobuf'),
        (b"\xff", "config.pbtxt: got 'utf-8' codec .*, expected Triton's configuration"),
        ("x {" * 3000 + "}" * 3000, "config.pbtxt: got maximum recursion depth exceeded, expected Triton's conf"),
        ("#" * 300_000, "config.pbtxt: got 300000 bytes, expected at most 262144"),
        ('name: "other"', "config.pbtxt name: got 'other', expected m. Give both the same name"),
        ('backend: "python"', "config.pbtxt backend: got 'python', expected onnxruntime. Export the model to ONNX"),
        ('platform: "tensorrt_plan"', "config.pbtxt backend: got 'tensorrt_plan', expected onnxruntime"),
        ("sequence_batching { }", "sequence_batching: got requests that depend on .*, expected one ONNX model. Leave"),
        ("optional { } } sequence_batching { }", "config.pbtxt: got .*, expected Triton's configuration"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }",
            r"size: got \[8\], expected at most 16 s.* 4",
        ),
        ("max_batch_size: 9999", "max_batch_size: got 9999, expected 0 to 4096"),
        ("version_policy { specific { versions: 7 } }", "versions of .*: got none with the name 7, expected a dir"),
        (f"{INPUT} max_batch_size: 0", r"input 'x' dims: got \[\], expected dims that fit \[-1\] of .*model.onnx"),
        (f"max_batch_size: 4 {INPUT}".replace("FP32", "INT64"), "data_type: got TYPE_INT64, expected TYPE_FP32, as"),
        (f"max_batch_size: 4 {INPUT}".replace("TYPE_FP32", "99"), "data_type: got 99, expected TYPE_FP32, as"),
        (
            f"max_batch_size: 4 {INPUT}".replace("dims: 1", "dims: 0"),
            r"dims: got \[\[0\], \[\]\], expected sizes above 0",
        ),
        (f"max_batch_size: 4 {INPUT}".replace("dims: 1", "dims: 2"), r"reshape: got \[\], expected as many .*, \[2\]"),
        (f"max_batch_size: 4 {INPUT}".replace('"x"', '"z"'), r"input: got \['z'\], expected all inputs of .*: \['x'\]"),
        ('output { name: "z" data_type: TYPE_FP32 dims: 1 }', r"output 'z': got no tensor of it, expected one of .*"),
        (
            OWN.replace("labels.txt", "../../labels.txt"),
            "got .*labels.txt, expected a pat",
        ),
        (
            OWN.replace("labels.txt", "/etc/passwd"),
            "got /etc/passwd, expected a path ins",
        ),
        (
            OWN.replace("labels.txt", r"\000"),
            "got .*null byte, expected a path inside",
        ),
        (
            OWN.replace("labels.txt", "no.txt"),
            "got No such file .*, expected a regular f",
        ),
        ('default_model_filename: "../../../other.onnx"', "got .*other.onnx, expected a path inside of .*m. Copy it"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path, config, message):
    place = write_model(tmp_path / "triton" / "m", None, {1: reshaped()})
    (place / "config.pbtxt").write_bytes(config if isinstance(config, bytes) else config.encode())
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    with pytest.raises(UsageError, match=message):
        packed(tmp_path / "triton", "--name", "m")
    assert not (tmp_path / "bundles").exists()


def test_weights_outside_of_the_version_are_refused(tmp_path):
    place = write_model(tmp_path / "triton" / "m", None, {1: b""})
    model, outside = onnx.load_from_string(unbatched(2)), tmp_path / "secret.bin"
    outside.write_bytes(bytes(4))
    weights = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(weights, "../../../secret.bin")
    weights.ClearField("raw_data")
    (place / "1" / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match=r"weights of .*model.onnx: got .* should be file inside "):
        packed(tmp_path / "triton", "--name", "m")


def test_links_pipes_and_places_that_are_no_models(tmp_path):
    outside, repository = tmp_path / "outside.onnx", tmp_path / "triton"
    outside.write_bytes(unbatched(2))
    place = write_model(repository / "m", None, {1: b"", 2: unbatched(2)})
    model = place / "2" / "model.onnx"
    model.rename(place / "2" / "weights.onnx")
    model.symlink_to("weights.onnx")
    packed(repository)  # a link inside of the model's directory
    model.unlink()
    model.symlink_to(outside)
    with pytest.raises(UsageError, match=r"model.onnx: got .*outside.onnx, expected a path inside of .*m\. Copy it"):
        packed(repository, "--name", "m")
    model.unlink()
    model.symlink_to(model.name)
    with pytest.raises(UsageError, match=r"model.onnx: got Symlink loop .*, expected a path inside of .*m\. Correct"):
        packed(repository, "--name", "m")
    model.unlink()
    os.mkfifo(model)
    with pytest.raises(UsageError, match=r"model.onnx: got something else, expected a regular file"):
        packed(repository, "--name", "m")
    model.unlink()
    with pytest.raises(UsageError, match=r"model.onnx: got No such file or directory, expected a regular file"):
        packed(repository, "--name", "m")
    (repository / "away").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"away: got .*, expected a path inside of .*triton"):
        packed(repository)
    (repository / "away").unlink()
    with pytest.raises(UsageError, match=r"--name: got 'n', expected a model of .*triton: m\. Leave it out"):
        packed(repository, "--name", "n")
    with pytest.raises(UsageError, match="expected a model repository of Triton"):
        packed(tmp_path / "nothing")
    (place / "config.pbtxt").write_text("")
    with pytest.raises(UsageError, match=r"got the directory of one model, expected .* Give the directory above"):
        packed(place)
    with pytest.raises(UsageError, match="--version: expected --triton without it"):
        packed(repository, "--version", 2)

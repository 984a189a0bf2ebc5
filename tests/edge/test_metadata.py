"""Readiness, configuration, statistics and index of real models, without a transport."""

import shutil

import pytest
from google.protobuf.json_format import MessageToDict
from msgspec.structs import replace

from edge import __version__
from edge.bundles.bundle import write_bundle
from edge.errors import InvalidRequest
from edge.health.health import Health
from edge.pb import inference_pb2 as pb
from edge.repository.loader import ServingOptions
from edge.serving.metadata import Metadata
from tests.support import text_model
from tests.support.in_process import running_service
from tests.support.models import ORACLE, ORACLE_BUNDLE, write_oracle_bundle
from tests.support.sample_requests import good, shaped

SPACE = "0123456789abcdef"


def write_bundles(repository):
    write_oracle_bundle(repository / "first")
    shutil.copytree(ORACLE_BUNDLE, repository / "broken")
    (repository / "broken" / "model.onnx").write_bytes(b"broken")


@pytest.fixture
async def running(tmp_path):
    slow = ServingOptions(max_queue_delay_us=1500)
    async with running_service(tmp_path, write_bundles, target="simulated:20", device_bound=True, serving=slow) as it:
        yield it


def described(of, **options):
    return Metadata(of.repository, of.scheduler, Health(of.repository, of.scheduler.runs), **options)


async def test_readiness(running):
    for strict in (True, False):
        health = Health(running.repository, running.scheduler.runs, strict_readiness=strict)
        metadata = Metadata(running.repository, running.scheduler, health)
        for change, takes_requests in ((lambda: None, False), (health.accept, True), (health.drain, False)):
            change()
            assert metadata.server_ready() == (takes_requests and not strict)  # one bundle is broken
            assert metadata.model_ready(pb.ModelReadyRequest(name=ORACLE)) == takes_requests
            assert not metadata.model_ready(pb.ModelReadyRequest(name="broken"))
        health.accept()
        assert not metadata.model_ready(pb.ModelReadyRequest(name=ORACLE))  # a drain is for good


async def test_metadata_of_server_and_model(running):
    metadata = described(running, extensions=("logging",))
    extensions = ["binary_tensor_data", "classification", "model_configuration", "parameters", "schedule_policy"]
    extensions += ["statistics", "logging"]
    server = MessageToDict(metadata.server_metadata())
    assert server == {"name": "fewheads", "version": __version__, "extensions": extensions}
    assert MessageToDict(await metadata.model_metadata(pb.ModelMetadataRequest(name=ORACLE))) == {
        "name": ORACLE,
        "versions": ["1"],
        "platform": "simulated_onnx",
        "inputs": [
            {"name": "expression", "datatype": "BYTES", "shape": ["-1", "1"]},
            {"name": "x", "datatype": "FP32", "shape": ["-1", "15"]},
        ],
        "outputs": [{"name": "value", "datatype": "FP32", "shape": ["-1", "1"]}],
    }


async def test_configuration(running, tmp_path):
    async def config(of, **options):
        response = await described(of, **options).model_config(pb.ModelConfigRequest(name=ORACLE))
        return MessageToDict(response.config, preserving_proto_field_name=True)

    found = await config(running, default_timeout_seconds=1.5)
    batching = found.pop("dynamic_batching")
    policy = batching.pop("default_queue_policy")
    assert policy == {"default_timeout_microseconds": "1500000", "allow_timeout_override": True, "max_queue_size": 256}
    levels = {"priority_levels": "10", "default_priority_level": "5"}
    assert batching == {"max_queue_delay_microseconds": "1500", **levels}
    parameters = {name: value["string_value"] for name, value in found.pop("parameters").items()}
    reason = {"runtime": "simulated", "runtime_reason": "The target names it."}
    assert parameters == {**reason, "golden_max_abs_diff": "0", "preprocess": "expression"}
    assert found == {
        "name": ORACLE,
        "platform": "simulated_onnx",
        "backend": "simulated",
        "version_policy": {"specific": {"versions": ["1"]}},
        "max_batch_size": 64,
        "input": [
            {"name": "expression", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
            {"name": "x", "data_type": "TYPE_FP32", "dims": ["15"], "optional": True},
        ],
        "output": [{"name": "value", "data_type": "TYPE_FP32", "dims": ["1"]}],
        "instance_group": [{"name": f"{ORACLE}_0", "count": 1, "kind": "KIND_GPU"}],
        "default_model_filename": "model.onnx",
    }
    assert "default_timeout_microseconds" not in (await config(running))["dynamic_batching"]["default_queue_policy"]
    async with running_service(tmp_path / "cpu") as other:
        assert (await config(other))["instance_group"][0]["kind"] == "KIND_CPU"


@pytest.mark.parametrize("spaces", [(SPACE, SPACE), (SPACE, None), (None, None)])
async def test_a_configuration_names_tiers_and_the_space_that_all_of_them_share(tmp_path, spaces):
    manifest = replace(text_model.manifest(), program=None, postprocess=None)
    tiers = [replace(tier, space=space) for tier, space in zip(manifest.tiers, spaces, strict=True)]

    def write(repository):
        write_bundle(repository / "texts", replace(manifest, tiers=tuple(tiers)), text_model.files())

    async with running_service(tmp_path, write) as running:
        config = (await described(running).model_config(pb.ModelConfigRequest(name=manifest.name))).config
    found = {name: config.parameters[name].string_value for name in ("tiers", "space") if name in config.parameters}
    assert found == {"tiers": "full, lean", **({"space": SPACE} if all(spaces) else {})}


async def test_statistics_and_index(running):
    for _ in range(2):
        await running.infer(good(3))
    with pytest.raises(InvalidRequest):
        await running.infer(shaped(1, 14))
    metadata, now = described(running), running.counted()
    (found,) = metadata.model_statistics(pb.ModelStatisticsRequest(name=ORACLE)).model_stats
    assert (found.name, found.version, found.inference_count, found.execution_count) == (ORACLE, "1", 6, 2)
    assert found.last_inference == now.last_inference_ms > 0
    stages = {"success": "request", "queue": "queue", "compute_infer": "compute_infer"}
    for name, stage in (stages | {key: key for key in ("compute_input", "compute_output")}).items():
        duration = getattr(found.inference_stats, name)
        assert (duration.count, duration.ns) == (2, now.stages[stage].total), name
    assert (found.inference_stats.fail.count, found.inference_stats.fail.ns) == (1, now.fail_ns)
    (batch,) = found.batch_stats
    assert batch.batch_size == 3
    for name in ("compute_input", "compute_infer", "compute_output"):
        duration = getattr(batch, name)
        assert (duration.count, duration.ns) == (2, getattr(now.batches[3], f"{name}_ns")), name
    for ready, expected in ((False, {ORACLE: "READY", "broken": "UNAVAILABLE"}), (True, {ORACLE: "READY"})):
        models = metadata.repository_index(pb.RepositoryIndexRequest(ready=ready)).models
        assert {model.name: model.state for model in models} == expected

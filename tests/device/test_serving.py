"""The whole server on TensorRT: correct responses to stock clients, and failures of the device."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from edge.bundles.bundle import Bundle
from edge.datatypes import Array
from edge.pb import inference_pb2 as pb
from edge.programs.program import AUTO, Cascade, Options, SingleRun
from edge.runtimes.build import build
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.tensorrt.device import shared_device
from edge.runtimes.tensorrt.runtime import TensorRt
from tests.device.engines import reference
from tests.support import text_model
from tests.support.in_process import running_here
from tests.support.letters_blocks import write_letters_in_blocks
from tests.support.letters_model import NAME as LETTERS
from tests.support.letters_model import continued
from tests.support.models import oracle_golden, write_attention_bundle, write_oracle_bundle
from tests.support.sample_requests import column, triton_input
from tests.support.server_processes import check_golden, served

TARGET = "tensorrt"
REQUESTS = 4_000
#: Calls in progress at once, so that requests wait and share runs.
CONCURRENCY = 24


class Question(NamedTuple):
    model: str
    tier: str
    inputs: dict[str, Array]
    outputs: Mapping[str, Array]
    atol: float


WRITERS = {
    "oracle": write_oracle_bundle,
    "sentiment": text_model.write_sentiment_bundle,
    "attention": lambda directory: write_attention_bundle(directory, 16),
}


def write_models(repository):
    for name, write in WRITERS.items():
        write(repository / name)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines")
    write_models(directory / "bundles")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TensorRt, "isolated_build", False)  # a child process for each tier would take seconds
        for bundle in map(Bundle.open, (directory / "bundles").iterdir()):
            for tier in bundle.manifest.tiers:
                build(bundle, TARGET, directory / "cache", tier=tier.name)
    return directory / "cache"


def questions(repository):
    random = np.random.default_rng(0)
    asked = []
    for path in sorted(repository.iterdir()):
        bundle = Bundle.open(path)
        manifest = bundle.manifest
        artifacts = {tier.name: bundle.artifact(TARGET, tier.name) for tier in manifest.tiers}
        runners = {name: OnnxRuntimeRunner(bundle.read(each.file), subject=name) for name, each in artifacts.items()}
        program = Cascade(manifest.program, runners) if manifest.program else SingleRun(runners)
        atol = 2e-2 if "attention" in manifest.name else 1e-4
        for tier in [*runners, *([AUTO] if manifest.program else [])]:
            for rows in (1, 1, 1, 2, 3, 5, 8):
                inputs = some_inputs(manifest.name, rows, random)
                asked.append(
                    Question(manifest.name, tier, inputs, program.compute(inputs, Options(tier)).outputs, atol)
                )
    return asked


def some_inputs(model, rows, random):
    if model == "calculator-oracle":
        return {"x": oracle_golden().inputs["x"][random.integers(0, len(oracle_golden().inputs["x"]), rows)]}
    if model == "sentiment":
        shape = rows, int(random.integers(1, text_model.MAX_LENGTH + 1))
        ids = random.integers(0, len(text_model.WORDS), shape)
        return {"input_ids": ids, "attention_mask": random.integers(0, 2, shape)}
    return {"x": random.normal(size=(rows, 16, 2 * 16)).astype(np.float16)}


async def ask(client, question):
    tensors = [triton_input(name, array) for name, array in question.inputs.items()]
    answer = await client.infer(question.model, tensors, parameters={"tier": question.tier})
    for name, expected in question.outputs.items():
        given = answer.as_numpy(name)
        assert (given.dtype, given.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(given.astype(float), expected.astype(float), atol=question.atol, rtol=1e-3)
    return str(answer.get_response().parameters["tier"].string_param)


async def test_models_that_do_not_fit_together_take_turns(engines, tmp_path, software):
    random, nothing = np.random.default_rng(1), software.live()
    options = {"model_control": "on-demand", "load_models": (), "max_loaded": 1}
    async with running_here(tmp_path, write_models, engines, target=TARGET, **options) as ready:
        asked = questions(tmp_path / "repository")
        async with InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
            await ask(client, asked[0])
            alone = software.live()
            for _ in range(8):
                await asyncio.gather(*(ask(client, asked[random.integers(len(asked))]) for _ in range(6)))
            await ask(client, asked[0])
            assert software.live() == alone
            statistics = (await client.get_inference_statistics()).model_stats
            assert all(model.inference_stats.success.count for model in statistics)
            assert not any(model.inference_stats.fail.count for model in statistics)
    assert software.live() == nothing


async def test_mixed_requests_get_correct_responses_and_leak_nothing(engines, tmp_path, software):
    """Three models and their tiers, with batches, cancelled calls and reloads."""
    random = np.random.default_rng(1)
    nothing = software.live()
    async with running_here(tmp_path, write_models, engines, target=TARGET) as ready:
        asked = questions(tmp_path / "repository")
        async with InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
            left = REQUESTS
            answered, cancelled = Counter[str](), 0

            async def work():
                nonlocal left, cancelled
                while left > 0:
                    left -= 1
                    question = asked[random.integers(len(asked))]
                    task = asyncio.create_task(ask(client, question))
                    if random.random() < 0.02:
                        await asyncio.sleep(random.random() * 0.01)
                        task.cancel()
                    try:
                        tier = await task
                    except asyncio.CancelledError:
                        cancelled += 1
                    else:
                        answered[question.model] += 1
                        assert question.tier in (tier, AUTO) or question.model != "sentiment"

            async def reload():
                for name in ("sentiment", "calculator-oracle", "attention-16"):
                    await asyncio.sleep(0.5)
                    await client.load_model(name)

            await asyncio.gather(*(work() for _ in range(CONCURRENCY)), reload())
            assert set(answered) == {"sentiment", "calculator-oracle", "attention-16"}
            assert sum(answered.values()) + cancelled == REQUESTS
            assert cancelled > 20
            counts = dict(shared_device().counts)
            assert counts["launches"] > counts["enqueues"]
            assert counts["captures"] > 20
            statistics = (await client.get_inference_statistics("sentiment", as_json=True))["model_stats"][0]
            assert int(statistics["execution_count"]) < int(statistics["inference_count"])  # requests shared runs
            for name in answered:
                await client.unload_model(name)
            assert software.live() == nothing
            await client.load_model("sentiment")
            question = next(one for one in asked if one.model == "sentiment" and one.tier == "lean")
            assert await ask(client, question) == "lean"
    assert software.live() == nothing
    assert not software.error()


async def test_a_decoder_in_blocks_writes_the_texts_of_the_whole_and_leaves_no_memory(tmp_path, software):
    nothing, prompts = software.live(), ["abc", "de", "xy", "hello", "abc" * 20]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TensorRt, "isolated_build", False)
        bundle = write_letters_in_blocks(tmp_path / "bundle")
        for role in bundle.manifest.roles:
            build(bundle, TARGET, tmp_path / "cache", role=role)
    async with (
        running_here(
            tmp_path, lambda place: write_letters_in_blocks(place / LETTERS), tmp_path / "cache", target=TARGET
        ) as ready,
        InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):

        async def text(prompt):
            answer = await client.infer(LETTERS, [triton_input("prompt", column(prompt))])
            return answer.as_numpy("text").item().decode()

        for _ in range(3):  # from the third step on, there are graphs
            assert await asyncio.gather(*map(text, prompts)) == list(map(continued, prompts))
    assert software.live() == nothing
    assert not software.error()


@pytest.fixture
def start(engines, tmp_path, software):
    """``start("oracle", SOFTWARE_CUDA_MEMORY="40000")`` serves models with their engines on the software device."""

    def start(*names, options=(), **environment):
        for name in names:
            WRITERS[name](tmp_path / "repository" / name)
        always = (f"--target={TARGET}", f"--cache={engines}", "--no-build")
        return served(tmp_path / "repository", *always, *options, **environment)

    return start


def failure_of(server):
    """Send the golden inputs; return the error, or None if the response is correct."""
    try:
        check_golden(server)
    except grpc.RpcError as error:
        return error
    return None


def test_model_without_memory_does_not_affect_others(start):
    with start("oracle", "attention", options=("--no-strict-readiness",), SOFTWARE_CUDA_MEMORY="40000") as server:
        assert [*server.ready.ready] == ["calculator-oracle:1"], server.ready
        assert "Unload other models, or build smaller profiles" in str(server.ready.unavailable)
        assert failure_of(server) is None
        assert server.stop()[0] == 0


def test_models_leave_for_one_that_the_device_has_no_memory_for(start):
    options = ("--model-control=on-demand",)
    with start("oracle", "attention", options=options, SOFTWARE_CUDA_MEMORY="60000") as server:
        for _ in range(2):
            check_golden(server)
            described = server.stub.ModelMetadata(pb.ModelMetadataRequest(name="attention-16"))  # loads it
            assert described.platform == "tensorrt_plan"
            index = server.stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
            assert [model.name for model in index] == ["attention-16"]
        assert server.stop()[0] == 0


async def test_invalid_requests_fail_alone(engines, tmp_path, caplog):
    """Shapes outside the profile, shapes that contradict each other, and in shared runs unknown token ids."""

    def question(ids, length):
        inputs = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, length), np.int64)}
        valid = len(ids) == length and max(ids) < len(text_model.WORDS)
        return Question("sentiment", "full", inputs, reference(text_model.model("full"))(inputs) if valid else {}, 1e-4)

    right = question([2, 3, 4, 2], 4)
    wrong = {
        r"expected between \[1, 1\] and \[8, 16\]": question([1] * 17, 17),
        "got input_ids .*, expected shapes that agree with each other": question([1] * 16, 12),
        "input 'input_ids' .*: got 6, expected values from 0 to 5": question([2, 6, 2, 2], 4),
    }
    async with (
        running_here(tmp_path, write_models, engines, target=TARGET, max_queue_delay_us=100_000) as ready,
        InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        for message, culprit in wrong.items():
            asked = [ask(client, question) for question in [*[right] * 6, culprit, *[right] * 6]]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            (error,) = [answer for answer in answers if answer != "full"]
            assert error is answers[6]
            assert isinstance(error, InferenceServerException)
            assert error.status() == "StatusCode.INVALID_ARGUMENT"
            assert re.search(message, error.message())
        assert "requests failed; each is tried alone" in caplog.text
        statistics = await client.get_inference_statistics("sentiment", as_json=True)
        assert int(statistics["model_stats"][0]["inference_stats"]["success"]["count"]) == 12 * len(wrong)
        assert await client.is_model_ready("sentiment")

"""Text models: logits and labels of each tier, the cascade, and manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.manifest import CascadeProgram, Manifest
from edge.datatypes import Array
from edge.errors import GoldenError
from edge.launch import running_server
from edge.programs.cascade import margins
from edge.repository.control import ModelControl
from edge.repository.loader import Loader
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.runtimes.build import load_runner
from edge.scheduling.scheduler import Scheduler
from tests.support import text_model
from tests.support.sample_requests import column, triton_input
from tests.support.text_model import LABELS, TEXTS, TIERS, logits, manifest, model


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    directory = tmp_path_factory.mktemp("text")
    text_model.write_sentiment_bundle(directory / "sentiment")
    serving = running_server([directory / "sentiment"], cache=directory / "cache")
    with serving as ready, triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
        yield client


def text(*texts: str | bytes) -> triton.InferInput:
    return triton_input("text", column(*texts))


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_text_gives_logits_and_labels(client: triton.InferenceServerClient, tier: str | None) -> None:
    long = client.infer("sentiment", [text("good " * 20)], parameters=(parameters := {"tier": tier} if tier else None))
    assert long.as_numpy("logits")[0].tolist() == [0, text_model.MAX_LENGTH]  # the text is cut
    result = client.infer("sentiment", [text(*TEXTS)], parameters=parameters)
    expected = np.stack([logits(t, tier or "full") for t in TEXTS])
    np.testing.assert_array_equal(result.as_numpy("logits"), expected)
    labels = [LABELS[row.argmax()].encode() for row in expected]
    assert result.as_numpy("label")[:, 0].tolist() == labels
    assert result.get_response().parameters["tier"].string_param == (tier or "full")


def test_cascade_runs_the_full_tier_where_the_lean_one_is_unsure(client: triton.InferenceServerClient) -> None:
    def infer(*texts: str) -> tuple[list[bytes], str]:
        result = client.infer("sentiment", [text(*texts)], parameters={"tier": "auto"})
        return result.as_numpy("label")[:, 0].tolist(), result.get_response().parameters["tier"].string_param

    # The margin of one word is tanh(1/2) = 0.46, below the manifest's 0.5; that of two is tanh(1) = 0.76.
    assert infer("good good") == ([b"positive"], "lean")
    assert infer("good") == ([b"positive"], "full")
    # The lean tier does not know "fine", and would return negative.
    assert infer("fine fine bad") == ([b"positive"], "full")
    answers = [b"positive", b"positive", b"negative"]
    assert infer("good good", "fine fine bad", "bad bad") == (answers, "lean,full")


def test_cascade_can_be_the_default(tmp_path: Path) -> None:
    changed, files = _with(lambda m: msgspec.structs.replace(m, program=_cascade(default=True)))
    bundle = write_bundle(tmp_path / "b", changed, files)
    loaded = {tier: load_runner(bundle, "onnxruntime", tmp_path / "cache", tier=tier) for tier in TIERS}
    model = Model(bundle, loaded, load_memory_bytes=0)
    assert (model.selector.policy, model.full_tier) == ("router", "full")
    model.close()


@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_margins_are_those_of_the_probabilities(rows: list[list[float]]) -> None:
    logits = np.array(rows, np.float32)
    probabilities = softmax(logits.astype(np.float64))
    two = np.sort(probabilities, axis=1)[:, -2:]
    np.testing.assert_allclose(margins(logits), two[:, 1] - two[:, 0], atol=1e-6)


def softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def test_metadata_and_config(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("sentiment")
    assert [t.name for t in metadata.inputs] == ["text", "input_ids", "attention_mask"]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [
        ("logits", "FP32", [-1, 2]),
        ("label", "BYTES", [-1, 1]),
    ]
    assert all(tensor.optional for tensor in client.get_model_config("sentiment").config.input)


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ([text("good")], {"tier": "huge"}, "one of full, lean, auto"),
        ([text(b"\xff")], None, "UTF-8"),
        ([text("x" * 201)], None, "201 bytes"),
        ([text("good"), triton_input("input_ids", np.ones((1, 2), np.int64))], None, "stands for"),
        ([triton_input("input_ids", np.ones((1, 2), np.int64))], None, "'attention_mask'"),
        (
            [
                triton_input("input_ids", np.ones((1, 17), np.int64)),
                triton_input("attention_mask", np.ones((1, 17), np.int64)),
            ],
            None,
            "16",
        ),
        ([text(*["good"] * 9)], None, "at most 8"),
        ([text("")], None, "shape"),
    ],
)
def test_bad_requests(
    client: triton.InferenceServerClient,
    inputs: list[triton.InferInput],
    parameters: dict[str, str] | None,
    message: str,
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer("sentiment", inputs, parameters=parameters)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def _with(change: Callable[[Manifest], Manifest], **files: bytes) -> tuple[Manifest, dict[str, bytes]]:
    return change(manifest()), text_model.files() | {name.replace("__", "."): data for name, data in files.items()}


def _cascade(**fields: object) -> CascadeProgram:
    program = manifest().program
    assert program
    return msgspec.structs.replace(program, **fields)


class ReadingBundle(Bundle):
    """A bundle that records the files that are read after it is opened."""

    read_files: ClassVar[list[str]] = []

    def read(self, name: str) -> bytes:
        self.read_files.append(name)
        return super().read(name)


async def test_tiers_share_one_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_model.write_sentiment_bundle(tmp_path / "models" / "sentiment")
    monkeypatch.setattr("edge.repository.repository.Bundle", ReadingBundle)
    device = Scheduler(max_queue_size=1)
    repository = Repository(tmp_path / "models", Loader(device, "onnxruntime", tmp_path / "cache"))
    control = ModelControl(repository, "none")
    await control.start()
    assert all(entry.state == "READY" for entry in repository)
    assert sorted(ReadingBundle.read_files) == ["full.onnx", "lean.onnx", "tokenizer.json"]
    await control.close()
    device.close()


def test_each_tier_has_its_own_golden_set(tmp_path: Path) -> None:
    swapped, files = _with(lambda m: m, lean__onnx=model("full"))
    bundle = write_bundle(tmp_path / "b", swapped, files)
    load_runner(bundle, "onnxruntime", tmp_path / "cache", tier="full")
    with pytest.raises(GoldenError, match=r"lean\.onnx"):
        load_runner(bundle, "onnxruntime", tmp_path / "cache", tier="lean")

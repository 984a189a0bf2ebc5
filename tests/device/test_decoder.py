"""Decoders on TensorRT: the logits of decoders on the host, from a cache that never leaves the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge.bundles.bundle import Bundle
from edge.datatypes import Array
from edge.errors import InvalidRequest, RunnerError
from edge.runner import DecoderTensors, DeviceDecoder
from edge.runtimes.build import load_runner
from edge.runtimes.host_decoder import HostDecoder, infer_into
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.tensorrt_decoder import TensorRtDecoder
from edge.runtimes.tensorrt_device import shared_device
from edge.runtimes.tensorrt_runner import TensorRtRunner
from tests.device.software import SoftwareDriver
from tests.support.commands import answer, fewheads
from tests.support.letters_model import MAX_BATCH_SIZE, NAME, write_letters_bundle

TENSORS = DecoderTensors(
    "tokens", "lengths", "last", "logits", tuple((f"past_{kind}", f"new_{kind}") for kind in ("key", "value"))
)
#: Bytes of the cache at one place of all rows: a key of one number, and a value of six.
PLACE_BYTES = MAX_BATCH_SIZE * 7 * 4
FEWEST_PLACES, MOST_PLACES = 32, 128


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_letters_bundle(tmp_path_factory.mktemp("letters") / NAME)


@pytest.fixture(scope="module")
def cache(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the engine, built in a child process."""
    directory = tmp_path_factory.mktemp("cache")
    (built,) = json.loads(
        answer(fewheads("build", bundle.path, "--target", "tensorrt", "--cache", directory, "--json"))
    )
    assert built["build"]["golden"]["rows"] == 2
    return directory


def runner_of(bundle: Bundle, cache: Path) -> TensorRtRunner:
    runner = load_runner(bundle, "tensorrt", cache, role="backbone").runner
    assert isinstance(runner, TensorRtRunner)
    return runner


@pytest.fixture
def runner(bundle: Bundle, cache: Path) -> Iterator[TensorRtRunner]:
    loaded = runner_of(bundle, cache)
    yield loaded
    loaded.close()


def on_host(bundle: Bundle) -> HostDecoder:
    runner = OnnxRuntimeRunner((bundle.path / "decoder.onnx").read_bytes(), subject="a decoder")
    return HostDecoder(runner.infer, partial(infer_into, runner), (*runner.inputs, *runner.outputs), TENSORS)


class Both:
    """Two decoders that get the same rows, and give the same logits."""

    def __init__(self, *decoders: DeviceDecoder, seed: int = 0) -> None:
        self.decoders = decoders
        self.lengths: list[int] = []
        self._random = np.random.default_rng(seed)

    def tokens(self, *shape: int) -> Array:
        return self._random.integers(1, 26, shape)  # none of them has no logits

    def join(self, *lengths: int) -> None:
        prompts = self.tokens(len(lengths), max(lengths) + 1)
        self._check([decoder.add(prompts, np.array(lengths)).copy() for decoder in self.decoders])
        self.lengths += lengths

    def step(self) -> None:
        tokens = self.tokens(len(self.lengths))
        self._check([decoder.step(tokens).copy() for decoder in self.decoders])
        self.lengths = [length + 1 for length in self.lengths]

    def leave(self, *places: int) -> None:
        rows = len(self.lengths) - len(places)
        staying = [place for place in range(rows, len(self.lengths)) if place not in places]
        moves = list(zip(staying, sorted(places), strict=False))
        for source, target in moves:
            self.lengths[target] = self.lengths[source]
        del self.lengths[rows:]
        for decoder in self.decoders:
            decoder.keep(rows, moves)

    def _check(self, logits: list[Array]) -> None:
        for other in logits[1:]:
            np.testing.assert_array_equal(logits[0], other)


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_join_and_leave_have_the_logits_of_a_decoder_on_the_host(
    bundle: Bundle, runner: TensorRtRunner, seed: int
) -> None:
    both = Both(on_host(bundle), runner.decoder(TENSORS), seed=seed)
    random = np.random.default_rng(seed)
    for _ in range(60):
        room = MAX_BATCH_SIZE - len(both.lengths)
        if room and random.random() < 0.4:
            both.join(*random.choice([1, 3, 31, 32, 33, 70], int(random.integers(1, room + 1))))
        for _ in range(int(random.integers(1, 4))):
            if both.lengths and max(both.lengths) < 99:
                both.step()
        leaving = [place for place, length in enumerate(both.lengths) if random.random() < 0.15 or length > 90]
        if leaving:
            both.leave(*leaving)

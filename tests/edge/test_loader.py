"""Loading beside those who are asked: what they have to wait for, and what is left when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.bundles.bundle import Bundle
from edge.errors import GoldenError
from edge.repository import loader
from edge.repository.loader import Loader
from edge.scheduling.lane import ServingOptions
from edge.scheduling.scheduler import Scheduler
from tests.edge.models import DATA
from tests.edge.sentiment import write_sentiment_bundle


class Recorder:
    """Notes where and when runners are really loaded, and lets a neighbour ask in the middle of each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.order: list[str] = []
        self.threads: set[str] = set()
        self._scheduler = scheduler
        self._load = loader.load_with
        self._neighbours: list[threading.Thread] = []

    def load_with(self, *arguments: Any, tier: str) -> Any:
        neighbour = threading.Thread(target=self._scheduler.call, args=(lambda: self.order.append("request"),))
        neighbour.start()
        time.sleep(0.05)  # it waits for its turn by now
        self._neighbours.append(neighbour)
        self.threads.add(threading.current_thread().name)
        self.order.append(tier)
        return self._load(*arguments, tier=tier)

    def join(self) -> None:
        for neighbour in self._neighbours:
            neighbour.join()


@pytest.fixture(params=[True, False], ids=["device", "processor"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    scheduler = Scheduler(1, device_bound=request.param)
    yield scheduler
    scheduler.close()


def test_others_have_their_turn_between_tiers(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    bundle = write_sentiment_bundle(tmp_path / "sentiment")
    recorder = Recorder(scheduler)
    monkeypatch.setattr(loader, "load_with", recorder.load_with)
    made = Loader(scheduler, "onnxruntime", tmp_path / "cache", ServingOptions())
    model = made.load_model(bundle)
    recorder.join()
    assert list(model.tiers) == [tier.name for tier in bundle.manifest.tiers]
    if "device" in request.node.name:
        assert recorder.order == ["full", "request", "lean", "request"]
        assert recorder.threads == {"device-0"}
    else:  # nobody waits for anything
        assert recorder.order == ["request", "full", "request", "lean"]
        assert recorder.threads == {threading.current_thread().name}
    made.close(model)
    assert not model.use.take()


def test_a_load_that_fails_leaves_nothing_loaded(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    real = loader.load_with

    def load_with(*arguments: Any, tier: str) -> Any:
        if tier == "lean":
            return real(arguments[0], Bundle.open(DATA / "broken_bundles" / "golden-wrong"), *arguments[2:])
        loaded = real(*arguments, tier=tier)
        monkeypatch.setattr(loaded.runner, "close", lambda: closed.append(threading.current_thread().name))
        return loaded

    bundle = write_sentiment_bundle(tmp_path / "sentiment")
    monkeypatch.setattr(loader, "load_with", load_with)
    with pytest.raises(GoldenError):
        Loader(scheduler, "onnxruntime", tmp_path / "cache", ServingOptions()).load_model(bundle)
    assert len(closed) == 1

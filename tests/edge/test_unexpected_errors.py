"""Loops and threads of the server go on after an error that nobody expected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge.connections.quota import Quota
from edge.health.health import Health
from edge.health.supervisor import Supervisor
from edge.health.systemd import Notifier
from edge.instruments.memory import MemorySampler
from edge.instruments.sensors import Sensors
from edge.repository.loader import Loader
from edge.repository.repository import Repository
from edge.scheduling.scheduler import Scheduler
from edge.serving.streams import Streams
from edge.telemetry import telemetry
from edge.telemetry.telemetry import Sources
from tests.support.commands import python


def test_health_that_could_not_be_published_is_published_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Scheduler(1)
    repository = Repository(tmp_path, Loader(device))
    health, errors = Health(repository, device.runs), [OSError("no file is left")]

    def models_ready() -> bool:
        if errors:
            raise errors.pop()
        return True

    monkeypatch.setattr(health, "models_ready", models_ready)
    health.accepting = True
    supervisor = Supervisor(health, repository, device, Notifier({}))
    for published in (False, True):
        changed = health.changed
        supervisor.publish()
        assert (health.serving[""], changed.is_set()) == (published, published)
    assert caplog.text.count("no file is left") == 1
    device.close()


async def test_samples_go_on_and_their_error_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampled = asyncio.Event()
    errors = [OSError("no file is left")] * 3

    class Failing(MemorySampler):
        def observe(self) -> None:
            if errors:
                raise errors.pop()
            sampled.set()

    device = Scheduler(1)
    repository = Repository(tmp_path, Loader(device))
    health = Health(repository, device.runs)
    streams: Streams = None  # type: ignore[assignment] # samples need none
    sources = Sources(device, repository, health, Failing(), Sensors(), streams, Quota(1, 1))
    monkeypatch.setattr(telemetry, "_SAMPLE_SECONDS", 0.01)
    watching = asyncio.create_task(telemetry.Telemetry(sources).watch())
    await asyncio.wait_for(sampled.wait(), 10)
    watching.cancel()
    assert caplog.messages == ["memory and load cannot be sampled"]
    device.close()


def test_shutdown_ends_although_the_health_cannot_be_read() -> None:
    done = python(
        """
import time
from edge.health.watchdog import Watchdog

class Unreadable:
    def failure(self, seconds):
        raise OSError("no file is left")

Watchdog(Unreadable(), 1.0).bound_shutdown(0.5)
time.sleep(60)
"""
    )
    assert (done.returncode, "no file is left" in done.stderr) == (10, True)

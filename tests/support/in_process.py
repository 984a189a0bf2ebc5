"""Servers in the process of the test, so that the test can inspect them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from edge.server import Ready, serve
from edge.settings import Settings
from tests.support.models import ORACLE_BUNDLE, serialized
from tests.support.server_models import failing_graph, write_bundle_of


def write_oracle_and_failing_bundle(repository: Path) -> None:
    """Write the oracle, and ``failing``: the element at ``index`` of three, and a runtime error beyond them."""
    shutil.copytree(ORACLE_BUNDLE, repository / "oracle")
    graph = failing_graph("element", np.array([7, 8, 9], np.int64))
    index = np.array([1], np.int64)
    write_bundle_of(repository, "failing", serialized(graph), {"index": index}, {"element": index + 7})


@asynccontextmanager
async def running_here(
    directory: Path, write: Callable[[Path], object], cache: Path | None = None, **options: Any
) -> AsyncIterator[Ready]:
    """Run a server in this process, with all optional features, on bundles that ``write`` writes below a directory."""
    repository = directory / "repository"
    repository.mkdir()
    write(repository)
    settings = Settings(
        repository=repository,
        cache=cache or directory / "cache",
        grpc_port=0,
        metrics_port=None,
        model_control="explicit",
        load_models=("*",),
        allow_shared_memory=True,
        allow_log_settings=True,
        drain_seconds=5,
        **options,
    )
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(settings, ready.set_result))
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await server


@asynccontextmanager
async def serving_here(
    directory: Path, transport: str = Settings.transport, **options: Any
) -> AsyncIterator[grpc.aio.Channel]:
    """Run a server as :func:`running_here` does, and yield a channel to it."""
    async with (
        running_here(directory, write_oracle_and_failing_bundle, transport=transport, **options) as ready,
        grpc.aio.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel,
    ):
        yield channel

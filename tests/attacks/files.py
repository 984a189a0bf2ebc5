"""Attacks with what is in a repository, by those who may write it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import grpc
import numpy as np

from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from tests.attacks.content import send
from tests.attacks.measure import attack
from tests.attacks.target import Setup, Target
from tests.attacks.wire import until
from tests.support.models import ORACLE_BUNDLE, serialized, write_oracle_bundle
from tests.support.server_models import loop_graph, write_bundle_of


def _unnameable(repository: Path) -> None:
    shutil.copytree(ORACLE_BUNDLE, os.fsdecode(os.fsencode(repository / "copy-") + b"\xff"))


@attack(setup=Setup(bundles=_unnameable), transports=("nghttp2",))
def directories_with_undecodable_names(target: Target) -> str | None:
    """A bundle whose directory has a name that is not UTF-8."""
    (status,) = send(target, "RepositoryIndex", pb.RepositoryIndexRequest())
    return None if status is grpc.StatusCode.OK else f"RepositoryIndex: {status.name}"


def _own_repository(repository: Path) -> None:
    """The attack adds its bundles while the server runs."""


@attack(
    setup=Setup(arguments=("--model-control=poll", "--poll-seconds=0.2"), bundles=_own_repository),
    transports=("nghttp2",),
)
def golden_run_without_end(target: Target) -> str | None:
    """A bundle whose golden run takes for ever, and another bundle behind it."""
    steps = np.array([10**12], np.int64)
    inputs = {"steps": steps}
    write_bundle_of(target.repository, "endless", serialized(loop_graph("done", [1])), inputs, {"done": steps})
    time.sleep(0.5)
    write_oracle_bundle(target.repository / "later-1", "later")
    with target.channel() as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in until(5.0):
            models = stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=target.bearer()).models
            if {"later": "READY"}.items() <= {model.name: model.state for model in models}.items():
                return None
            time.sleep(0.1)
    return "no other bundle is loaded"

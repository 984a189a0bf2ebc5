"""Attacks with what is in a repository, by those who may write it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import grpc

from edge.pb import inference_pb2 as pb
from tests.attacks.content import send
from tests.attacks.measure import attack
from tests.attacks.target import Setup, Target
from tests.support.models import ORACLE_BUNDLE


def _unnameable(repository: Path) -> None:
    shutil.copytree(ORACLE_BUNDLE, os.fsdecode(os.fsencode(repository / "copy-") + b"\xff"))


@attack(setup=Setup(bundles=_unnameable), transports=("nghttp2",))
def directories_with_undecodable_names(target: Target) -> str | None:
    """A bundle whose directory has a name that is not UTF-8."""
    (status,) = send(target, "RepositoryIndex", pb.RepositoryIndexRequest())
    return None if status is grpc.StatusCode.OK else f"RepositoryIndex: {status.name}"

"""Errors of the workstation, beside those of :mod:`edge.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from edge.errors import FewheadsError


def listed(names: Sequence[str], most: int) -> str:
    """Return names for a message, and of many only the first ``most``."""
    return ", ".join(names[:most]) + ", …" * (len(names) > most)


class DataError(FewheadsError):
    """A data set is missing or malformed."""


class TrainingError(FewheadsError):
    """A training run cannot go on."""


class CheckpointError(FewheadsError):
    """A run directory breaks its format, or cannot be read or written."""


class ReductionError(FewheadsError):
    """A model cannot be reduced with the given inputs."""


class PlanError(FewheadsError):
    """A plan of reduction does not fit, cannot be met, or cannot explain a speed-up."""


class JobError(FewheadsError):
    """A job in a process of its own failed, and its log says why."""

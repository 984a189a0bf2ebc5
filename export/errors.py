"""The errors of the workstation half, beside those of :mod:`edge.errors`.

- FewheadsError
  - DataError              a data set is not what it must be
  - TrainingError          a training run cannot go on
  - CheckpointError        a run directory breaks its format, or cannot be read or written
"""

from __future__ import annotations

from edge.errors import FewheadsError


class DataError(FewheadsError):
    """A data set is not what it must be."""


class TrainingError(FewheadsError):
    """A training run cannot go on."""


class CheckpointError(FewheadsError):
    """A run directory breaks its format, or cannot be read or written."""

"""The errors of the workstation half, beside those of :mod:`edge.errors`.

- FewheadsError
  - DataError              a data set is not what it must be
  - TrainingError          a training run cannot go on
  - CheckpointError        a run directory breaks its format, or cannot be read or written
  - ReductionError         a model cannot be reduced from what is given
  - PlanError              a plan of reduction does not fit, cannot be met, or is said to give what it cannot
"""

from __future__ import annotations

from edge.errors import FewheadsError


class DataError(FewheadsError):
    """A data set is not what it must be."""


class TrainingError(FewheadsError):
    """A training run cannot go on."""


class CheckpointError(FewheadsError):
    """A run directory breaks its format, or cannot be read or written."""


class ReductionError(FewheadsError):
    """A model cannot be reduced from what is given."""


class PlanError(FewheadsError):
    """A plan of reduction does not fit, cannot be met, or is said to give what it cannot."""

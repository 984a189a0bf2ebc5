"""State machine of one version of a model in the repository.

::

                 loading()           loaded()         unloading()
    UNAVAILABLE ----------> LOADING ----------> READY ----------> UNLOADING
         ^                   |   |                                    |
         |      failed()     |   |  unloaded()                        |  unloaded()
         +-------------------+---+------------------------------------+

Each arrow is a method of :class:`Entry`. A READY entry stays READY while it is loaded again: its model serves until
``loaded()`` replaces it, and goes on after ``failed()``. ``building()`` only changes the reason. Repeating
``loading()`` while LOADING, or ``unloaded()`` while UNAVAILABLE, changes no state. Every other call raises a
RuntimeError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from edge.errors import FewheadsError
from edge.instruments.statistics import ModelStatistics
from edge.repository.model import Model

log = logging.getLogger(__name__)

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]


class Entry:
    """One version of a model, UNAVAILABLE at first. The event loop changes it by its methods, any thread may read it.

    Where the bundle cannot be read, ``name`` is that of its directory, and ``version`` is empty.
    """

    def __init__(
        self, path: Path, name: str, version: str, reason: str = "", *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.version = name, version
        self.statistics = ModelStatistics()  # of all models that have served under this name and version
        self.path = path  # the directory that it was last loaded from
        self.state: State = "UNAVAILABLE"
        self.wanted = False  # whether it should be READY: from :meth:`loading` to :meth:`unloaded`
        self.model: Model | None = None  # the model that serves; None unless READY
        self.progress = ""  # of a build that the load waits for; empty without one
        self._reason, self._on_change = reason, on_change

    @property
    def reason(self) -> str:
        """The reason why it is not READY, or why its model is not the bundle at :attr:`path`; otherwise empty."""
        return self.progress or self._reason

    def loading(self, path: Path) -> None:
        """Start to load a bundle."""
        self._check("loading", "UNAVAILABLE", "LOADING", "READY")
        self.path, self.wanted = path, True
        if not self.model:
            self.state, self._reason = "LOADING", ""
        self._on_change()

    def building(self, progress: str) -> None:
        """Report the progress of a build that the load waits for."""
        self._check("building", "LOADING", "READY")
        if progress != self.progress:
            self.progress = progress
            self._on_change()

    def loaded(self, model: Model) -> Model | None:
        """Let a model serve from now on; return the one that it replaces, which the caller must close."""
        self._check("loaded", "LOADING", "READY")
        replaced, self.model = self.model, model
        self.state, self._reason, self.progress = "READY", "", ""
        differences = ", ".join(f"{diff:.3g} ({tier})" for tier, diff in model.golden_diffs.items())
        text = "%s %s is ready on %s; its golden outputs differ at most by %s"
        log.info(text, self.name, self.version, model.runner.platform, differences)
        self._on_change()
        return replaced

    def failed(self, error: FewheadsError) -> None:
        """Record the reason of a failed load."""
        self._check("failed", "LOADING", "READY")
        log.error("%s cannot be served: %s", self.path.name, error)
        self._reason, self.progress = str(error), ""
        if not self.model:
            self.state = "UNAVAILABLE"
        self._on_change()

    def unloading(self, reason: str) -> Model:
        """Hide the model from further requests; return it, because the caller must close it."""
        self._check("unloading", "READY")
        model, self.model = self.model, None
        assert model
        self.state, self._reason = "UNLOADING", reason
        self._on_change()
        return model

    def unloaded(self, reason: str) -> None:
        """Record that there is no model, and that none is wanted."""
        self._check("unloaded", "UNLOADING", "LOADING", "UNAVAILABLE")
        self.state, self._reason, self.wanted = "UNAVAILABLE", reason, False
        self._on_change()

    def _check(self, transition: str, *states: State) -> None:
        if self.state not in states:
            entry, allowed = f"{self.name}:{self.version}", ", ".join(states)
            raise RuntimeError(f"{entry}: {transition}() is for {allowed}, and this is {self.state}")

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

An entry that is loaded on demand answers requests while it is not READY, too: the first one loads it. After a failed
load it refuses requests until a pause is over, which doubles with each failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from edge.bundles.manifest import Manifest
from edge.errors import FewheadsError, ModelNotReady, Whole, elided
from edge.instruments.statistics import ModelStatistics
from edge.repository.model import Model

log = logging.getLogger(__name__)

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]
#: Between a failed load and the next one that a request may cause: at first, and at most.
_PAUSE_SECONDS: Final = (1.0, 60.0)
_MOST_REASON_CHARS: Final = 800


class Entry:
    """One version of a model, UNAVAILABLE at first. The event loop changes it by its methods, any thread may read it.

    Where the bundle cannot be read, ``name`` is that of its directory, and ``version`` is empty. With ``on_demand``, a
    request loads it, and it is unloaded where another model needs its memory.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        version: str,
        reason: str = "",
        *,
        on_demand: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.version, self.on_demand = name, version, on_demand
        self.statistics = ModelStatistics()  # of all models that have served under this name and version
        self.path = path  # the directory that it was last loaded from
        self.state: State = "UNAVAILABLE"
        self.wanted = False  # whether it should be READY: from :meth:`loading` to :meth:`unloaded`
        self.model: Model | None = None  # the model that serves; None unless READY
        self.loaded_at = 0.0  # when a model became READY, in ``time.monotonic()`` seconds
        self.progress = ""  # of what the load waits for, such as a build; empty without it
        self.manifest: Manifest | None = None  # of the bundle when it was last read
        self.withdrawn = False  # whether a client has unloaded it, so that no request loads it
        self._failures, self._pause_until = 0, 0.0  # since it was last READY; in ``time.monotonic()`` seconds
        self._listed_at = int(time.time())
        self._reason, self._on_change = reason, on_change

    @property
    def reason(self) -> str:
        """The reason why it is not READY, or why its model is not the bundle at :attr:`path`; otherwise empty."""
        return self.progress or self._reason

    @property
    def answers(self) -> bool:
        """Whether it answers requests: it is READY, or loaded when one comes, and its last load has not failed."""
        return self.state == "READY" or (self.on_demand and not self.withdrawn and not self._failures)

    @property
    def created(self) -> int:
        """When its model was loaded, or where there is none, when it was listed, in seconds since 1970."""
        model = self.model  # read once: it may be unloaded at any moment
        return model.loaded_at if model else self._listed_at

    def refusal(self) -> ModelNotReady | None:
        """Return the error of a request, without a model, that may not load it before the pause is over."""
        left = self._pause_until - time.monotonic()
        if left <= 0:
            return None
        given = Whole(elided(self.reason, _MOST_REASON_CHARS))
        fix = f"A request in {left:.1f} s or later loads it again."
        return ModelNotReady(f"model {self.name!r}", given=given, expected="a bundle that can be loaded", fix=fix)

    def loading(self, path: Path) -> None:
        """Start to load a bundle."""
        self._check("loading", "UNAVAILABLE", "LOADING", "READY")
        self.path, self.wanted, self.withdrawn = path, True, False
        if not self.model:
            self.state, self._reason = "LOADING", ""
        self._on_change()

    def building(self, progress: str) -> None:
        """Report the progress of what the load waits for."""
        self._check("building", "LOADING", "READY")
        if progress != self.progress:
            self.progress = progress
            self._on_change()

    def loaded(self, model: Model) -> Model | None:
        """Let a model serve from now on; return the one that it replaces, which the caller must close."""
        self._check("loaded", "LOADING", "READY")
        replaced, self.model = self.model, model
        self.state, self._reason, self.progress = "READY", "", ""
        self._failures, self.loaded_at = 0, time.monotonic()
        self.statistics.loaded(model.load_ns)
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
        self.statistics.loaded(None)
        if not self.model:
            self.state = "UNAVAILABLE"
            first, most = _PAUSE_SECONDS
            self._pause_until = time.monotonic() + min(first * 2**self._failures, most)
            self._failures = min(self._failures + 1, 30)
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
        self.state, self._reason, self.progress, self.wanted = "UNAVAILABLE", reason, "", False
        self._on_change()

    def _check(self, transition: str, *states: State) -> None:
        if self.state not in states:
            entry, allowed = f"{self.name}:{self.version}", ", ".join(states)
            raise RuntimeError(f"{entry}: {transition}() is for {allowed}, and this is {self.state}")

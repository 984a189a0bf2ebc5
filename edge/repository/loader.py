"""From a checked bundle to a model that can be asked: every tier, checked and measured."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path

from edge.bundles.bundle import Bundle
from edge.errors import FewheadsError
from edge.instruments.memory import MemorySampler
from edge.repository.budget import MemoryBudget
from edge.repository.model import Model
from edge.runtimes.build import Loaded, load_runner
from edge.runtimes.table import choose
from edge.scheduling.lane import ServingOptions
from edge.scheduling.scheduler import Scheduler


class Loader:
    """Loads models beside those that serve.

    Where runners belong to the device's thread, one tier at a time is its work, and requests run in between. What a
    request may have to wait for is then the making of one runner, its golden set, and a few runs that measure it: a GPU
    takes no second thread, and a model that was not checked must not answer. Elsewhere nothing waits, but the processor
    is shared. A reload needs the memory of both models until the new one has taken over.

    Args:
        device: where models are loaded and run.
        target: the runtime, as ``fewheads build --target`` takes it.
        cache: where built models lie.
        options: what holds for all models.
        budget: refuses what the memory has no room for; None refuses nothing.
    """

    def __init__(
        self,
        device: Scheduler,
        target: str,
        cache: Path | None,
        options: ServingOptions,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._device = device
        self._target = target
        self._cache = cache
        self._options = options
        self._budget = budget

    def load_model(self, bundle: Bundle) -> Model:
        """Return a model whose every tier has reproduced its golden set, and has run a few times since.

        Not for the event loop: it takes seconds.

        Raises:
            LoadFailed: the memory has no room for it.
            FewheadsError: as :func:`edge.runtimes.build.load_runner`. Nothing stays loaded.
        """
        if not self._budget:
            return self._load(bundle)
        with self._budget.reserved(bundle, choose(self._target).artifact_runtime):
            model = self._load(bundle)
        if model.runner.device == "CPU":  # what a GPU takes does not show in the size of the process
            self._budget.learn(bundle, model.load_memory_bytes)
        return model

    def _load(self, bundle: Bundle) -> Model:
        memory = MemorySampler()
        before = memory.process_rss_bytes()
        tiers: dict[str, Loaded] = {}
        try:
            for tier in bundle.manifest.tiers:
                load = partial(load_runner, bundle, self._target, self._cache, tier=tier.name)
                tiers[tier.name] = self._device.call(load)
            grown = max(memory.process_rss_bytes() - before, 0)
            model = Model(bundle, tiers, grown, options=self._options)
            self._device.call(model.measure)
        except FewheadsError:
            for loaded in tiers.values():
                self._device.call(loaded.runner.close)
            raise
        give_memory_back()  # what the file and its optimisation took
        return model

    def close(self, model: Model) -> None:
        """Close a model, or let the last request on its way do so, and give its memory back to the system."""
        self._device.call(model.close)
        give_memory_back()


def give_memory_back() -> None:
    """Return freed memory to the system. Without this the C library would keep hundreds of megabytes for itself."""
    # Only glibc has it; other C libraries return memory by themselves.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)

"""Loads a bundle as a model that can serve: every tier, checked and measured."""

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

    Where runners belong to the device's thread, that thread loads one tier at a time and runs requests in between. A
    request then waits at most for the loading of one runner, its golden set, and a few runs that measure it: a GPU
    takes no second thread, and a model that was not checked must not answer. Elsewhere requests do not wait, but share
    the processor. A reload needs the memory of both models until the new one has taken over.

    Args:
        device: where models are loaded and run.
        target: the runtime, as ``fewheads build --target`` takes it.
        cache: the cache of builds.
        options: the options of all models.
        budget: refuses models that do not fit into the memory; None refuses nothing.
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
            LoadFailed: it does not fit into the memory.
            FewheadsError: as :func:`edge.runtimes.build.load_runner`. Nothing stays loaded.
        """
        if not self._budget:
            return self._load(bundle)
        with self._budget.reserved(bundle, choose(self._target).artifact_runtime):
            model = self._load(bundle)
        if model.runner.device == "CPU":  # memory of a GPU is not part of the process's size
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
        give_memory_back()  # the memory of the file and of its optimisation
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

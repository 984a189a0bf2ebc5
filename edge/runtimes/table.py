"""Table of the runtimes, and the choice of one for a target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from edge.errors import BackendError, BundleError, GoldenError, Raw, RunnerError, UsageError
from edge.runtimes.onnxruntime import OnnxRuntimeCpu, OnnxRuntimeCuda, OnnxRuntimeTensorRt
from edge.runtimes.runtime import Runtime, Suitability
from edge.runtimes.simulated import Simulated
from edge.runtimes.tensorrt.runtime import TensorRt, TensorRtRtx

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Every runtime by its target's name. ``auto`` takes the first that is suitable.
RUNTIMES: dict[str, type[Runtime]] = {
    runtime.name: runtime
    for runtime in (TensorRt, OnnxRuntimeTensorRt, OnnxRuntimeCuda, OnnxRuntimeCpu, TensorRtRtx, Simulated)
}


def targets() -> str:
    """Return all targets as one text, for help and errors."""
    *first, last = ["auto", *(runtime.target() for runtime in RUNTIMES.values())]
    return f"{', '.join(first)} or {last}"


def choose(target: str = "auto") -> Runtime:
    """Return the runtime for a target: ``auto``, or a runtime's name, with a colon and the parameter if it has one.

    Raise a UsageError if there is no such target, or its parameter is wrong, and a BackendError if the target's
    package is missing or has an unsupported version, or no runtime is suitable.
    """
    return next(_candidates(target))


def choose_to_run(target: str = "auto") -> Runtime:
    """Return the runtime for a target; raise a UsageError if it only builds, or as :func:`choose`."""
    runtime = choose(target)
    if runtime.build_only:
        raise runtime.only_builds()
    return runtime


def _candidates(target: str) -> Iterator[Runtime]:
    """Yield the runtimes for a target, the best first: one for a name, every suitable one for ``auto``."""
    if target == "auto":
        yield from _suitable()
        return
    name, colon, parameter = target.partition(":")
    runtime = RUNTIMES.get(name)
    if runtime is None or (colon and not runtime.parameter):
        raise UsageError("--target", given=target, expected=targets(), fix="Take auto if in doubt.")
    chosen = runtime(parameter)
    chosen.version()  # a missing package is an error of the target, not of each model
    yield chosen


def first_that_works(target: str, subject: str, attempt: Callable[[Runtime], T]) -> T:
    """Return the result of the first runtime of a target with which an attempt succeeds.

    Each failure is logged with ``subject``, and becomes part of the next runtime's reason. A target that
    names a runtime has no alternative. The error of the last runtime is raised.
    """
    runtimes = _candidates(target)
    runtime = next(runtimes)
    failed: list[str] = []
    while True:
        try:
            return attempt(runtime)
        except (BackendError, BundleError, GoldenError, RunnerError) as error:
            following = next(runtimes, None)
            if following is None:
                raise
            log.warning("%s: %s is tried, because %s failed: %s", subject, following.name, runtime.name, error)
            failed.append(f"{runtime.name} failed: {error}")
        following.reason = " ".join((*failed, following.reason))
        runtime = following


def _suitable() -> Iterator[Runtime]:
    """Yield the suitable runtimes; the reason of each includes those against the runtimes before it."""
    against: list[str] = []
    any_suitable = False
    for runtime in RUNTIMES.values():
        try:
            judged = runtime.suitability()
        except BackendError as error:
            judged = Suitability(False, f"{error.subject} is missing: {error.given}.")
        if judged is None:
            continue
        if judged.suitable:
            any_suitable = True
            yield runtime(reason=" ".join([*against, judged.reason]))
        else:
            against.append(judged.reason)
    if not any_suitable:
        fix = "Install the extra 'cpu', or name a runtime with --target."
        given = Raw(" ".join(against))
        raise BackendError("--target auto", given=given, expected="a suitable runtime", fix=fix)

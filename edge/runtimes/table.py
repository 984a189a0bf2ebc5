"""The table of runtimes, and the choice of one for a target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from edge.errors import BackendError, BundleError, GoldenError, Literally, RunnerError, UsageError
from edge.runtimes.onnxruntime_cpu import OnnxRuntimeCpu
from edge.runtimes.onnxruntime_cuda import OnnxRuntimeCuda
from edge.runtimes.onnxruntime_tensorrt import OnnxRuntimeTensorRt
from edge.runtimes.runtime import Runtime, Suitability
from edge.runtimes.simulated import Simulated
from edge.runtimes.tensorrt import TensorRt
from edge.runtimes.tensorrt_rtx import TensorRtRtx

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Every runtime by its target's name. ``auto`` takes the first that is suitable.
RUNTIMES: dict[str, type[Runtime]] = {
    runtime.name: runtime
    for runtime in (TensorRt, OnnxRuntimeTensorRt, OnnxRuntimeCuda, OnnxRuntimeCpu, TensorRtRtx, Simulated)
}


def targets() -> str:
    """Return all targets, as the help of ``--target`` and its errors list them."""
    *first, last = ["auto", *(runtime.target() for runtime in RUNTIMES.values())]
    return f"{', '.join(first)} or {last}"


def choose(target: str = "auto") -> Runtime:
    """Return the runtime for a target; for ``auto`` the first that is suitable.

    Args:
        target: a runtime's name, with a colon and a parameter where it has one, or ``auto``.

    Raises:
        UsageError: there is no such target, or its parameter is wrong.
        BackendError: the package that the target needs is missing, or this release refuses it.
    """
    return next(candidates(target))


def choose_to_run(target: str = "auto") -> Runtime:
    """Return the runtime for a target as :func:`choose` does; it must run models, not only build them.

    Raises:
        UsageError: as :func:`choose`, or the target only builds.
        BackendError: as :func:`choose`.
    """
    runtime = choose(target)
    if runtime.build_only:
        fix = "Its engines only prove that a model compiles; take auto."
        raise UsageError("--target", given=target, expected="a target that this program can run", fix=fix)
    return runtime


def candidates(target: str = "auto") -> Iterator[Runtime]:
    """Yield the runtimes for a target, the best first: one for a name, every suitable one for ``auto``.

    Raises:
        UsageError: there is no such target, or its parameter is wrong.
        BackendError: the package that the target needs is missing, or no runtime is suitable.
    """
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

    Each failure is logged, and becomes part of the next runtime's reason. A target that names a runtime has no other.

    Args:
        target: as :func:`choose` takes it.
        subject: the name of the model in the log.
        attempt: builds or loads the model with a runtime.

    Raises:
        FewheadsError: the error of the last runtime.
    """
    runtimes = candidates(target)
    return _first(next(runtimes), runtimes, subject, attempt, ())


def _first(
    runtime: Runtime, others: Iterator[Runtime], subject: str, attempt: Callable[[Runtime], T], failed: tuple[str, ...]
) -> T:
    try:
        return attempt(runtime)
    except (BackendError, BundleError, GoldenError, RunnerError) as error:
        following = next(others, None)
        if following is None:
            raise
        log.warning("%s: %s is tried, because %s failed: %s", subject, following.name, runtime.name, error)
        failed = (*failed, f"{runtime.name} failed: {error}")
    following.reason = " ".join((*failed, following.reason))
    return _first(following, others, subject, attempt, failed)


def _suitable() -> Iterator[Runtime]:
    """Yield the suitable runtimes, each with the reasons against those before it."""
    against: list[str] = []
    found = False
    for runtime in RUNTIMES.values():
        try:
            judged = runtime.suitability()
        except BackendError as error:
            judged = Suitability(False, f"{error.subject} is missing: {error.given}.")
        if judged is None:
            continue
        if judged.suitable:
            found = True
            yield runtime(reason=" ".join([*against, judged.reason]))
        else:
            against.append(judged.reason)
    if not found:
        fix = "Install the extra 'cpu', or name a runtime with --target."
        given = Literally(" ".join(against))
        raise BackendError("--target auto", given=given, expected="a suitable runtime", fix=fix)

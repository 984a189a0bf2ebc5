"""Interface of a loaded model: tensors in, tensors out, on the host or kept on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from edge.datatypes import Array, TensorSpec, datatype_of
from edge.errors import InvalidRequest, Raw

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle(Protocol):
    """An immutable tensor on a runner's device, freed with its last reference."""

    @property
    def datatype(self) -> str:
        """The protocol's name of its type, such as ``FP32``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> Array:
        """Return a copy on the host."""


#: A tensor on the host or on the device.
Tensor = Array | Handle


class LoopTensors(NamedTuple):
    """The names of a step's tensors: the inputs ``state``, ``prompt`` and ``last``, and the outputs.

    State, prompt and next state are [N, T, width]. ``last`` [N, 1] is the index of each row's last token. Prediction
    and residual are [N, 1].
    """

    state: str
    prompt: str
    last: str
    next_state: str
    prediction: str
    residual: str


class DeviceLoop(Protocol):
    """The rows of a loop, whose states and prompts stay on a runner's device from step to step.

    Rows may differ in their number of tokens; behind the last one there are zeros. The methods raise as
    :meth:`Runner.run`. After an error of :meth:`add` the loop is as before, after one of
    another method it cannot go on.
    """

    def add(self, state: Tensor, prompt: Tensor) -> None:
        """Add n rows of T tokens behind the others; both tensors are [n, T, width]."""

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        """Drop some rows, so that ``rows`` are left.

        Args:
            moves: the old place of a row that stays, ``rows`` or more, and its new place, that of a dropped row.
        """

    def step(self) -> tuple[Array, Array]:
        """Compute the steps of all rows, and return predictions and residuals after each step, [steps, rows] each.

        The arrays may change with the next call of any method.
        """


class DecoderTensors(NamedTuple):
    """The names of a decoder's tensors; see :class:`edge.bundles.programs.GenerateProgram`.

    ``cache`` has the input with the entries so far and the output with the new ones, of the keys and values of all
    layers, and ``hidden`` what each block of a decoder computes for the next one.
    """

    tokens: str
    lengths: str
    last: str
    logits: str
    cache: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...] = ()


class DeviceDecoder(Protocol):
    """The rows of a decoder, whose keys and values stay on a runner's device from step to step.

    The methods raise as :meth:`Runner.run`. After an error of :meth:`add` the decoder is as before, after one of
    another method it cannot go on. The logits, [rows, vocabulary], may change with the next call of any method.

    Attributes:
        cache_bytes: memory of the cache, of present rows and of those that it has room for.
    """

    @property
    def cache_bytes(self) -> int: ...

    def add(self, tokens: Array, lengths: Array) -> Array:
        """Add rows behind the others, and return the logits after their last tokens.

        Args:
            tokens: of the prompts, [n, T] INT64, with anything after their ends.
            lengths: of the prompts, [n], 1 to T.
        """

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        """Drop some rows, so that ``rows`` are left; see :meth:`DeviceLoop.keep`."""

    def step(self, tokens: Array) -> Array:
        """Append one token to each row, [rows] INT64, and return the logits after it."""


class Runner(Protocol):
    """One loaded model.

    Several threads may call it at once, unless its runtime is ``thread_bound``: then only the thread that loaded it
    may.

    Attributes:
        platform: Triton's name of the runtime, for example ``onnxruntime_onnx`` or ``tensorrt_plan``.
        device: ``CPU`` or ``GPU``.
    """

    @property
    def platform(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs, or raise a RunnerError. The arrays returned belong to the caller."""

    def upload(self, array: Array) -> Handle:
        """Copy an array to the device; raise an InvalidRequest for BYTES, which exist only on the host."""

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        """Compute all outputs like :meth:`infer`, from tensors on either side, and keep some outputs on the device.

        A loop feeds a kept output of one run into the next, and the state never crosses to the host.

        Args:
            feeds: arrays, or handles from any runner of the same runtime, by input.
            keep: outputs to return as handles.

        Raises:
            InvalidRequest: :func:`check_feeds` finds an error.
            RunnerError: the runtime failed; its text is in the log.
        """

    def loop(self, tensors: LoopTensors, steps: int = 1) -> DeviceLoop:
        """Return a loop without rows.

        Args:
            tensors: of the graph, which is the step.
            steps: the number of steps that :meth:`DeviceLoop.step` computes at once.
        """

    def decoder(self, tensors: DecoderTensors, *further: Self) -> DeviceDecoder:
        """Return a decoder without rows; ``tensors`` are the graphs'.

        Args:
            further: runners of the same runtime for the blocks after this one, in their order. All stay open as long as
                the decoder is used.
        """

    def close(self) -> None:
        """Free the device memory. The runner and its handles are invalid afterwards."""


class Pending(Protocol):
    """A run that has been started."""

    def result(self) -> dict[str, Array]:
        """Wait for the run, and return all outputs; see :meth:`Runner.infer`."""


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner whose device computes a run while the caller prepares the next one."""

    def start(self, feeds: Mapping[str, Array]) -> Pending:
        """Start a run. At most two may be pending, and their results are taken in the order of their starts."""


def check_feeds(runner: Runner, feeds: Mapping[str, Tensor], keep: Collection[str], subject: str) -> None:
    """Raise an InvalidRequest if arguments of :meth:`Runner.run` do not match the tensors of the graph ``subject``."""
    names = [spec.name for spec in runner.inputs]
    if feeds.keys() != set(names):
        fix = "Feed each input of the graph once."
        raise InvalidRequest(f"inputs of {subject}", given=sorted(feeds), expected=str(sorted(names)), fix=fix)
    for spec in runner.inputs:
        tensor = feeds[spec.name]
        datatype = _datatype(tensor)
        if datatype != spec.datatype or not spec.accepts(tensor.shape):
            given, expected = Raw(f"{datatype} {list(tensor.shape)}"), f"{spec.datatype} {list(spec.shape)}"
            fix = "Feed an output that has the datatype and shape of this input."
            raise InvalidRequest(f"input {spec.name!r} of {subject}", given=given, expected=expected, fix=fix)
    outputs = [spec.name for spec in runner.outputs]
    unknown = [name for name in keep if name not in outputs]
    if unknown:
        fix = "Keep an output of the graph."
        raise InvalidRequest(f"keep of {subject}", given=unknown[0], expected=f"one of {outputs}", fix=fix)


def _datatype(tensor: Tensor) -> str:
    if not isinstance(tensor, np.ndarray):
        return tensor.datatype
    try:
        return datatype_of(tensor)
    except KeyError:
        return str(tensor.dtype)

"""Batch assembly: which requests may share a run, the shape that it is padded to, and their parts of the outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from edge.bundles.manifest import Manifest
from edge.bundles.steps import TokenizerPreprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, RunnerError
from edge.scheduling.latency import LatencyModel

#: Runs share a bucket if padding the smaller ones lengthens them by at most this part.
_SHARE = 0.1
#: Runs of a size before its time counts. The first ones of a shape are slow, because its graph is captured.
_LEAST_RUNS = 32
#: The times are compared again after so many runs, one of which is not padded further: no other run shows its time.
_REVIEWED_RUNS = 64
_SHORTEST = 8


def next_length(length: int) -> int:
    """Return the next of 8, 12, 16, 24, 32, 48 and so on: padding adds at most half of a text's tokens."""
    octave = max(1 << (length - 1).bit_length(), _SHORTEST)
    return octave * 3 // 4 if octave > _SHORTEST and length <= octave * 3 // 4 else octave


class Buckets:
    """Shapes of the runs of one tier, chosen by measured times where there are any.

    Without them, lengths are padded to :func:`next_length`, and rows not at all. Lengths whose runs take about the same
    time are padded to the longest of them, and rows to the next power of two where that costs as little.

    Args:
        longest: the most tokens that the model takes; 0 if lengths are not padded.
        most_rows: the most rows of a run; 0 if rows are not padded.
        latency: run times by rows times tokens, in which padded runs are learnt.
    """

    def __init__(self, longest: int, most_rows: int = 0, latency: LatencyModel | None = None) -> None:
        self._longest, self._most_rows, self._latency = longest, most_rows, latency
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        self._runs = 0
        self.pads_rows = bool(most_rows > 1 and latency)

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the rows and tokens that a run is padded to; ``tokens``, of the longest row, may be another fixed
        size.
        """
        width = min(next_length(tokens), self._longest) if self._longest else tokens
        self._runs += 1
        if self._runs % _REVIEWED_RUNS == 0:
            self._shapes.clear()
            return rows, width
        shape = self._shapes.get((rows, width))
        if shape is None:
            more = self._more(rows, width)
            longer = self._longer(more, width) if self._longest else width
            shape = more, longer if self._costs_little(rows * width, more * longer) else width
            self._shapes[rows, width] = shape
        return shape

    def _longer(self, rows: int, width: int) -> int:
        ends = [width]
        while ends[-1] < self._longest:
            ends.append(min(next_length(ends[-1] + 1), self._longest))
        # From the longest on: a length has a bucket of its own if padding to the next bucket costs too much.
        bucket = ends[-1]
        for end in reversed(ends):
            if not self._costs_little(rows * end, rows * bucket):
                bucket = end
        return bucket

    def _more(self, rows: int, width: int) -> int:
        more = min(1 << (rows - 1).bit_length(), self._most_rows)
        return more if more > rows and self._costs_little(rows * width, more * width) else rows

    def _costs_little(self, size: int, padded: int) -> bool:
        if size == padded:
            return True
        if self._latency is None:
            return False
        seconds = self._latency.usual_seconds(size, _LEAST_RUNS)
        longer = self._latency.usual_seconds(padded, _LEAST_RUNS)
        return seconds is not None and longer is not None and longer <= (1 + _SHARE) * seconds


class BatchAssembler:
    """Joins the inputs of requests to one model along their first dimension.

    ``padding`` has the value of each input, [rows, tokens], that may be padded, to the longest request or to the shape
    of a bucket; without any, only requests of equal shapes are joined.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], padding: Mapping[str, int], buckets: Buckets | None = None
    ) -> None:
        self._padding = dict(padding)
        self._buckets = buckets
        self.pads_alone = bool(buckets and (padding or buckets.pads_rows))  # a single request needs join, too
        self._dynamic = {spec.name: [axis for axis, size in enumerate(spec.shape) if size == -1] for spec in inputs}

    @classmethod
    def of(
        cls, manifest: Manifest, *, few_shapes: bool = False, most_rows: int = 0, latency: LatencyModel | None = None
    ) -> BatchAssembler:
        """Return the assembler of a model, which pads what the model's tokenizer would have padded, and nothing else.

        Nothing is padded if an output or another input has a length, too. ``few_shapes`` pads to :class:`Buckets`.
        """
        step, padding, longest = manifest.preprocess, {}, 0
        if isinstance(step, TokenizerPreprocess) and manifest.max_batch_size:
            lengths = {spec.name for spec in (*manifest.inputs, *manifest.outputs) if -1 in spec.shape[1:]}
            shapes = {spec.shape for spec in manifest.inputs if spec.name in step.graph_inputs}
            if lengths == set(step.graph_inputs) and shapes == {(-1, -1)}:
                padding = {name: step.pad_id if name == step.ids else 0 for name in step.graph_inputs}
                longest = min(manifest.profile[name].max[1] for name in padding)
        return cls(manifest.inputs, padding, Buckets(longest, most_rows, latency) if few_shapes else None)

    def key(self, inputs: Mapping[str, Array]) -> Hashable:
        """Return a key that is equal for requests that can be joined: names, datatypes, shapes, and length bucket."""
        length = self._length(inputs)
        parts: list[Hashable] = [next_length(length)] if length else []
        for name, array in sorted(inputs.items()):
            parts.append((name, array.dtype.char, array.shape[1:] if not length or name not in self._padding else None))
        return tuple(parts)

    def size(self, inputs: Mapping[str, Array]) -> int:
        """Return the number of elements that the time of a run grows with: the largest product of dynamic axes."""
        return max(int(prod(inputs[name].shape[axis] for axis in axes)) for name, axes in self._dynamic.items())

    def join(self, requests: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """Return the inputs of one run for requests with equal :meth:`key`, in their order.

        Rows that are added repeat the first one, behind the others.
        """
        rows, width = sum(len(next(iter(inputs.values()))) for inputs in requests), 0
        if self._padding:
            width = max(map(self._length, requests))
        if self._buckets and (width or not self._padding):
            rows, width = self._buckets.shape(rows, width or sum(map(self.size, requests)) // rows)
        return {name: self._joined(name, [inputs[name] for inputs in requests], rows, width) for name in requests[0]}

    def _joined(self, name: str, arrays: list[Array], rows: int, width: int) -> Array:
        added = rows - sum(map(len, arrays))
        value = self._padding.get(name)
        widths = {width or arrays[0].shape[1], *(array.shape[1] for array in arrays)} if value is not None else set()
        if len(widths) < 2:
            if added:
                arrays = [*arrays, np.repeat(arrays[0][:1], added, axis=0)]
            return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        joined = np.full((rows, max(widths)), value, arrays[0].dtype)
        row = 0
        for array in arrays:
            joined[row : row + len(array), : array.shape[1]] = array
            row += len(array)
        joined[row:] = joined[0]
        return joined

    def _length(self, inputs: Mapping[str, Array]) -> int:
        """Return the tokens of a row; 0 without padding, or if the inputs disagree, which the graph rejects."""
        lengths = {inputs[name].shape[1] for name in self._padding}
        return int(lengths.pop()) if len(lengths) == 1 else 0


def split(outputs: Mapping[str, Array], rows: Sequence[int], added: int = 0) -> list[dict[str, Array]]:
    """Return each request's ``rows`` of the outputs of a joined run, as views, without the rows ``added`` behind them.

    Raise a RunnerError if an output has another number of rows than the inputs had.
    """
    total = sum(rows) + added
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != total:
            raise RunnerError(
                f"output {name!r}",
                given=Raw(f"shape {list(array.shape)} for {total} rows"),
                expected="one row for each row of the inputs",
                fix="The model mixes its rows; serve it with max_batch_size 0.",
            )
    parts = [slice(end - count, end) for end, count in zip(accumulate(rows), rows, strict=True)]
    return [{name: array[part] for name, array in outputs.items()} for part in parts]


def byte_size(inputs: Mapping[str, Array]) -> int:
    """Return the bytes that the inputs of a request hold while it waits; of texts, those of their contents."""
    return sum(
        sum(map(len, array.ravel().tolist())) if array.dtype.kind == "O" else prod(array.shape) * array.itemsize
        for array in inputs.values()
    )


def nonfinite(arrays: Mapping[str, Array]) -> tuple[str, ...]:
    """Return the names of the tensors that contain a NaN or an infinity; about 2 µs for a small one."""
    floats = [(name, array) for name, array in arrays.items() if array.dtype.kind == "f"]
    return tuple([name for name, array in floats if np.count_nonzero(np.isfinite(array)) != array.size])


def within(array: Array, largest: np.float32) -> Array:
    """Return which numbers are at most ``largest`` in size, as bool; NaN is not."""
    return np.abs(array) <= largest

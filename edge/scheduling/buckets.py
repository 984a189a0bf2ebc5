"""Shapes that runs are padded to, so that few occur and each can have a graph of its own."""

from __future__ import annotations

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
    time, such as short ones, whose kernels take less time than their launches, are padded to the longest of them. Rows
    are padded to the next power of two where that costs as little.

    Args:
        longest: the most tokens that the model takes; 0 if lengths are not padded.
        most_rows: the most rows of a run; 0 if rows are not padded.
        latency: run times by size, rows times tokens, in which padded runs are learnt; None has none.
    """

    def __init__(self, longest: int, most_rows: int = 0, latency: LatencyModel | None = None) -> None:
        self._longest, self._most_rows, self._latency = longest, most_rows, latency
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        self._runs = 0
        self.pads_rows = bool(most_rows > 1 and latency)

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the rows and tokens that a run is padded to.

        Args:
            tokens: of the longest row, or whatever else the size of a row of fixed length is, which then stays.
        """
        width = min(next_length(tokens), self._longest) if self._longest else tokens
        self._runs += 1
        if self._runs % _REVIEWED_RUNS == 0:
            self._found.clear()
            return rows, width
        found = self._found.get((rows, width))
        if found is None:
            more = self._more(rows, width)
            longer = self._longer(more, width) if self._longest else width
            found = more, longer if self._costs_little(rows * width, more * longer) else width
            self._found[rows, width] = found
        return found

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

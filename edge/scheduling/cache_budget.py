"""Budget of the memory for keys and values, which requests for text reserve before they wait for a run."""

from __future__ import annotations

import threading

from edge.errors import InvalidRequest, Overloaded, Raw


class CacheBudget:
    """Bytes that all requests for text, of all models, may reserve together; any thread may give them back."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.reserved_bytes = most_bytes, 0
        self._lock = threading.Lock()

    def reserve(self, model: str, size_bytes: int) -> Reservation | None:
        """Reserve bytes for a request to a model; return None if others have reserved too many.

        Raises:
            InvalidRequest: it would not fit alone.
        """
        if size_bytes > self.most_bytes:
            given = Raw(f"{size_bytes} bytes of keys and values")
            expected = f"at most {self.most_bytes}, all that the server has for them"
            fix = "Shorten the prompt, lower max_tokens, or raise --cache-mib."
            raise InvalidRequest(f"prompt and max_tokens of {model!r}", given=given, expected=expected, fix=fix)
        with self._lock:
            if self.reserved_bytes + size_bytes > self.most_bytes:
                return None
            self.reserved_bytes += size_bytes
        return Reservation(self, size_bytes)

    def refusal(self, size_bytes: int, seconds: float) -> Overloaded:
        """Return the error of a request that gets no bytes, and would be answered in ``seconds`` with others before."""
        return Overloaded(
            "cache",
            given=Raw(f"{size_bytes} bytes of keys and values for prompt and max_tokens"),
            expected=f"at most {self.most_bytes - self.reserved_bytes}, which other requests leave",
            fix="Send the request again later, or lower max_tokens.",
            cause="cache",
            retry_after_ms=max(round(seconds * 1e3), 1),
        )

    def give_back(self, size_bytes: int) -> None:
        """Take reserved bytes back."""
        with self._lock:
            self.reserved_bytes -= size_bytes


class Reservation:
    """The bytes of one request, as a :class:`edge.scheduling.job.Use`: they are given back when it has ended."""

    def __init__(self, budget: CacheBudget, size_bytes: int) -> None:
        self._budget, self._size_bytes = budget, size_bytes

    def take(self) -> bool:
        """Return False: it was taken when it was made."""
        return False

    def give_back(self) -> None:
        """Give the bytes back."""
        self._budget.give_back(self._size_bytes)

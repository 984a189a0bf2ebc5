"""Process of one job: ``python -m export.parallel.child``.

It reads a pickled function and its arguments from stdin, calls the function, and exits; a traceback goes to stderr. It
ends when stdin closes, so it never outlives its parent.
"""

from __future__ import annotations

import pickle
import signal
import sys

from edge.child import end_with_parent


def main() -> None:
    """Call the function on stdin. The exit code is 0, or 1 if it raises."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, and ends this process
    function, arguments = pickle.load(sys.stdin.buffer)
    end_with_parent()
    function(*arguments)


if __name__ == "__main__":
    main()

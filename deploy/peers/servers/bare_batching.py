"""grpcio in front of one accelerator: a device thread runs the requests that wait, up to a full batch at once.

python bare_batching.py PORT THREADS FILE RUN_MS MAX_ROWS      requests of one row, raw contents, no checks
"""

import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np
from bare import serve
from sessions import session


def drive(device, max_rows, waiting):
    """Run batches for ever."""
    while True:
        jobs = [waiting.get()]
        while len(jobs) < max_rows and not waiting.empty():  # no other thread takes from it
            jobs.append(waiting.get())
        rows = [feeds for feeds, _ in jobs]
        batch = {name: np.concatenate([feeds[name] for feeds in rows]) for name in rows[0]}
        (values,) = device.run(None, batch)
        for row, (_, future) in enumerate(jobs):
            future.set_result(values[row : row + 1])


def main() -> None:
    port, threads, path, run_ms, max_rows = sys.argv[1:]
    device = session(path, float(run_ms))
    output = device.get_outputs()[0].name
    waiting = SimpleQueue()
    threading.Thread(target=drive, args=(device, int(max_rows), waiting), daemon=True).start()

    def compute(name, feeds):
        future = Future()
        waiting.put((feeds, future))
        return output, future.result()

    serve(int(port), int(threads), compute)


if __name__ == "__main__":
    main()

"""A client in a process of its own that calls ServerLive all the time, and says how long its slowest call took.

A call's time is the processor time that the server used meanwhile, for whomever, if that is less: other programs on a
busy machine make everybody wait, too.

python -m tests.support.waiting_client PORT PROCESS      a line on stdin is answered by the seconds since the one before
"""

import select
import subprocess
import sys
import time
from contextlib import contextmanager

import grpc

from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc


class WaitingClient:
    def __init__(self, process):
        self._process = process

    def slowest(self):
        """Return the seconds of the slowest call since the last time."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def waiting_client(port, process_id):
    command, pipe = [sys.executable, "-m", __name__, str(port), str(process_id)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        client = WaitingClient(process)
        client.slowest()
        yield client


def main():
    clock = ~int(sys.argv[2]) << 3 | 2  # of the process, as clock_getcpuclockid(3) has it
    with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
        stub, slowest = inference_pb2_grpc.GRPCInferenceServiceStub(channel), 0.0
        while True:
            start, used = time.perf_counter(), time.clock_gettime(clock)
            stub.ServerLive(pb.ServerLiveRequest(), wait_for_ready=True)
            slowest = max(slowest, min(time.perf_counter() - start, time.clock_gettime(clock) - used))
            if select.select([sys.stdin], [], [], 0.002)[0]:
                if not sys.stdin.readline():
                    return
                print(slowest, flush=True)
                slowest = 0.0


if __name__ == "__main__":
    main()

"""Clients that send requests without a pause while a test acts on their servers."""

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge.client import ONCE, Client, InferRequest, InferResult, text
from edge.errors import ServerError

INPUTS = {"expression": text(["1 + 1"])}


@dataclass
class Traffic:
    """Start of each call, and its answer or error."""

    answers: list[tuple[float, InferResult]] = field(default_factory=list)
    failures: list[tuple[float, ServerError]] = field(default_factory=list)

    def servers(self, since):
        return Counter(result.call.server for begun, result in self.answers if begun >= since)

    def versions(self):
        return [result.model_version for _, result in self.answers]


@contextmanager
def traffic(servers, model, retries=ONCE, threads=8, streams=0):
    """Send requests from several threads, some of them on streams, while the block runs."""
    result, stop = Traffic(), threading.Event()

    def requests():
        while not stop.is_set():
            yield InferRequest(model=model, inputs=INPUTS)

    def send(client, streaming):
        while not stop.is_set():
            begun = time.monotonic()
            try:
                for answer in client.infer_stream(requests()) if streaming else [client.infer(model, INPUTS)]:
                    assert isinstance(answer, InferResult), answer
                    assert answer.outputs["value"][0, 0] == 2
                    result.answers.append((begun, answer))
                    begun = time.monotonic()
            except ServerError as error:
                result.failures.append((begun, error))

    with Client(servers, retries=retries) as client:
        senders = [threading.Thread(target=send, args=(client, number < streams)) for number in range(threads)]
        for sender in senders:
            sender.start()
        try:
            yield result
        finally:
            stop.set()
            for sender in senders:
                sender.join()
            retried = sum(answer.call.attempts > 1 for _, answer in result.answers)
            longest = max(answer.round_trip_ns for _, answer in result.answers) / 1e9 if result.answers else 0
            counts = f"{len(result.answers)} answers, {retried} retried, {len(result.failures)} lost"
            print(f"{counts}, longest answer {longest:.2f} s")

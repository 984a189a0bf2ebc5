"""No request that may run waits beside an idle worker, whatever comes or leaves, by a clock that the test moves."""

import itertools
import math
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge.datatypes import Array
from edge.programs.program import Computed, Finished, IterativeProgram, LoopLimits, Session
from edge.scheduling import continuous as module
from edge.scheduling.batching import BatchAssembler
from edge.scheduling.latency import LatencyModel
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import LoopExecutor, TierExecutor
from tests.support.jobs import VALUES, WAIT, Overlapping, executor_of, job_of, submitted

DELAY = 4.0
#: Executors, by their places in :attr:`Server.executors`.
PLAIN, DELAYED, PREFERRED, OVERLAPPING, STEPWISE, DELAYED_STEPS = KINDS = range(6)


class Clock:
    """The time of all threads, and what each of them waits for."""

    def __init__(self):
        self.now = 1e6
        self._changed = threading.Condition()
        self._waits = {}

    def monotonic(self):
        return self.now

    def change(self, action):
        with self._changed:
            action()
            self._changed.notify_all()

    def advance(self, seconds):
        self.change(lambda: setattr(self, "now", self.now + seconds))

    def wait(self, ready, until=math.inf):
        with self._changed:
            self._waits[threading.get_ident()] = ready, until
            self._changed.notify_all()
            while not ready() and self.now < until:
                self._changed.wait(WAIT)
            del self._waits[threading.get_ident()]

    def settle(self, threads):
        """Return once so many threads wait for something that only the test can do."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting() == threads, WAIT)

    def _waiting(self):
        return sum(not ready() and self.now < until for ready, until in self._waits.values())


class Inbox:
    def __init__(self, clock):
        self._clock, self._items = clock, deque[Any]()
        self.works = 0

    def put(self, item):
        def append():
            self._items.append(item)
            self.works += callable(item)

        self._clock.change(append)

    def empty(self):
        return not self._items

    def get(self, timeout=None):
        until = math.inf if timeout is None else self._clock.now + timeout
        self._clock.wait(lambda: bool(self._items), until)
        if not self._items:
            raise Empty
        return self._items.popleft()


class Device:
    """Everything that computes waits here until the test lets it end."""

    def __init__(self, clock):
        self._clock, self.running, self._numbers = clock, dict[int, bool](), itertools.count()

    def compute(self):
        number = next(self._numbers)
        self.running[number] = False
        self._clock.wait(lambda: self.running[number])
        del self.running[number]

    def end(self, place):
        """End one of the runs, or the step of a session."""
        if running := sorted(self.running):
            number = running[place % len(running)]
            self._clock.change(lambda: self.running.update({number: True}))


class Unlearnt(LatencyModel):
    """No run becomes so brief that the submitting thread, which is the test's, would compute it."""

    def usual_seconds(self, size):
        return None


class Stepwise(IterativeProgram):
    """A request takes two steps."""

    limits = LoopLimits(2, 1.0)

    def __init__(self, device):
        self._device = device

    def session(self, options):
        return Steps(self._device)


class Steps(Session):
    def __init__(self, device):
        self._device, self._left = device, dict[object, tuple[int, Array]]()

    @property
    def rows(self):
        return sum(len(rows) for _, rows in self._left.values())

    def add(self, requests):
        self._left |= {request.key: (2, request.inputs["x"]) for request in requests}
        return []

    def step(self):
        self._device.compute()
        self._left = {key: (left - 1, rows) for key, (left, rows) in self._left.items()}
        ended = [(key, rows) for key, (left, rows) in self._left.items() if not left]
        for key, _ in ended:
            del self._left[key]
        return [Finished(key, Computed({"y": rows}, repeats=2.0)) for key, rows in ended]

    def partial(self, key, stopped=""):
        return None

    def drop(self, key):
        self._left.pop(key, None)


class Server:
    """A scheduler on the clock, and the requests that it got."""

    def __init__(self, clock, instances, *, device_bound):
        self.clock, self.device, self.device_bound = clock, Device(clock), device_bound
        self.scheduler = Scheduler(1000, instances=instances, device_bound=device_bound, admission=False)
        of_device = partial(TierExecutor, "full", assembler=BatchAssembler(VALUES, {}))
        stepwise = partial(LoopExecutor, "full", assembler=BatchAssembler(VALUES, {}))
        held = partial(executor_of, lambda rows: (self.device.compute(), rows)[1])
        self.executors = [
            held(),
            held(max_rows=4, max_delay_seconds=DELAY),
            held(max_rows=8, max_delay_seconds=2 * DELAY, preferred_rows=(4,)),
            of_device(program=Overlapping(self.device.compute), max_rows=2),
            stepwise(program=Stepwise(self.device), max_rows=3),
            stepwise(program=Stepwise(self.device), max_rows=4, max_delay_seconds=DELAY, preferred_rows=(2,)),
        ]
        for executor in self.executors:
            executor.latency = Unlearnt()
        self.jobs = []

    def submit(self, kind, rows, seconds=None):
        executor = self.executors[kind]
        deadline = None if seconds is None else self.clock.now + seconds
        rows = min(rows, executor.max_rows or rows)
        self.jobs.append(submitted(self.scheduler, job_of(executor, *[1.0] * rows, deadline=deadline)))

    def submit_brief(self, kind, rows):
        """Submit a run that the submitting thread may compute, and a request that comes meanwhile."""
        brief = executor_of(lambda both: (self.submit(kind, rows), both)[1])
        brief.latency.observe(1, 1e-6)
        self.jobs.append(submitted(self.scheduler, job_of(brief, 1.0)))

    def end(self, place):
        self.device.end(place)

    def advance(self, seconds):
        self.clock.advance(seconds)

    def cancel(self, place):
        if self.jobs:
            self.jobs[place % len(self.jobs)].cancel()

    def work(self):
        """Give the server work of its own, such as loading a model."""
        if self.device_bound:
            inbox = self.scheduler._workers[0].inbox
            before = inbox.works
            threading.Thread(target=self.scheduler.call, args=(self.device.compute,), daemon=True).start()
            self.clock.wait(lambda: inbox.works > before)

    def check(self):
        """Check the state in which nothing moves any more, without the requests whose deadline has passed."""
        scheduler, limit = self.scheduler, time.perf_counter() + WAIT
        while any(job.deadline is not None and job.deadline <= self.clock.now for job in self._waiting()):
            self._look_for_expired()
            assert time.perf_counter() < limit
        self.clock.settle(len(scheduler._workers))
        with scheduler._lock:
            ready_at = scheduler.queue.ready_at()
            waits = ready_at is not None and ready_at <= self.clock.now
            assert not (waits and scheduler._idle), "a request waits beside an idle worker"

    def close(self):
        """Close it while requests wait, and check that all of them end."""
        closing = threading.Thread(target=self.scheduler.close, daemon=True)
        closing.start()
        limit = time.perf_counter() + WAIT
        while closing.is_alive():
            assert time.perf_counter() < limit
            for place in range(len(self.device.running)):
                self.device.end(place)
            self.clock.advance(1.0)
            self._look_for_expired()
            closing.join(0.001)
        assert all(job.done() or job.cancelled for job in self.jobs)

    def _look_for_expired(self):
        with self.scheduler._lock:
            self.scheduler._alarm.notify()

    def _waiting(self):
        with self.scheduler._lock:
            return list(self.scheduler.queue)


@contextmanager
def serving(instances, *, device_bound):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock.monotonic)
        patch.setattr(module, "SimpleQueue", lambda: Inbox(clock))
        server = Server(clock, instances, device_bound=device_bound)
        try:
            yield server
        finally:
            server.close()


Kind, Rows, Place = st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 9)
Actions = st.lists(
    st.one_of(
        st.tuples(st.just(Server.submit), Kind, Rows),
        st.tuples(st.just(Server.submit), Kind, Rows, st.floats(0.5, 20.0)),
        st.tuples(st.just(Server.submit_brief), Kind, Rows),
        st.tuples(st.just(Server.end), Place),
        st.tuples(st.just(Server.cancel), Place),
        st.tuples(st.just(Server.work)),
        st.tuples(st.just(Server.advance), st.sampled_from((0.5, DELAY, 2 * DELAY))),
    ),
    max_size=25,
)


SUBMIT_PLAIN, SUBMIT_DELAYED = ((Server.submit, kind, 1) for kind in (PLAIN, DELAYED))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.booleans(), Actions)
@example(3, False, [SUBMIT_PLAIN, SUBMIT_DELAYED, SUBMIT_PLAIN, (Server.advance, DELAY)])  # who watches takes another
@example(
    3, True, [*[SUBMIT_PLAIN] * 3, *[(Server.end, 1)] * 2, SUBMIT_DELAYED, (Server.work,), (Server.advance, DELAY)]
)
# What is left of a group is of a preferred size: one is cancelled, expires, or joins a session.
@example(2, False, [SUBMIT_PLAIN, *[(Server.submit, PREFERRED, rows) for rows in (1, 4)], (Server.cancel, 1)])
@example(
    2, False, [SUBMIT_PLAIN, (Server.submit, PREFERRED, 1, 0.5), (Server.submit, PREFERRED, 4), (Server.advance, 0.5)]
)
@example(2, False, [*[(Server.submit, DELAYED_STEPS, rows) for rows in (3, 1, 2)], (Server.end, 0)])
def test_no_request_that_may_run_waits_beside_an_idle_worker(instances, device_bound, actions):
    with serving(instances, device_bound=device_bound) as server:
        for action, *arguments in actions:
            action(server, *arguments)
            server.check()


def test_no_request_that_a_worker_has_taken_waits_for_work_of_the_server():
    with serving(1, device_bound=True) as server:
        for kind in (OVERLAPPING, OVERLAPPING, OVERLAPPING, STEPWISE):
            server.submit(kind, 2)
        for _ in range(2):
            server.check()
            server.end(0)
        server.check()
        steps = server.jobs[-1]
        assert (len(server.scheduler.queue), steps.started) == (0, False)  # it is taken during the last run
        server.work()
        server.end(0)
        server.check()
        assert steps.started

"""All attacks, and the servers that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.attacks import content, frames, rest  # noqa: F401 - each adds its attacks
from tests.attacks.measure import ATTACKS, Attack, Measured, measure
from tests.attacks.target import Home, Target

#: A server that has kept this much more memory is replaced, so that each attack meets a fresh one.
_KEPT_BYTES = 100_000_000


class Servers:
    """One running server at a time, replaced where an attack needs another one, or has harmed it."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._key: tuple[object, ...] = ()
        self._target: Target | None = None

    def measure(self, attack: Attack, transport: str) -> Measured:
        """Attack a server; a wait that is too long counts if it is so twice."""
        result = self._measure(attack, transport)
        if len(result.problems) == 1 and "a wait of" in result.problems[0]:
            result = self._measure(attack, transport)
        return result

    def _measure(self, attack: Attack, transport: str) -> Measured:
        key = (transport, attack.tls, *attack.arguments)
        if key != self._key:
            problem = self.stop()
            assert not problem, problem
            self._target = Target(self._home, transport, *attack.arguments, tls=attack.tls)
            self._key = key
        assert self._target is not None
        before = self._target.readings[-1].rss_bytes if self._target.readings else 0
        result = measure(self._target, attack)
        kept = self._target.readings[-1].rss_bytes - before if before else 0
        if result.problems or kept > _KEPT_BYTES:
            result.problems += filter(None, [self.stop()])
        return result

    def stop(self) -> str:
        """End the running server, and return what was wrong with its end."""
        problem = self._target.stop() if self._target else ""
        self._target, self._key = None, ()
        return problem


@contextmanager
def servers(home: Home) -> Iterator[Servers]:
    """Return the servers, and check the end of the last one."""
    made = Servers(home)
    try:
        yield made
    finally:
        problem = made.stop()
    assert not problem, problem


def rows() -> list[tuple[str, Attack]]:
    """Return each attack with each of its transports; those that share a server are together."""
    found = [(transport, attack) for attack in ATTACKS.values() for transport in attack.transports]
    return sorted(found, key=lambda row: (row[0] != "nghttp2", row[1].tls, row[1].arguments))

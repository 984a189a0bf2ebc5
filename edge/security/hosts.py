"""The names under which a server on a loopback address answers over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from edge.errors import PermissionDenied

#: Below these, nobody can register a name.
_LOCAL: Final = (".localhost", ".local", ".internal", ".home.arpa")


class Hosts:
    """Addresses, names in no public zone, and further names.

    A web page may have its own name resolved to the loopback address (DNS rebinding), and its reader's browser then
    takes the server for the page's own. The name, which the browser sends, is what such a request cannot hide.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)

    def check(self, host: str | None) -> None:
        """Check the header ``Host`` of a request; a browser always sends one.

        Raises:
            PermissionDenied: anyone might have registered the name.
        """
        name = (host or "").strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")
        if "." not in name or name.endswith(_LOCAL) or name in self._names or _is_address(name):
            return
        expected = "an address, a local name, or one that --allow-host names"
        fix = "Use the server's address, or start it with --allow-host NAME."
        raise PermissionDenied("Host", given=host, expected=expected, fix=fix)


@lru_cache  # a client sends the same name with every request
def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True

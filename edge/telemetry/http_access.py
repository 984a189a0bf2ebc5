"""Token checks in front of a WSGI application, which sees only authorized requests."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from edge.errors import PermissionDenied, Unauthenticated
from edge.security.access import Access
from edge.telemetry.pages import PUBLIC

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

_STATUSES = {Unauthenticated: "401 Unauthorized", PermissionDenied: "403 Forbidden"}


class GuardedPages:
    """Lets those through who may call an RPC.

    Args:
        application: what they come to.
        access: who may call what.
        rpc: the RPC that gives the same data.
    """

    def __init__(self, application: WSGIApplication, access: Access, rpc: str) -> None:
        self._application = application
        self._access = access
        self._rpc = rpc

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if environ["PATH_INFO"] in PUBLIC:
            return self._application(environ, start_response)
        try:
            self._access.authorize(environ.get("HTTP_AUTHORIZATION"), self._rpc)
        except (Unauthenticated, PermissionDenied) as error:
            log.debug("a request over HTTP: %s", error)
            body = f"{error}\n".encode()
            headers = [
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
            ]
            if isinstance(error, Unauthenticated):
                headers.append(("WWW-Authenticate", "Bearer"))
            start_response(_STATUSES[type(error)], headers)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
        return self._application(environ, start_response)

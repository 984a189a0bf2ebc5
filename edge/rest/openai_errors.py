"""Errors in OpenAI's form, for the paths below :data:`PREFIX`."""

from __future__ import annotations

import re
from typing import Any, Final

from edge.errors import FewheadsError
from edge.rest.completions import FIELDS

PREFIX: Final = "/v1/"
_REQUEST: Final = "invalid_request_error"
#: HTTP status to the error's type and code.
_TYPES: Final[dict[int, tuple[str, str]]] = {
    400: (_REQUEST, "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: (_REQUEST, "not_found"),
    405: (_REQUEST, "method_not_allowed"),
    413: (_REQUEST, "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    501: (_REQUEST, "not_supported"),
    503: ("server_error", "not_ready"),
    504: ("server_error", "deadline_exceeded"),
}


def openai_error(status: int, error: object) -> dict[str, Any]:
    """Return the body for an error, or its text, with the field of the request that it names."""
    kind, code = _TYPES.get(status, ("server_error", "internal_error"))
    words = re.findall(r"\w+", error.subject) if isinstance(error, FewheadsError) else []
    param = next((word for word in words if word in FIELDS), None)
    if (status, param) == (404, "model"):
        code = "model_not_found"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}

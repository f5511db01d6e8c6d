"""Errors of requests, in the form of the OpenAI API."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status code.
        message: the reason, for the client.
        code: OpenAI's error code, which clients compare.
        param: the field of the request, or None.
        retry_after: seconds after which the client may retry, or None.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def as_json(self) -> dict[str, Any]:
        """Return the error object that OpenAI clients parse."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> RequestError:
    """Return the error for an invalid field of a request."""
    return RequestError(400, message, code=code, param=param)

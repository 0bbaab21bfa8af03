"""What stands before the server: keys, hosts, and the size of what is sent; and its errors, in the
form of OpenAI's API."""

import hmac
from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS |= {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
RETRY_SECONDS = "1"


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error of a `status`, with its `message`, the `param` that is wrong, and a `code`."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """The reply with an error: `status`, `message`, `param` and `code` as of [`error_body`]."""
    headers = {"Retry-After": RETRY_SECONDS} if status in (429, 503) else None
    return JSONResponse(error_body(status, message, param, code), status, headers)


class Guard:
    """An ASGI application in front of another one.

    Args:
        app: the one behind it.
        key: that requests must have, but for `/health`; `None`: none.
        hosts: names by which the server may be called, and of pages in a browser that may call it;
            `None`: any.
        largest: bytes of a request.
    """

    def __init__(self, app: Any, key: str | None, hosts: Collection[str] | None, largest: int):
        self.app, self.key, self.hosts, self.largest = app, key, hosts, largest

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope["path"], dict(scope["headers"]))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        size = 0

        async def counted():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.largest:
                raise HTTPException(413, self._too_large())
            return message

        await self.app(scope, counted, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self.hosts is not None:
            called = [headers.get(b"host", b""), *filter(None, [headers.get(b"origin")])]
            for name in map(_name_in, called):
                if name not in self.hosts:
                    return error_reply(403, f"this server is not called {name!r:.80}.")
        sent = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if self.key is not None and path != "/health":
            if not hmac.compare_digest(sent, self.key.encode()):
                return error_reply(
                    401,
                    "give the server's key: Authorization: Bearer KEY.",
                    None,
                    "invalid_api_key",
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.largest:
            return error_reply(413, self._too_large())
        return None

    def _too_large(self) -> str:
        return f"a request has at most {self.largest:,} bytes on this server."


def _name_in(called: bytes) -> str:
    """The name in a Host or an Origin, without its scheme and port."""
    host = called.decode("latin-1").rpartition("://")[2]
    name, _, port = host.rpartition(":")
    return name if port.isdigit() else host

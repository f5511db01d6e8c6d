"""The built-in chat page: static files that use this gateway only. The files require no key; the page asks the user for a key."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
CONTENT_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# No inline script or style, no other server, no embedding into other pages.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def create_routes(*, has_feedback: bool) -> list[Route]:
    """Return the routes of the page, its script and style, and /chat/config.json; / redirects to the page.

    Args:
        has_feedback: whether the gateway stores feedback; the page shows its buttons only then.
    """

    async def send_config(_: Request) -> Response:
        return JSONResponse({"feedback": has_feedback}, headers=HEADERS)

    def create_route(path: str, name: str) -> Route:
        content, kind = (FOLDER / name).read_bytes(), CONTENT_TYPES[Path(name).suffix]

        async def send(_: Request) -> Response:
            return Response(content, media_type=kind, headers=HEADERS)

        return Route(path, send)

    async def redirect(_: Request) -> Response:
        return RedirectResponse("chat", headers=HEADERS)

    return [
        Route("/", redirect),
        create_route("/chat", "chat.html"),
        create_route("/chat/chat.js", "chat.js"),
        create_route("/chat/chat.css", "chat.css"),
        Route("/chat/config.json", send_config),
    ]

"""HTTP requests with a secret in a header. The secret is not sent to redirect targets."""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit


class _NoRedirectHandler(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def build_opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener that does not follow redirects and, for a URL of this machine, does not use a proxy."""
    is_local = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    return urllib.request.build_opener(_NoRedirectHandler(), *([urllib.request.ProxyHandler({})] if is_local else []))

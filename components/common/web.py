"""HTTP with what a secret in a header needs: it is sent to the address that was named and nowhere else."""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def opener(url: str) -> urllib.request.OpenerDirector:
    """Without redirects; on this machine without a proxy."""
    here = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    return urllib.request.build_opener(_Stay(), *([urllib.request.ProxyHandler({})] if here else []))

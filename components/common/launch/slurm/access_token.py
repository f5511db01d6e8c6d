"""The JSON Web Token that identifies a user to slurmrestd.

The token is never part of the configuration. It is read for every call, because it expires.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from components.common.launch import JsonObject
from components.common.runtime.errors import TunelineError

TOKEN_VARIABLE = "SLURM_JWT"
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
RENEW_HINT = (
    "Run `scontrol token lifespan=SECONDS` on a login node, and store the token in the secret for SLURM_JWT or in the "
    "file launcher.slurm.rest_token_file. A renewed file takes effect while a job runs."
)


class TokenError(TunelineError):
    """slurmrestd or Slurm rejects the token or its user."""

    kind = "access"


@dataclass(frozen=True)
class Token:
    """Source of the token (`file`, or SLURM_JWT if `file` is empty), and the Slurm user."""

    file: str = ""
    user: str = ""

    @property
    def source(self) -> str:
        """The file or variable of the token."""
        return self.file or TOKEN_VARIABLE

    def build_headers(self) -> dict[str, str]:
        """Return the authentication headers of a request.

        Raises:
            TokenError: the token is missing, is unreadable or is not a JSON Web Token.
        """
        token = self._read()
        claims = _read_claims(token)
        # The user is the claim "sun" in tokens of scontrol, and "username" with JWKS.
        user = self.user or str(claims.get("sun") or claims.get("username") or "")
        return {"X-SLURM-USER-TOKEN": token, **({"X-SLURM-USER-NAME": user} if user else {})}

    def get_expiry(self) -> str:
        """Return the expiry time of an expired token, or "" if the token is valid or does not expire.

        Returns:
            The local time as YYYY-MM-DD HH:MM:SS.

        Raises:
            TokenError: the token is missing, is unreadable or is not a JSON Web Token.
        """
        expires_at = _read_claims(self._read()).get("exp")
        if not isinstance(expires_at, (int, float)) or expires_at > time.time():
            return ""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(expires_at))

    def _read(self) -> str:
        try:
            text = Path(self.file).read_text(encoding="utf-8") if self.file else os.environ.get(TOKEN_VARIABLE, "")
        except (OSError, UnicodeDecodeError) as error:
            message = f"the token in {self.file} cannot be read: {type(error).__name__}"
            raise TokenError(message, hint=RENEW_HINT) from None
        token = text.strip().removeprefix(f"{TOKEN_VARIABLE}=")  # the output of `scontrol token`
        if not TOKEN_PATTERN.fullmatch(token):
            message = f"{self.source} contains no token" + (": the content is not a JSON Web Token" if token else "")
            raise TokenError(message, hint=RENEW_HINT)
        return token


def _read_claims(token: str) -> JsonObject:
    """Return the claims of a token without verifying it."""
    part = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}

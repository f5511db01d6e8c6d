"""The JSON Web Token by which slurmrestd knows a user: never in a configuration file, and read anew, since it expires."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.errors import TunelineError

VARIABLE = "SLURM_JWT"
TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
HINT = (
    "`scontrol token lifespan=SECONDS` makes another on a login node. Put it into SLURM_JWT, which platform.yaml fills from a secret, or "
    "into the file that launcher.slurm.rest_token_file names, which may be renewed while a job runs."
)


class TokenError(TunelineError):
    """slurmrestd, or Slurm behind it, does not let this user in."""

    kind = "access"


@dataclass(frozen=True)
class Token:
    """Where the token is, and for whom it is."""

    file: str = ""
    user: str = ""

    @property
    def place(self) -> str:
        """Where the token is, for people."""
        return self.file or VARIABLE

    def headers(self) -> dict[str, str]:
        """What each request carries. Raises TokenError where there is no token."""
        token = self._read()
        claims = _claims(token)
        user = self.user or str(claims.get("sun") or claims.get("username") or "")  # as `scontrol token` and Slurm's JWKS name it
        return {"X-SLURM-USER-TOKEN": token, **({"X-SLURM-USER-NAME": user} if user else {})}

    def expired(self) -> str:
        """When the token's time was over; "" where it is not, or is not known."""
        until = _claims(self._read()).get("exp")
        if not isinstance(until, (int, float)) or until > time.time():
            return ""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until))

    def _read(self) -> str:
        try:
            found = Path(self.file).read_text(encoding="utf-8") if self.file else os.environ.get(VARIABLE, "")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"the token in {self.file} cannot be read: {type(error).__name__}", hint=HINT) from None
        token = found.strip().removeprefix(f"{VARIABLE}=")  # as `scontrol token` prints it
        if not TOKEN.fullmatch(token):
            raise TokenError(f"there is no token in {self.place}" + (": this is none" if token else ""), hint=HINT)
        return token


def _claims(token: str) -> dict[str, Any]:
    """What the token says of itself; it is not checked here."""
    part = token.split(".")[1]
    try:
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""What HTTP clients and servers read alike: a pause that is asked for, a host that is this machine, a bearer token."""

from __future__ import annotations

import hmac
import ipaddress


def pause_s(retry_after: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for, None where there is none or it is a date.

    >>> pause_s("3"), pause_s("-1"), pause_s("Wed, 21 Oct 2026 07:28:00 GMT")
    (3.0, 0.0, None)
    """
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, which no proxy should be asked for."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bears_token(authorization: str | None, token: str | None) -> bool:
    """Whether an `Authorization` header brings `token`; True where none is asked for. Takes equally long for all wrong ones.

    >>> bears_token("Bearer secret", "secret"), bears_token("secret", "secret"), bears_token(None, None)
    (True, False, True)
    """
    given = (authorization or "").encode("utf-8", "surrogateescape")
    return token is None or hmac.compare_digest(given, f"Bearer {token}".encode())

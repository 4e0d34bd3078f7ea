"""What the HTTP clients of environments and rewards read alike: a pause that a server asks for, a host that is this machine."""

from __future__ import annotations

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

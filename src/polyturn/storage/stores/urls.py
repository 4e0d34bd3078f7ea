"""Which store a URL means, and how a URL is shown without its secrets."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET = re.compile(r"(?i)\b(token|password|secret|signature|x-amz-[a-z-]+|awsaccesskeyid|sig|key)=[^&\s]+")


def redacted(text: str) -> str:
    """A text in which URLs carry neither users nor passwords nor signatures.

    >>> redacted("ftp://me:pw@host/a?token=abc&x=1")
    'ftp://***@host/a?token=***&x=1'
    """
    return _SECRET.sub(lambda found: f"{found[1]}=***", _USER.sub("***@", text))

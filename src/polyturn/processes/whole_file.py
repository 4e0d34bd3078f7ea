"""Files that appear whole or not at all, whoever reads them meanwhile and whenever the writer is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(target: Path, content: str | bytes) -> None:
    """Write `content` under another name, then give it its own. Text is UTF-8. Raises OSError."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    draft.replace(target)

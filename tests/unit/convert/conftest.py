from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Write a file into the working folder: a mapping as `ds.json`, a text as `acc.yaml`. Returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(held: Any, name: str | None = None) -> str:
        name = name or ("acc.yaml" if isinstance(held, str) else "ds.json")
        Path(name).write_text(held if isinstance(held, str) else json.dumps(held, indent=1), encoding="utf-8")
        return name

    return write

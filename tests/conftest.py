"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A machine that others keep busy is no failure of the code.
settings.register_profile("polyturn", deadline=None)
settings.load_profile("polyturn")

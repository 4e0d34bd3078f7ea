"""What stays as long as the process does, out of the sight of Python's garbage collector."""

from __future__ import annotations

import gc


def put_aside() -> None:
    """Collect once, and never look again through what is there now.

    A vLLM engine or a compiled model is hundreds of thousands of objects. Looking through them takes some tenths of a second,
    in which no thread computes, and Python does it whenever enough new ones came. Of what was put aside, only cycles stay for
    good.
    """
    gc.collect()
    gc.freeze()

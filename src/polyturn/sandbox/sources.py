"""Executes a program's source, and tells of its exceptions as its author knows them."""

from __future__ import annotations

import builtins
import linecache
import sys
import traceback
import types

SOURCE = "solution.py"
"""What tracebacks call it."""


def run(source: str, name: str) -> types.ModuleType:
    """Execute source as the module `name`. Raises whatever it raises."""
    module = types.ModuleType(name)
    module.__dict__.update(__file__=SOURCE, __builtins__=builtins)
    sys.modules[name] = module
    linecache.cache[SOURCE] = (len(source), None, source.splitlines(keepends=True), SOURCE)
    exec(compile(source, SOURCE, "exec", dont_inherit=True), module.__dict__)
    return module


def explain(error: BaseException) -> str:
    """The traceback from the first line of the source on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))

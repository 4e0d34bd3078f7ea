"""Loads an object by `package.module:Name`, from what is installed or from the working folder."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from polyturn.errors import ConfigError, nearest


def load_dotted(path: str) -> Any:
    """The object that `package.module:Name` (or `package.module:Outer.Inner`) names.

    Raises ConfigError when the path is malformed, the module is missing or fails to import, or has no such name.
    """
    module_name, colon, attribute = path.partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        head, _, tail = path.rpartition(".")
        hint = f"did you mean {head}:{tail}?" if not colon and head else "write package.module:Name"
        raise ConfigError(f"{path!r} is no dotted path; {hint}")
    found = _import(module_name, path)
    shown = module_name
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            hint = nearest(name, public) if public else "it has no public names"
            raise ConfigError(f"{path}: {shown} has no {name}; {hint}")
        found, shown = getattr(found, name), f"{shown}.{name}"
    return found


def _import(name: str, path: str) -> Any:
    """Import a module of the user's, and put whatever goes wrong in it into one sentence."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last, so that a file of the user's never hides an installed module
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            place = _place(error, name)
            raise ConfigError(f"{path}: importing {name} failed at {place}: it needs {missing}; install it") from error
        raise ConfigError(f"{path}: no module named {missing}; {_near(missing)}") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}: {error.filename}:{error.lineno} is not valid Python: {error.msg}; mend it") from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__} at {_place(error, name)}: {error}"
        raise ConfigError(f"{path}: importing {name} raised {reason}; mend the module") from error


def _place(error: BaseException, module: str) -> str:
    """`file:line` of the user's own code nearest to where `error` was raised."""
    root = module.partition(".")[0]
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [item for item in frames if str(item[0].f_globals.get("__name__", "")).partition(".")[0] == root]
    frame, line = (own or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}"


def _near(missing: str) -> str:
    """End of a sentence about a missing module: the nearest one beside it, or where it was looked for."""
    parent, _, name = missing.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else [str(Path.cwd())]
    beside = [module.name for module in pkgutil.iter_modules(folders)] if folders else []
    hint = nearest(name, beside) if beside else ""
    if hint.startswith("did you mean"):
        return hint
    if parent:
        return f"{parent} is there, but has no such part"
    return f"it is neither installed nor in {Path.cwd()}; install it, or run from the folder that holds it"

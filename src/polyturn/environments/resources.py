"""What environments and rewards may ask for and a recipe's arguments can't hold: the run's sandbox.

A constructor asks by the name of a parameter: `sandbox` (`polyturn.sandbox.base.Sandbox`), or `runner`
(`polyturn.programs.CodeRunner`), the same sandbox behind a smaller seam. It is made when somebody asks, and started with
the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polyturn.programs import CodeRunner
from polyturn.sandbox.base import Sandbox

NAMES = ("sandbox", "runner")
"""Parameters that are filled in, and that a recipe may not give."""


class Resources:
    """The parts of one run that are shared by all who ask. Without `make_sandbox` there is none to give."""

    def __init__(
        self,
        *,
        make_sandbox: Callable[[], Sandbox] | None = None,
        make_runner: Callable[[Sandbox], CodeRunner] | None = None,
        runner: CodeRunner | None = None,
    ) -> None:
        self._make_sandbox = make_sandbox
        self._make_runner = make_runner
        self._sandbox: Sandbox | None = None
        self._runner = runner

    def give(self, name: str) -> Any:
        """The part called `name`, the same one each time; None where there is none."""
        if name == "sandbox":
            return self._shared_sandbox()
        if self._runner is None and self._make_runner is not None and (sandbox := self._shared_sandbox()) is not None:
            self._runner = self._make_runner(sandbox)
        return self._runner

    def missing(self, names: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The parts that a constructor with parameters `names` asks for and `arguments` does not hold."""
        return {name: self.give(name) for name in NAMES if name in names and name not in arguments}

    async def start(self) -> None:
        """Start what was asked for. Raises IsolationError or SandboxError."""
        if self._sandbox is not None:
            await self._sandbox.start()

    async def stop(self) -> None:
        """Stop it. It can be started again."""
        if self._sandbox is not None:
            await self._sandbox.stop()

    def _shared_sandbox(self) -> Sandbox | None:
        if self._sandbox is None and self._make_sandbox is not None:
            self._sandbox = self._make_sandbox()
        return self._sandbox


def own_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The parameters of a constructor that a recipe gives."""
    return {name: parameter for name, parameter in signature.parameters.items() if name not in NAMES}

"""Questions to a chat API that are asked once: what was said is kept in memory and on disk, and calls and tokens have a budget.

The judge asks through this, and so does the simulated user.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from polyturn.environments.rewards.chat_api import ChatApi
from polyturn.errors import EnvironmentSetupError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.processes.whole_file import write_whole

T = TypeVar("T")
FORMAT = 1
"""Part of a cache entry's name."""
ABOVE_ZERO = ("max_calls", "max_tokens", "max_reply_tokens", "concurrency", "timeout_s", "deadline_s")


class CachedChat:
    """A chat API behind a cache. `who` is what it is called in messages, such as `judge`.

    `api_key_env` names the environment variable with the key. `timeout_s` is of one request, `deadline_s` of one question,
    waiting and retries included.

    Raises:
        EnvironmentSetupError: a limit that is none, a URL that is none, a variable that is not set.
    """

    def __init__(
        self,
        *,
        who: str,
        url: str,
        api_key_env: str | None,
        cache_dir: str | None,
        max_calls: int,
        max_tokens: int,
        max_reply_tokens: int,
        concurrency: int,
        retries: int,
        timeout_s: float,
        deadline_s: float,
    ) -> None:
        given = dict(
            zip(ABOVE_ZERO, (max_calls, max_tokens, max_reply_tokens, concurrency, timeout_s, deadline_s), strict=True)
        )
        for name, value in given.items():
            if not value > 0:
                raise EnvironmentSetupError(f"{name}={value!r} must be above 0")
        key = None
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise EnvironmentSetupError(f"api_key_env={api_key_env} is not set; set the variable to the {who}'s key")
        self._who = who
        self._url = url
        self._api = ChatApi(url, key=key, timeout_s=timeout_s, retries=retries)
        self._budget = {"calls": max_calls, "tokens": max_tokens}
        self._max_reply_tokens = max_reply_tokens
        self._deadline_s = deadline_s
        self._folder = None if cache_dir is None else Path(cache_dir)
        self._num_hits = 0
        self._memory: dict[str, str] = {}
        self._asking: dict[str, tuple[asyncio.Lock, int]] = {}
        self._concurrency = concurrency
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def usage(self) -> Mapping[str, int]:
        """`calls`, `tokens` and `cache_hits` of this process."""
        return {"calls": self._api.num_calls, "tokens": self._api.num_tokens, "cache_hits": self._num_hits}

    async def ask(self, request: Mapping[str, Any], what: str, read: Callable[[str], T | None], wanted: str) -> T:
        """What `read` makes of the answer to a request; equal requests are made once, and again where it makes None.

        `what` names the wait, `wanted` what `read` looks for.

        Raises:
            ResourceError: the server is lost, answers nonsense twice, or the budget is used up. DeadlineError when it is late.
            EnvironmentSetupError: the server refuses the request as it is.
        """
        request = {**request, "max_tokens": self._max_reply_tokens}
        key = hashlib.sha256(json.dumps([FORMAT, self._url, request], sort_keys=True).encode()).hexdigest()
        async with deadline(self._deadline_s, what), _Alone(self._asking, key):
            kept = self._kept(key)
            found = None if kept is None else read(kept)
            if found is not None:
                self._num_hits += 1
                return found
            return await self._asked(request, key, read, wanted)

    async def _asked(self, request: Mapping[str, Any], key: str, read: Callable[[str], T | None], wanted: str) -> T:
        """Ask, twice when the answer is nonsense."""
        said = ""
        async with self._free_slot():
            for _ in range(2):
                said = await self._api.complete(request, self._refuse_spent)
                found = read(said)
                if found is not None:
                    self._keep(key, said)
                    return found
        raise ResourceError(
            f"the {self._who} {request['model']} gave no {wanted}, it said {said[-200:]!r}; "
            "correct the prompt, or take another model"
        )

    def _refuse_spent(self) -> None:
        for name, limit in self._budget.items():
            if self.usage[name] >= limit:
                raise ResourceError(f"the {self._who}'s budget of {limit:,} {name} is used up; raise max_{name}")

    def _free_slot(self) -> asyncio.Semaphore:
        """Requests under way at once, in this event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        return self._slots[1]

    def _kept(self, key: str) -> str | None:
        """What was said before."""
        if key not in self._memory and self._folder is not None:
            try:
                said = json.loads(self._path(key).read_text(encoding="utf-8"))["said"]
            except (OSError, ValueError, KeyError, TypeError):
                return None
            if isinstance(said, str):
                self._memory[key] = said
        return self._memory.get(key)

    def _keep(self, key: str, said: str) -> None:
        """Keep an answer; a file appears whole or not at all. A disk that is full costs the cache, not the run."""
        self._memory[key] = said
        if self._folder is None:
            return
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"said": said}))
        except OSError:
            self._folder = None

    def _path(self, key: str) -> Path:
        assert self._folder is not None, "asked for the path of a cache that is switched off"
        return self._folder / key[:2] / f"{key}.json"


class _Alone:
    """A lock a key that is gone when nobody waits for it."""

    def __init__(self, asking: dict[str, tuple[asyncio.Lock, int]], key: str) -> None:
        self._asking, self._key = asking, key

    async def __aenter__(self) -> None:
        lock, waiting = self._asking.get(self._key, (None, 0))
        lock = lock or asyncio.Lock()
        self._asking[self._key] = (lock, waiting + 1)
        try:
            await lock.acquire()
        except BaseException:
            self._leave()
            raise
        self._lock = lock

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        self._leave()

    def _leave(self) -> None:
        lock, waiting = self._asking[self._key]
        if waiting == 1:
            del self._asking[self._key]
        else:
            self._asking[self._key] = (lock, waiting - 1)

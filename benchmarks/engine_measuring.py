"""What `gpu_engines.py` looks at in a case: the engine's own answers, its speed, and what a push leaves in it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from cases import Told
from engine_roles import engine_roles

from polyturn.loop.check import Checked
from polyturn.loop.place import Place
from polyturn.loop.tasks import open_stream
from polyturn.metrics.run_folder import RunFolder

GIB = 1 << 30
NEAR_TIE = 1e-3
"""In nats: closer ones may fall either way in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is asked of a case."""

    tasks: int = 64
    siblings: int = 8
    most_tokens: int = 256
    rounds: int = 2
    pushes: int = 5
    judged: int = 64
    greedy_tokens: int = 32
    turns: int = 8
    """Rounds of `rollout_ways.py`."""


def prompts_of(checked: Checked, renderer: Any, number: int) -> list[tuple[int, ...]]:
    """Ids of the prompts of round `number`, each as often as it has siblings."""
    rollout = checked.recipe.rollout
    stream = open_stream(checked.recipe, checked.train_tasks, cursor=number * rollout.groups_per_step)
    opened = [renderer.open(task.messages).prompt().ids for task in stream.take(rollout.groups_per_step)]
    return [ids for ids in opened for _ in range(rollout.group_size)]


def rate(found: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Tokens a second over rounds of (tokens, seconds), and of each."""
    return {
        "tokens_per_s": round(sum(tokens for tokens, _ in found) / sum(seconds for _, seconds in found)),
        "rounds": [round(tokens / seconds) for tokens, seconds in found],
        "tokens": [tokens for tokens, _ in found],
    }


def medians_of(pushes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds by phase, each over the pushes that had it: not all compare checksums."""
    names = dict.fromkeys(name for one in pushes for name in one)
    return {name: round(statistics.median(one[name] for one in pushes if name in one), 4) for name in names}


def named(prefix: str, rates: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{key}": value for key, value in rates.items()}


def vllm_sampling(stop_ids: Sequence[int], most: int) -> Any:
    """What Polyturn asks of vLLM, without its seeds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=most,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=list(stop_ids),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def raw_within(core: Any, prompts: Sequence[tuple[int, ...]], stop_ids: Sequence[int], most: int) -> tuple[int, float]:
    """The same prompts by vLLM's own loop in an engine of Polyturn, which nobody else asks meanwhile."""
    engine, sampling = core._engine, vllm_sampling(stop_ids, most)
    began = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add_request(f"raw-{number}", {"type": "token", "prompt_token_ids": list(ids)}, sampling)
    tokens = 0
    while engine.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
    seconds = time.perf_counter() - began
    core.forget()
    return tokens, seconds


async def raw_at(
    server: Any, headers: dict[str, str], prompts: Sequence[tuple[int, ...]], stop_ids: Sequence[int], most: int
) -> tuple[int, float]:
    """The same prompts at a server, by a client that counts tokens and looks at nothing else."""
    import aiohttp

    from polyturn.engine.wire import GENERATE, request_body
    from polyturn.types import SamplingParams

    def body(seed: int, ids: tuple[int, ...]) -> dict[str, Any]:
        asked = SamplingParams(max_tokens=most, seed=seed, stop_ids=tuple(stop_ids))
        return request_body(ids, asked, version=server.version or 0, model=server.adapter) | {"cache_salt": salt}

    async def ask(session: aiohttp.ClientSession, seed: int, ids: tuple[int, ...]) -> int:
        async with session.post(server.url + GENERATE, json=body(seed, ids)) as response:
            response.raise_for_status()
            return len((await response.json())["choices"][0]["token_ids"])

    salt = f"raw {time.monotonic_ns()}"  # these prompts were computed a moment ago
    began = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(600)) as session:
        counts = await asyncio.gather(*(ask(session, seed, ids) for seed, ids in enumerate(prompts)))
    return sum(counts), time.perf_counter() - began


# ── a case ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def measure(
    checked: Checked, sizes: Sizes, folder: RunFolder, gpus: list[str], told: Told, look: Look | None = None
) -> None:
    """Start an engine and look at it: push, generate, train, push again unless `look` says otherwise; say everything."""
    began = time.perf_counter()
    async with engine_roles(checked, gpus, folder) as place:
        told(server_start_s=round(time.perf_counter() - began, 1))
        from polyturn.loop.build import build_engine_and_bridge, build_trainer, policy_to_train, quiet_libraries

        quiet_libraries()
        policy = await policy_to_train(checked.recipe, checked.environment, print)
        trainer = build_trainer(checked.recipe, policy.model, exact=policy.exact)
        engine, bridge = build_engine_and_bridge(checked.recipe, policy, trainer, place)
        running = Running(
            place=place, checked=checked, sizes=sizes, policy=policy, trainer=trainer, engine=engine, bridge=bridge
        )
        began = time.perf_counter()
        await engine.start()
        told(start_s=round(time.perf_counter() - began, 1), **running.report())
        try:
            await (look or steps)(running, told)
        finally:
            await bridge.close()
            await engine.stop()


Look: TypeAlias = "Callable[[Running, Told], Awaitable[None]]"


async def steps(running: Running, told: Told) -> None:
    """What is measured, in the order of what is wanted most."""
    told(held_before_push_gib=held_gib())
    told(first_push_s=round(await running.push(), 4), held_after_push_gib=held_gib())
    told(**await running.coverage())
    first = await running.judge()
    rounding = first["gap_largest"]
    told(**named("first", first))
    told(**await running.rates())
    pushes, phases = [], []
    for number in range(running.sizes.pushes):
        asked = await running.ask()
        mismatch = await running.train(number)
        pushes.append(await running.push())
        phases.append(running.phases())
        if number == 0:
            # Against answers of the weights before: what a push that did nothing would look like.
            stale, _ = running.gap(asked)
            told(mismatch=mismatch, gap_stale=stale, **await running.judge(rounding), **await running.coverage())
    told(
        pushes_s=[round(seconds, 4) for seconds in pushes],
        push_s=round(statistics.median(pushes), 4),
        push_phases_s=medians_of(phases),
        **named("last", await running.judge(rounding)),
        **(gpu_memory()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The parts of a case."""

    place: Place
    checked: Checked
    sizes: Sizes
    policy: Any
    trainer: Any
    engine: Any
    bridge: Any

    @property
    def core(self) -> Any:
        """That of vLLM, where it is in this process; None for a server."""
        thread = getattr(self.engine, "_thread", None)
        return None if thread is None else thread._core

    def report(self) -> dict[str, Any]:
        """Memory as the engine reports it."""
        from polyturn.loop.engine_start import as_numbers

        report = getattr(self.engine, "report", None)
        return {} if report is None else {"engine_report": as_numbers(report)}

    async def push(self) -> float:
        """Push the trainer's weights, and wait for the GPU on both sides of it."""
        synchronize()
        began = time.perf_counter()
        await self.bridge.push(self.trainer.version)
        synchronize()
        return time.perf_counter() - began

    def phases(self) -> dict[str, float]:
        """What each phase of the last push took, where the bridge says so."""
        says = getattr(self.bridge, "_pushing", self.bridge)
        return dict(getattr(says, "seconds", {}))

    async def coverage(self) -> dict[str, Any]:
        """How much of the engine a push reached, and checksums of both sides, tensor by tensor."""
        from polyturn.processes.json_http import JsonClient
        from polyturn.weight_sync.base import checksum
        from polyturn.weight_sync.servers import WeightServer

        weights = {name: tensor.detach() for name, tensor in self.trainer.model.state_dict().items()}
        weights = {name.replace(".base_layer", "").removeprefix("base_model.model."): one for name, one in weights.items()}
        if self.core is not None:
            own = self.engine.named_weights()
            reached = {tensor.data_ptr(): tensor.numel() for tensor in own.values()}
            there = {one.data_ptr(): one.numel() - padding(owner, one) for owner, one in parameters(self.core.model)}
            shared = sum(weights[name].data_ptr() == tensor.data_ptr() for name, tensor in own.items())
            same = [checksum(weights[name].to(one.dtype)) == checksum(one) for name, one in own.items()]
            return {
                "coverage": round(sum(reached.values()) / sum(there.values()), 6),
                "tensors": len(own),
                "checksums_equal": sum(same),
                "shared_tensors": shared,
            }
        client = JsonClient(self.place.role.token)
        try:
            server = WeightServer(self.place.role.peers["engine"][0], client, limit_s=60.0)
            told = await server.comparable()
        finally:
            await client.close()
        if told is None:
            return {"checksums_equal": None}
        types, sums = told
        same = [
            name in weights and checksum(weights[name].to(dtype), signed_zeros=False) == sums[name]
            for name, dtype in types.items()
        ]
        return {
            "coverage": round(sum(name in weights for name in types) / len(types), 6),
            "tensors": len(types),
            "checksums_equal": sum(same),
        }

    async def ask(self, *, greedy: bool = False) -> list[tuple[tuple[int, ...], Any]]:
        """Prompts with the engine's answers to them."""
        from polyturn.types import SamplingParams

        most = self.sizes.greedy_tokens
        prompts = prompts_of(self.checked, self.policy.renderer, 0)[:: self.checked.recipe.rollout.group_size]
        prompts = prompts[: self.sizes.judged]
        answers = await asyncio.gather(
            *(
                self.engine.generate(ids, SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=most, seed=number))
                for number, ids in enumerate(prompts)
            )
        )
        return list(zip(prompts, answers, strict=True))

    def gap(self, asked: Sequence[tuple[tuple[int, ...], Any]]) -> tuple[float, float]:
        """Mean and largest difference of log-probabilities, engine against trainer."""
        import torch

        differences = []
        with plain(self.trainer.model) as model:
            for prompt, answer in asked:
                rows = logprobs(model, prompt, answer.ids)
                own = rows.gather(-1, torch.tensor(answer.ids, device=rows.device)[:, None])[:, 0].tolist()
                differences += [abs(one - other) for one, other in zip(own, answer.engine_logprobs, strict=True)]
        return round(statistics.fmean(differences), 6), round(max(differences), 6)

    async def judge(self, rounding: float | None = None) -> dict[str, Any]:
        """Greedy answers and log-probabilities, held against the trainer's own model.

        `rounding` is the largest gap of a log-probability where the weights were known to be equal; of this look when None. An
        engine's greedy token may be less probable by the trainer's model than the trainer's own by two such gaps, no more.
        """
        mean, largest = self.gap(await self.ask())
        equal, total, worst = 0, 0, 0.0
        asked = await self.ask(greedy=True)
        with plain(self.trainer.model) as model:
            for prompt, answer in asked:
                rows = logprobs(model, prompt, answer.ids)
                best, places = rows.max(dim=-1)
                for step, token in enumerate(answer.ids):
                    total += 1
                    equal += int(places[step]) == token
                    worst = max(worst, float(best[step] - rows[step, token]))
        return {
            "gap": mean,
            "gap_largest": largest,
            "greedy_equal": round(equal / total, 4),
            "greedy_worst_nats": round(worst, 4),
            "greedy_right": worst <= max(2 * (largest if rounding is None else rounding), NEAR_TIE),
        }

    async def rates(self) -> dict[str, Any]:
        """Tokens a second: the whole rollout, the engine alone, and the same vLLM asked by as little as possible."""
        rollouts, fixed, raw_natural, raw_fixed = [], [], [], []
        stop_ids, most = self.policy.renderer.stop_ids, self.sizes.most_tokens
        for number in range(self.sizes.rounds + 1):
            prompts = prompts_of(self.checked, self.policy.renderer, number)
            rollouts.append(await self.roll_out(number))
            fixed.append(await self.fixed(prompts))
            raw_natural.append(await self.raw(prompts, stop_ids, most))
            raw_fixed.append(await self.raw(prompts, (), most))
        found = named("rollout", rate(rollouts[1:])) | named("fixed", rate(fixed[1:]))
        found |= named("raw_rollout", rate(raw_natural[1:])) | named("raw_fixed", rate(raw_fixed[1:]))
        for kind in ("rollout", "fixed"):
            found[f"{kind}_of_raw_within"] = share(found, f"{kind}_tokens_per_s", found, f"raw_{kind}_tokens_per_s")
        return found

    async def roll_out(self, number: int, kept: list[Any] | None = None) -> tuple[int, float]:
        """Tokens and seconds of one step's rollout, as a run makes it."""
        from polyturn.loop.step import make_groups, player_for

        recipe = self.checked.recipe
        stream = open_stream(recipe, self.checked.train_tasks, cursor=number * recipe.rollout.groups_per_step)
        player = player_for(recipe, self.checked.environment, self.policy.renderer, self.engine, f"train/{number}")
        began = time.perf_counter()
        groups = await make_groups(recipe, player, stream.take(recipe.rollout.groups_per_step))
        seconds = time.perf_counter() - began
        played = [trajectory for group in groups for trajectory in group.trajectories]
        faults = [trajectory.fault for trajectory in played if trajectory.fault]
        assert not faults, f"{len(faults)} trajectories were lost, first: {faults[0]}"
        if kept is not None:
            kept += played
        return sum(len(turn.completion_ids) for one in played for turn in one.turns), seconds

    async def fixed(self, prompts: Sequence[tuple[int, ...]]) -> tuple[int, float]:
        """Tokens and seconds of requests that end at their length only."""
        from polyturn.types import SamplingParams

        most = self.sizes.most_tokens
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(self.engine.generate(ids, SamplingParams(max_tokens=most, seed=seed)) for seed, ids in enumerate(prompts))
        )
        return sum(len(answer.ids) for answer in answers), time.perf_counter() - began

    async def raw(self, prompts: Sequence[tuple[int, ...]], stop_ids: Sequence[int], most: int) -> tuple[int, float]:
        """The loop of vLLM itself, in the thread that owns the engine; of a server, its answers to a plain client."""
        if self.core is None:
            (server,), headers = self.engine._replicas.all, self.engine._client._headers
            return await raw_at(server, headers, prompts, stop_ids, most)
        done: asyncio.Future[tuple[int, float]] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                found: Any = raw_within(self.core, prompts, stop_ids, most)
            except Exception as error:
                done.get_loop().call_soon_threadsafe(done.set_exception, error)
            else:
                done.get_loop().call_soon_threadsafe(done.set_result, found)

        self.engine._thread.post(run)
        return await done

    async def train(self, number: int) -> float:
        """An optimizer step on fresh rollouts, with made-up advantages. Returns the mismatch of its forward pass."""
        from polyturn.processes.threads import in_thread
        from polyturn.trajectories.assemble import assemble
        from polyturn.trajectories.pack import pack

        played: list[Any] = []
        await self.roll_out(number, played)
        samples = [
            sample
            for place, trajectory in enumerate(played)
            for sample in assemble(trajectory, [1.0 if place % 2 else -1.0] * len(trajectory.turns), temperature=1.0)
        ]
        row_tokens = self.checked.recipe.trainer.row_tokens
        batch = pack(samples, row_tokens=row_tokens, planned_trajectories=len(played))
        return round(float((await in_thread(self.trainer.train, [batch]))["mismatch"]), 6)


@contextmanager
def plain(model: Any) -> Iterator[Any]:
    """The trainer's model with an attention that takes ids without more, and no gradients."""
    import torch

    from polyturn.trainer.attention import use_attention, use_plain_attention

    use_plain_attention(model)
    try:
        with torch.no_grad():
            yield model
    finally:
        use_attention(model, "auto")


def logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> Any:
    """The model's log-probabilities of all tokens where `ids` were sampled after `prompt`, [T, V]."""
    import torch

    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor([[*prompt, *ids]], device=device), use_cache=False).logits
    return torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), dim=-1)


def parameters(model: Any) -> Iterator[tuple[Any, Any]]:
    """Modules of vLLM with their own parameters."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            yield module, parameter


def padding(module: Any, parameter: Any) -> int:
    """Numbers in rows that stand for no token."""
    rows = getattr(module, "org_vocab_size", None)
    return 0 if rows is None else (parameter.shape[0] - rows) * parameter[0].numel()


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def held_gib() -> float | None:
    """What PyTorch's allocator has given out, on the trainer's GPU."""
    import torch

    return round(torch.cuda.memory_allocated() / GIB, 4) if torch.cuda.is_available() else None


def gpu_memory() -> dict[str, Any]:
    """The allocator's peak, and what all processes together hold of the GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3), "gpu_used_gib": round((total - free) / GIB, 3)}


def share(found: dict[str, Any], key: str, other: dict[str, Any], other_key: str) -> float | None:
    """One rate as a share of another."""
    one, two = found.get(key), other.get(other_key)
    return round(one / two, 4) if one and two else None

"""Trajectories played through real servers: placement, cancellation, large and many, and the ends of connections."""

from __future__ import annotations

import asyncio
import inspect
import threading

import aiohttp
import pytest

from parts.environment_processes import TOKEN, connected, remote, served, until
from polyturn.environments.base import Environment, Reply, StepResult, TaskList
from polyturn.environments.remote import RemoteEnvironment, wire
from polyturn.errors import ConfigError, DeadlineError, EnvironmentSetupError, ResourceError
from polyturn.processes.deadlines import deadline
from polyturn.types import Message, Task

FOREVER = 3600.0
SOON = 0.2


class Unsendable:
    """A state that no wire format could hold."""

    def __init__(self, task):
        self.task = task
        self.lock = threading.Lock()
        self.steps = (number for number in range(10**9))
        self.myself = self

    def __reduce__(self):
        raise TypeError("not to be pickled")


class Watched(Environment):
    """Does what the reply says, and notes what was done with each trajectory."""

    name = "watched"

    def __init__(self):
        self.started = self.stopped = 0
        self.open, self.closed, self.notes = [], [], []
        self.release = threading.Event()

    async def start(self):
        self.started += 1

    async def stop(self):
        self.stopped += 1

    def tasks(self, split, seed):
        return TaskList([task()])

    async def setup(self, task):
        if task.answer == "slow":
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                self.notes.append(f"setup of {task.id} cancelled")
                if not task.info.get("stubborn"):
                    raise
        state = Unsendable(task)
        self.open.append(task.id)
        return state

    async def step(self, state, reply):
        word, _, rest = reply.text.partition(" ")
        if word == "sleep":
            try:
                await asyncio.sleep(FOREVER)
            finally:
                self.notes.append(f"step of {state.task.id} cancelled")
                await asyncio.sleep(float(rest or 0))
                self.notes.append(f"step of {state.task.id} cleaned up")
        content = "x" * int(rest) if word == "say" else reply.text
        return StepResult(messages=(Message(role="tool", content=content),), reward=0.1, counts={"n": next(state.steps)})

    async def rewards(self, state):
        return {"answer": 1.0, "unknown": None}

    async def close(self, state):
        self.notes.append(f"close of {state.task.id}")
        if state.task.answer == "slow close":
            await asyncio.sleep(SOON)
        if state.task.answer == "endless close":
            await asyncio.sleep(FOREVER)
        self.closed.append(state.task.id)

    def gold(self, task):
        return ["x"]


def task(name="a", answer="x", **info):
    return Task(id=name, environment="watched", messages=(Message(role="user", content="go"),), answer=answer, info=info)


def said(text):
    return Reply(text=text)


def test_every_method_of_an_environment_is_passed_on():
    public = {name for name, _ in inspect.getmembers(Environment, inspect.isfunction) if not name.startswith("_")}
    assert public == {name for name in vars(RemoteEnvironment) if name in public}
    fields = {name for name in Environment.__annotations__ if not name.startswith("_")}
    assert fields <= set(vars(RemoteEnvironment(Watched(), ["http://127.0.0.1:1"], token="x")))


async def test_a_trajectory_whose_state_could_not_be_sent():
    local, other = Watched(), Watched()
    with served(other, name="environment-3") as server:
        async with connected(remote(local, server)) as environment:
            assert (environment.name, environment.full_marks, environment.needs_answer) == ("watched", 1.0, True)
            assert environment.tasks("train", 0)[0] == task()
            state = await environment.setup(task())
            first = await environment.step(state, said("one"))
            second = await environment.step(state, said("two"))
            assert first == StepResult(messages=(Message(role="tool", content="one"),), reward=0.1, counts={"n": 0.0})
            assert second.counts == {"n": 1.0}
            assert await environment.rewards(state) == {"answer": 1.0, "unknown": None}
            assert server.num_open == 1
            await environment.close(state)
            assert server.num_open == 0
    assert (other.open, other.closed) == (["a"], ["a"])
    assert (other.started, other.stopped) == (1, 1)
    assert (local.started, local.open) == (0, []), "the driver's copy is never started or played"


async def test_trajectories_go_where_the_fewest_are():
    one, two = Watched(), Watched()
    with served(one) as first, served(two, name="environment-1") as second:
        async with connected(remote(Watched(), first, second)) as environment:
            states = [await environment.setup(task(str(number))) for number in range(4)]
            assert (one.open, two.open) == (["0", "2"], ["1", "3"])
            for number in (1, 3):
                await environment.close(states[number])
            states += [await environment.setup(task(str(number))) for number in (4, 5, 6)]
            assert (one.open, two.open) == (["0", "2", "6"], ["1", "3", "4", "5"])
            # Later calls go where the trajectory was opened.
            await environment.close(states[6])
            assert one.closed == ["6"]
            with pytest.raises(ResourceError, match=r"there is no open trajectory \d+ here \(in environment-0\)"):
                await environment.step(states[6], said("x"))
    assert (sorted(one.closed), sorted(two.closed)) == (["0", "2", "6"], ["1", "3", "4", "5"])


async def test_512_trajectories_at_once():
    environments = Watched(), Watched()
    with served(environments[0]) as first, served(environments[1], name="environment-1") as second:
        async with connected(remote(Watched(), first, second)) as environment:
            everybody = asyncio.Barrier(512) if hasattr(asyncio, "Barrier") else None

            async def play(number):
                state = await environment.setup(task(str(number)))
                if everybody is not None:
                    await everybody.wait()
                    assert first.num_open == second.num_open == 256
                    await everybody.wait()
                texts = [(await environment.step(state, said(f"{number} {turn}"))).messages[0].content for turn in range(3)]
                outcome = await environment.rewards(state)
                await environment.close(state)
                return texts, outcome

            played = await asyncio.gather(*(play(number) for number in range(512)))
    for number, (texts, outcome) in enumerate(played):
        assert texts == [f"{number} {turn}" for turn in range(3)]
        assert outcome == {"answer": 1.0, "unknown": None}
    assert sorted(environments[0].closed + environments[1].closed, key=int) == [str(number) for number in range(512)]


async def test_large_messages():
    size = 4 << 20
    with served(Watched()) as server:
        async with connected(remote(Watched(), server)) as environment:
            state = await environment.setup(task(text="ü" * size))
            results = await asyncio.gather(*(environment.step(state, said(f"say {size + n}")) for n in range(2)))
            assert [len(result.messages[0].content) for result in results] == [size, size + 1]
            echoed = await environment.step(state, said("ü" * size))
            assert echoed.messages[0].content == "ü" * size


async def test_what_is_too_large_is_refused_on_either_side_and_the_trajectory_goes_on(monkeypatch):
    monkeypatch.setattr(wire, "MOST_BYTES", 1 << 20)
    with served(Watched()) as server:
        async with connected(remote(Watched(), server)) as environment:
            state = await environment.setup(task())
            with pytest.raises(
                EnvironmentSetupError, match=r"a reply of 1,048,576 characters takes 1,04.*at most 1,048,576 can"
            ):
                await environment.step(state, said("x" * (1 << 20)))
            with pytest.raises(EnvironmentSetupError, match=r"the answer of watched.step takes .* \(in environment-0\)"):
                await environment.step(state, said(f"say {1 << 20}"))
            with pytest.raises(EnvironmentSetupError, match=r"task a takes"):
                await environment.setup(task(text="x" * (1 << 20)))
            assert (await environment.step(state, said("on"))).messages[0].content == "on"
            assert server.num_open == 1


async def test_a_task_that_cannot_be_sent_is_a_sentence_and_takes_no_place():
    with served(Watched()) as server:
        async with connected(remote(Watched(), server)) as environment:
            with pytest.raises(EnvironmentSetupError, match=r"task a holds \{1\} \(set\)"):
                await environment.setup(task(things={1}))
            assert [link.num_open for link in environment._links] == [0]


# ── cancellation ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_deadline_in_the_driver_cancels_the_work_in_the_process():
    played = Watched()
    with served(played) as server:
        async with connected(remote(Watched(), server)) as environment:
            state = await environment.setup(task())
            with pytest.raises(DeadlineError):
                async with deadline(SOON, "the step"):
                    await environment.step(state, said(f"sleep {SOON}"))
            # The close waits for what the step does when it is cancelled.
            await environment.close(state)
            assert played.notes == ["step of a cancelled", "step of a cleaned up", "close of a"]


async def test_a_setup_that_is_given_up_leaves_nothing_open():
    played = Watched()
    with served(played) as server:
        async with connected(remote(Watched(), server)) as environment:
            for info in ({}, {"stubborn": True}):
                with pytest.raises(DeadlineError):
                    async with deadline(SOON, "the setup"):
                        await environment.setup(task("s", "slow", **info))
            assert [link.num_open for link in environment._links] == [0]
            await until(lambda: played.closed == ["s"], "the close of the stubborn one")
            assert played.notes == ["setup of s cancelled", "setup of s cancelled", "close of s"]
            assert server.num_open == 0


async def test_a_setup_that_is_given_up_when_its_answer_is_there_already():
    played = Watched()
    with served(played) as server:
        async with connected(remote(Watched(), server)) as environment:
            (link,) = environment._links
            asked = asyncio.create_task(environment.setup(task("late")))
            await asyncio.sleep(0)  # it asks
            ((number, answer),) = link._waiting.items()
            link._waiting[number] = asyncio.get_running_loop().create_future()  # takes the answer, so that it comes when we say
            await until(lambda: server.num_open == 1, "the setup")
            answer.set_result(number)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await until(lambda: played.closed == ["late"], "the close")
            assert link.num_open == 0


async def test_a_request_that_is_given_up_before_it_leaves_is_never_sent(monkeypatch):
    played, gate = Watched(), asyncio.Event()
    send = aiohttp.ClientWebSocketResponse.send_bytes

    async def slowly(socket, data, compress=None):
        await gate.wait()
        await send(socket, data, compress)

    monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "send_bytes", slowly)
    gate.set()
    with served(played) as server:
        async with connected(remote(Watched(), server)) as environment:
            await environment.close(await environment.setup(task("before")))
            gate.clear()
            asked = [asyncio.create_task(environment.setup(task(name))) for name in ("first", "never", "then")]
            await asyncio.sleep(0.01)
            asked[1].cancel()
            await asyncio.sleep(0.01)
            gate.set()
            first, never, then = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(never, asyncio.CancelledError)
            await environment.close(first)
            await environment.close(then)
    assert played.open == played.closed == ["before", "first", "then"]


async def test_a_close_has_its_deadline_too():
    played = Watched()
    with served(played) as server:
        async with connected(remote(Watched(), server)) as environment:
            state = await environment.setup(task("e", "endless close"))
            with pytest.raises(DeadlineError):
                async with deadline(SOON, "the close"):
                    await environment.close(state)
            await until(lambda: server.num_open == 0, "the end of the close")
    assert played.notes == ["close of e"], "a close is called once"


# ── ends ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_that_ends_closes_its_trajectories_and_no_others():
    played = Watched()
    with served(played) as server:
        async with connected(remote(Watched(), server)) as stays:
            kept = await stays.setup(task("kept"))
            async with connected(remote(Watched(), server)) as goes:
                states = [await goes.setup(task(str(number))) for number in range(3)]
                under_way = asyncio.create_task(goes.step(states[0], said("sleep")))
                closing = asyncio.create_task(goes.close(await goes.setup(task("c", "slow close"))))
                await until(lambda: "close of c" in played.notes, "the close to begin")
            with pytest.raises(ResourceError, match=r"environment-0 at .* is gone: the driver has ended the connection"):
                await under_way
            await closing
            await until(lambda: len(played.closed) == 4, "the closes")
            assert sorted(played.closed) == ["0", "1", "2", "c"], "also the one that was being closed"
            assert played.notes.index("step of 0 cleaned up") < played.notes.index("close of 0")
            assert server.num_open == 1
            await stays.step(kept, said("x"))


async def test_a_server_that_stops_closes_what_is_open_within_its_deadline():
    played = Watched()
    async with contextlib_connected() as environments:
        with served(played, close_deadline_s=SOON) as server:
            environment = await environments(remote(Watched(), server))
            states = [await environment.setup(task(name, answer)) for name, answer in (("a", "x"), ("e", "endless close"))]
            step = asyncio.create_task(environment.step(states[0], said("sleep")))
            await until(lambda: server.num_open == 2, "the trajectories")
        with pytest.raises(ResourceError, match=r"environment-0 at http://127.0.0.1:\d+ is gone: it stops"):
            await step
        assert played.closed == ["a"]
        assert played.stopped == 1
        # All that follows is told at once, and there is nothing left to close.
        with pytest.raises(ResourceError, match="is gone: it stops"):
            await environment.rewards(states[1])
        await environment.close(states[1])
        with pytest.raises(ResourceError, match="is gone: it stops"):
            await environment.setup(task())


async def test_the_processes_that_are_left_go_on():
    with served(Watched(), name="environment-1") as second:
        async with contextlib_connected() as environments:
            with served(Watched()) as first:
                environment = await environments(remote(Watched(), first, second))
            await until(lambda: environment._links[0].lost is not None, "the end of the first")
            states = [await environment.setup(task(str(number))) for number in range(3)]
            assert {state.link.name for state in states} == {"environment-1"}


def contextlib_connected():
    """Environments that are started within the block, and stopped at its end."""

    class Connected:
        async def __aenter__(self):
            self.started = []

            async def start(environment):
                self.started.append(environment)
                await environment.start()
                return environment

            return start

        async def __aexit__(self, *error):
            for environment in self.started:
                await environment.stop()

    return Connected()


# ── the start ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("urls", "token"), [([], "x"), (["http://127.0.0.1:1"], "")])
def test_addresses_and_a_token_are_needed(urls, token):
    with pytest.raises(ConfigError, match="needs their addresses and the run's token"):
        RemoteEnvironment(Watched(), urls, token=token)


async def test_a_process_that_is_not_there():
    with served(Watched()) as server:
        url = server.url
    for where in (url, "http://", "nowhere"):
        environment = RemoteEnvironment(Watched(), [where], token=TOKEN)
        with pytest.raises(ResourceError, match=f"the environment process at {where} can't be reached"):
            await environment.start()
        await environment.stop()


async def test_a_process_that_does_not_answer():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        environment = RemoteEnvironment(Watched(), [f"http://127.0.0.1:{port}"], token=TOKEN, connect_deadline_s=SOON)
        with pytest.raises(
            DeadlineError, match=f"waited 0.2 s for the environment process at http://127.0.0.1:{port} to answer"
        ):
            await environment.start()


async def test_another_token():
    with served(Watched()) as server:
        environment = RemoteEnvironment(Watched(), [server.url], token="another")
        with pytest.raises(ConfigError, match="refused the token; give the one it was started with"):
            await environment.start()


async def test_another_environment():
    other = Watched()
    other.name = "other"
    with served(other) as server, pytest.raises(ConfigError, match="environment-0 plays 'other', and the recipe 'watched'"):
        await remote(Watched(), server).start()


async def test_one_of_two_that_fails_to_connect_leaves_no_connection():
    with served(Watched()) as server:
        environment = RemoteEnvironment(Watched(), [server.url, "http://127.0.0.1:1"], token=TOKEN)
        with pytest.raises(ResourceError, match="can't be reached"):
            await environment.start()
        await until(lambda: not server._sessions, "the end of the first connection")


async def test_nothing_is_played_before_the_start():
    with served(Watched()) as server:
        environment = remote(Watched(), server)
        with pytest.raises(ResourceError, match="watched is not started"):
            await environment.setup(task())
        await environment.stop()
        for _ in range(2):  # it can be started again
            async with connected(environment):
                await environment.close(await environment.setup(task()))


# ── silence ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_process_whose_loop_stands_still_is_given_up():
    played = Watched()
    stands = threading.Event()

    async def step(state, reply):
        stands.set()
        played.release.wait(60)
        return StepResult()

    played.step = step
    try:
        with served(played) as server:
            async with connected(remote(Watched(), server, silence_s=0.4)) as environment:
                states = [await environment.setup(task(str(number))) for number in range(3)]
                asked = [asyncio.create_task(environment.step(state, said("x" * (1 << 20)))) for state in states]
                results = await asyncio.gather(*asked, return_exceptions=True)
                sentence = "is gone: it has said nothing for 0.4 s, so it is stopped or its event loop stands still"
                assert all(isinstance(result, ResourceError) and sentence in str(result) for result in results)
                assert stands.is_set()
                played.release.set()
                await until(lambda: len(played.closed) == 3, "the states to be closed once the loop goes on")
    finally:
        played.release.set()


async def test_a_driver_that_stands_still_blames_nobody():
    with served(Watched()) as server:
        async with connected(remote(Watched(), server, silence_s=0.4)) as environment:
            state = await environment.setup(task())
            threading.Event().wait(0.8)
            for _ in range(8):
                await asyncio.sleep(0.05)
                await environment.step(state, said("x"))

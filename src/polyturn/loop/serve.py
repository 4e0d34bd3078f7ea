"""The role of an engine server: the policy, behind HTTP, until the run ends."""

from __future__ import annotations

import asyncio

from polyturn.config.schema import Recipe
from polyturn.engine.server import LINGER_S, EngineServer, serve_engine
from polyturn.loop.build import build_engine, load_policy, quiet_libraries
from polyturn.loop.check import check
from polyturn.loop.drive import say
from polyturn.loop.place import Place
from polyturn.loop.stopping import until_signal


def serve_engine_role(place: Place, recipe: Recipe) -> int:
    """Load the policy and serve it until a signal comes. Returns the exit code; raises UserError for what can't be loaded."""
    quiet_libraries()
    checked = check(recipe)
    recipe, role = checked.recipe, place.role

    async def serve() -> None:
        with place.waiting(f"the model {recipe.model.path} to load", recipe.engine.start_deadline_s):
            policy = await load_policy(recipe, checked.environment, say)
        engine = build_engine(recipe, policy.model, linger_s=LINGER_S)
        port = 0 if recipe.engine.port is None else recipe.engine.port + role.number
        server = EngineServer(engine, token=role.token, host=recipe.engine.host, port=port, model=recipe.model.path)
        await serve_engine(server, role.announce)

    asyncio.run(until_signal(serve()))
    return 0

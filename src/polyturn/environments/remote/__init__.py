"""An environment played in other processes of the run, so that heavy tools, code and rewards share no GIL with the driver.

    driver                                              environment-0, environment-1, ...
    RemoteEnvironment ── one websocket a process ──>    EnvironmentServer ──> the environment, started

`wire` has the form of what is sent, `faults` that of exceptions; `link` is the driver's end of a connection, `session` the
process's, with the states in `trajectories`. Nothing is unpickled, and a trajectory's state never leaves its process.
"""

from polyturn.environments.remote.client import RemoteEnvironment
from polyturn.environments.remote.role import serve_environment
from polyturn.environments.remote.server import EnvironmentServer

__all__ = ["EnvironmentServer", "RemoteEnvironment", "serve_environment"]

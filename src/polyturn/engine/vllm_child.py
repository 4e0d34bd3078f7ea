"""vLLM's own server, in a process that ends when its starter does: `python -m polyturn.engine.vllm_child ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys

from polyturn.engine import vllm_plain
from polyturn.processes.parents import die_with_starter

SERVER = "vllm.entrypoints.openai.api_server"

if __name__ == "__main__":
    die_with_starter()
    if vllm_plain.NAME in sys.argv:
        vllm_plain.register()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)

"""A run of stub roles under a real keeper and a real supervisor: `python stub_run.py PLAN.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from polyturn.processes.keeper import keep


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    code = keep()
    if code is not None:
        return code

    from polyturn.launch.local import run_roles
    from polyturn.launch.specs import RoleSpec
    from polyturn.launch.supervisor import Patience
    from polyturn.metrics.run_folder import RunFolder

    print("supervisor is up", flush=True)
    tuples = ("argv", "needs", "members")
    specs = [RoleSpec(**(role | {key: tuple(role[key]) for key in tuples})) for role in plan["roles"]]
    return run_roles(specs, RunFolder(Path(plan["folder"])), Patience(**plan["patience"]))


if __name__ == "__main__":
    sys.exit(main())

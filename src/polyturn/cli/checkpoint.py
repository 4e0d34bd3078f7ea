"""`polyturn checkpoint list|verify|prune|copy PLACE`: look at checkpoints, wherever they are. Needs no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from polyturn.metrics.run_folder import RunFolder
    from polyturn.storage.finding import Selection, Verdict
    from polyturn.storage.stores import Access

_PLACE = "a run folder, for all its tiers; or a folder or URL (s3://bucket/prefix): of a store, a run in it, one checkpoint"


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "checkpoint", help="list, verify, prune and copy checkpoints", description="Look at checkpoints, wherever they are."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = _action(actions, "list", "steps, sizes and versions, and which are whole", run_list)
    listing.add_argument("--deep", action="store_true", help="read every byte; without it, sizes are compared")
    listing.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    _action(actions, "verify", "read every byte; exit 3 when a checkpoint is not whole", run_verify)
    pruning = _action(actions, "prune", "delete old checkpoints and the remains of dead saves", run_prune)
    pruning.add_argument("--keep", metavar="N", type=int, required=True, help="the newest N whole checkpoints of a run stay")
    pruning.add_argument("--keep-every", metavar="N", type=int, default=0, help="so does every step that N divides")
    pruning.add_argument("--grace-h", metavar="H", type=float, default=6.0, help="younger remains stay (default 6)")
    copying = _action(actions, "copy", "copy the newest whole checkpoint to another store", run_copy)
    copying.add_argument("to", metavar="TO", help="folder or URL of a store")
    copying.add_argument("--sse", choices=("AES256", "aws:kms"), help="how S3 encrypts it")
    copying.add_argument("--kms-key-id", metavar="KEY", help="key of aws:kms; the account's when left out")


def run_list(args: argparse.Namespace) -> int:
    """One line a checkpoint."""
    import json

    verdicts = _verdicts(args, deep=args.deep)
    if args.json:
        print(json.dumps([_as_json(verdict) for verdict in verdicts], indent=2))
        return 0
    for verdict in verdicts:
        print(_line(verdict, whole="verified" if args.deep else "whole"))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Exit 0 when all that was named is whole, to the last byte."""
    verdicts = _verdicts(args, deep=True)
    for verdict in verdicts:
        print(_line(verdict, whole="verified"), flush=True)
    return 3 if any(verdict.fault is not None for verdict in verdicts) else 0


def run_prune(args: argparse.Namespace) -> int:
    """Delete what need not be kept, and say what was."""
    from polyturn.errors import ConfigError
    from polyturn.storage.retention import prune

    if args.keep < 1 or args.keep_every < 0 or args.grace_h < 0:
        raise ConfigError(f"--keep={args.keep} --keep-every={args.keep_every} --grace-h={args.grace_h:g}; give 1, 0, 0 or more")
    count = 0
    for selection in _selections(args):
        if selection.step is not None:
            raise ConfigError(f"{args.place} is one checkpoint, and pruning is for a run or a store; delete its files instead")
        for run_id in selection.run_ids:
            for sentence in prune(
                selection.store, run_id, keep=args.keep, keep_every=args.keep_every, grace_s=args.grace_h * 3600
            ):
                print(sentence, flush=True)
                count += 1
    if not count:
        print("there is nothing to delete")
    return 0


def run_copy(args: argparse.Namespace) -> int:
    """Fetch, verify, publish, verify."""
    import tempfile
    from pathlib import Path

    from polyturn.storage.finding import fetch_selected, place_in
    from polyturn.storage.manifest import read_manifest
    from polyturn.storage.publish import publish

    found = _found(args)
    with tempfile.TemporaryDirectory(prefix="polyturn-copy-") as scratch:
        if isinstance(found, Path):
            folder, manifest = found, read_manifest(found)
        else:
            folder = Path(scratch)
            manifest = fetch_selected(_asked(found), folder, _warn)
        place = place_in(args.to, manifest, _access(args))
        kept = publish(folder, manifest, place, link=False)
    print(kept or f"{place}: {_size(manifest.num_bytes)}, policy version {manifest.policy_version}")
    return 3 if kept else 0


def _action(actions: Any, name: str, what: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("place", metavar="PLACE", help=_PLACE)
    parser.add_argument("--endpoint-url", metavar="URL", help="of an S3 server that is not AWS's")
    parser.set_defaults(run=run)
    return parser


def _access(args: argparse.Namespace) -> Access:
    from polyturn.storage.stores import Access, Encryption

    encryption = Encryption(getattr(args, "sse", None), getattr(args, "kms_key_id", None))
    return Access(endpoint_url=args.endpoint_url, encryption=encryption)


def _found(args: argparse.Namespace) -> list[Selection] | Path:
    """What the user named: a sealed folder, or one selection a tier."""
    from pathlib import Path

    from polyturn.metrics.run_folder import RunFolder
    from polyturn.storage.finding import find

    folder = RunFolder(Path(args.place).expanduser().resolve())
    if "://" not in args.place and folder.recipe.is_file():
        return _tiers_of_run(folder)
    found = find(args.place, _access(args))
    return found if isinstance(found, Path) else [found]


def _tiers_of_run(folder: RunFolder) -> list[Selection]:
    """All tiers of a run, by the recipe in its folder."""
    from polyturn.checkpoint.places import tiers_of
    from polyturn.config.load import load_recipe
    from polyturn.storage.finding import Selection

    tiers = tiers_of(load_recipe(folder.recipe).checkpoint, folder.root.name, folder.checkpoints, _warn)
    return [Selection(tier.name, tier.store, (tiers.run_id,)) for tier in tiers.tiers]


def _asked(selections: list[Selection]) -> list[Selection]:
    """Those whose store answers. Of a run with several tiers the others are said; when none answers, StorageError."""
    from polyturn.errors import StorageError

    answered, errors = list[Any](), list[StorageError]()
    for selection in selections:
        try:
            selection.steps()
            answered.append(selection)
        except StorageError as error:
            errors.append(error)
    if errors and not answered:
        raise errors[0]
    for failure in errors:
        _warn(f"a tier could not be asked: {failure}")
    return answered


def _warn(sentence: str) -> None:
    import sys

    print(f"polyturn: {sentence}", file=sys.stderr)


def _selections(args: argparse.Namespace) -> list[Selection]:
    from pathlib import Path

    from polyturn.errors import ConfigError

    found = _found(args)
    if isinstance(found, Path):
        raise ConfigError(f"{args.place} is a sealed folder in no store; give a run or a store")
    return _asked(found)


def _verdicts(args: argparse.Namespace, *, deep: bool) -> list[Verdict]:
    from pathlib import Path

    from polyturn.storage.finding import judge, judge_folder

    found = _found(args)
    if isinstance(found, Path):
        return [judge_folder(found, deep=deep)]
    named = len(found) > 1  # the tiers of a run
    return [
        judge(stored, deep=deep, tier=selection.tier if named else "")
        for selection in _asked(found)
        for stored in selection.steps()
    ]


def _line(verdict: Verdict, *, whole: str) -> str:
    manifest = verdict.manifest
    version = "" if manifest is None else f"policy version {manifest.policy_version}, {manifest.created}"
    state = whole if verdict.fault is None else f"NOT WHOLE: {verdict.fault}"
    tier = f"{verdict.tier:<9}  " if verdict.tier else ""
    return f"step {verdict.step:>8}  {tier}{_size(verdict.num_bytes):>10}  {version:<50}  {state}  {verdict.where}"


def _as_json(verdict: Verdict) -> dict[str, Any]:
    manifest = verdict.manifest
    return {
        "step": verdict.step,
        "tier": verdict.tier or None,
        "place": verdict.where,
        "num_bytes": verdict.num_bytes,
        "fault": verdict.fault,
        "run_id": None if manifest is None else manifest.run_id,
        "policy_version": None if manifest is None else manifest.policy_version,
        "created": None if manifest is None else manifest.created,
        "shards": None if manifest is None else len(manifest.shards),
        "meta": None if manifest is None else manifest.meta,
    }


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"

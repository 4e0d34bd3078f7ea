"""`polyturn data check|show|split|convert|new`: look at a data file before anything is trained on it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyturn.config.schema import Recipe
    from polyturn.loop.data_check import Shown

_FILE = "JSONL, JSON array, CSV or Parquet, .gz too; or hf:owner/name"


def register(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "data", help="check, show, split, convert and start data files", description="Work on data files before training."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _register_check(actions)
    _register_show(actions)
    _register_split(actions)
    _register_convert(actions)
    new = actions.add_parser("new", help="write a small valid file to start from", description="Write a small valid file.")
    new.add_argument("file", metavar="FILE", help="file to write; its name says the container")
    new.add_argument("--format", default="instruction_response", help="built-in format (default instruction_response)")
    new.add_argument("--force", action="store_true", help="overwrite the file")
    new.set_defaults(run=run_new)


def run_check(args: argparse.Namespace) -> int:
    """Exit 0 when the file can be trained on, 2 when it can't."""
    import json

    from polyturn.data.report import as_json, lines
    from polyturn.loop.data_check import check_data, tests_sandbox

    recipe = _recipe(args)
    checked = check_data(
        args.file,
        recipe=recipe,
        transform=args.transform,
        sandbox=tests_sandbox(recipe) if args.run_tests else None,
        use_cache=not args.no_cache,
        style=not args.no_style,
    )
    if args.json:
        print(json.dumps(as_json(checked.report), ensure_ascii=False, indent=2))
    else:
        for line in lines(checked.report, every=args.all):
            print(line)
    return 0 if checked.report.ok else 2


def run_show(args: argparse.Namespace) -> int:
    """Print rows as training would open them."""
    from polyturn.errors import ConfigError
    from polyturn.loop.data_check import show_rows

    if args.rows < 1:
        raise ConfigError(f"--rows={args.rows}; give 1 or more")
    for shown in show_rows(args.file, lines=args.line, count=args.rows, recipe=_recipe(args), transform=args.transform):
        print(_shown(shown))
    return 0


def run_split(args: argparse.Namespace) -> int:
    """Write two files beside the one."""
    from polyturn.data.load import load
    from polyturn.data.split import side_paths, split_rows
    from polyturn.data.writers import refuse_existing, write_rows

    loaded = load(args.file)
    sides = split_rows(loaded, val=args.val, seed=args.seed)
    paths = side_paths(args.file, args.out)
    for path in paths:
        refuse_existing(path, force=args.force)
    for path, rows in zip(paths, (sides.train, sides.val), strict=True):
        write_rows(path, rows, force=args.force)
        print(f"{path}: {len(rows):,} rows")
    if sides.near_pairs:
        print(f"note: {sides.near_pairs:,} questions have one that is nearly the same on the other side")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Write the rows in another container, another format, or both."""
    from polyturn.data.convert import converted, format_named
    from polyturn.data.load import load, load_formatted, refuse
    from polyturn.data.transform import Transform
    from polyturn.data.writers import write_rows

    transform = None if args.transform is None else Transform(args.transform)
    if args.format is None:
        loaded = load(args.file, transform)
        refuse(loaded, list(loaded.problems))
        rows: list[Any] = [fields for _, fields in loaded.rows]
    else:
        form = format_named(args.format)
        rows = converted(load_formatted(args.file, transform, need_answer=False), form)
    write_rows(args.out, rows, force=args.force)
    print(f"{args.out}: {len(rows):,} rows")
    return 0


def run_new(args: argparse.Namespace) -> int:
    """Write a few rows that pass `data check`."""
    from polyturn.data.convert import format_named
    from polyturn.data.new import starter_rows
    from polyturn.data.writers import write_rows

    form = format_named(args.format)
    rows = starter_rows(form)
    write_rows(args.file, rows, force=args.force)
    print(f"{args.file}: {len(rows)} rows in the format {form.name}; `polyturn data check {args.file}` looks at them")
    return 0


def _register_check(actions: Any) -> None:
    check = actions.add_parser(
        "check",
        help="every bad row with its line, and a summary; exit 2 when training on it would be wrong",
        description="Read a file as training would, name every bad row as file:line: reason, and sum up the rest.",
    )
    check.add_argument("file", metavar="FILE|ID", help=_FILE)
    _add_recipe(check)
    check.add_argument("--run-tests", action="store_true", help="run references against their own tests, in the sandbox")
    check.add_argument("--no-style", action="store_true", help="don't look at the style of code with ruff")
    check.add_argument("--no-cache", action="store_true", help="tokenise again, whatever data.cache_dir holds")
    check.add_argument("--all", action="store_true", help="show all warnings, not ten of a kind")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    check.set_defaults(run=run_check)


def _register_show(actions: Any) -> None:
    show = actions.add_parser("show", help="print rows as training would open them", description="Print rows of a file.")
    show.add_argument("file", metavar="FILE|ID", help=_FILE)
    show.add_argument("--rows", metavar="N", type=int, default=3, help="first rows to print (default 3)")
    show.add_argument("--line", metavar="LINE", type=int, action="append", help="print the row on this line; may be repeated")
    _add_recipe(show)
    show.set_defaults(run=run_show)


def _register_split(actions: Any) -> None:
    split = actions.add_parser(
        "split",
        help="cut a file into training and validation rows",
        description="Cut a file in two by what each row asks: appended rows move nothing, equal questions stay together.",
    )
    split.add_argument("file", metavar="FILE", help=_FILE)
    split.add_argument("--val", metavar="SHARE", type=float, default=0.1, help="share of validation rows (default 0.1)")
    split.add_argument("--seed", type=int, default=0, help="another seed cuts another way (default 0)")
    split.add_argument("--out", metavar="DIR", help="folder for both files; beside FILE when left out")
    split.add_argument("--force", action="store_true", help="overwrite them")
    split.set_defaults(run=run_split)


def _register_convert(actions: Any) -> None:
    convert = actions.add_parser(
        "convert",
        help="write a file in another container or format",
        description="Write the rows of a file in the container that the name of OUT says, and in another format if asked.",
    )
    convert.add_argument("file", metavar="FILE", help=_FILE)
    convert.add_argument("out", metavar="OUT", help="file to write; its name says the container")
    convert.add_argument("--format", help="built-in format to rename the fields to, such as messages")
    convert.add_argument("--transform", metavar="MODULE:FUNCTION", help="called with each row first")
    convert.add_argument("--force", action="store_true", help="overwrite OUT")
    convert.set_defaults(run=run_convert)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", metavar="RECIPE.yaml", help="check against its environment, tokenizer and context")
    parser.add_argument("--transform", metavar="MODULE:FUNCTION", help="in place of the recipe's data.transform")


def _recipe(args: argparse.Namespace) -> Recipe | None:
    if args.recipe is None:
        return None
    from polyturn.config.load import load_recipe

    return load_recipe(args.recipe)


def _shown(shown: Shown) -> str:
    tokens = "" if shown.num_tokens is None else f", {shown.num_tokens:,} tokens"
    name = "" if shown.row is None else f" ({shown.row.format})"
    parts = [f"{shown.where}{name}{tokens}"]
    parts += [_block(message.role, message.content) for message in shown.messages]
    parts += [f"  problem: {problem}" for problem in shown.problems]
    if shown.row is None:
        return "\n".join([*parts, *(_block(name, str(value)) for name, value in shown.fields.items())])
    row = shown.row
    extra = {
        "answer": row.answer,
        "aliases": ", ".join(row.aliases),
        "tests": "\n".join(row.tests),
        "follow-up": row.follow_up,
        "its answer": row.follow_up_response,
        "difficulty": row.difficulty,
        "tags": ", ".join(row.tags),
    }
    return "\n".join([*parts, *(_block(name, str(value)) for name, value in extra.items() if value not in (None, ""))])


def _block(name: str, text: str) -> str:
    lines = text.split("\n")
    return "\n".join([f"  {name + ':':<12} {lines[0]}", *(f"  {'':<12} {line}" for line in lines[1:])])

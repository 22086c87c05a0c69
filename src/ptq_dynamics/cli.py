"""Command line: run notebooks, check and compose parameters."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .core import notebooks, paths
from .core.errors import UserError


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; a ``UserError`` is printed as one line, status 2."""
    try:
        _run(_parser().parse_args(argv))
    except UserError as e:
        print(f"ptq-dynamics: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(
            "ptq-dynamics: interrupted; finished work is kept, the same command goes on from it",
            file=sys.stderr,
        )
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ptq-dynamics", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="execute a notebook with papermill (what DVC stages call)")
    run.add_argument("notebook", help="name of a file in notebooks/, without .ipynb")
    run.add_argument("--out", type=Path, help="executed notebook (default: reports/notebooks/NAME.ipynb)")
    run.add_argument(
        "-p", dest="parameters", action="append", default=[], metavar="KEY=VALUE",
        help="a value for the notebook's parameters cell (JSON, or plain text)",
    )  # fmt: skip
    commands.add_parser("check", help="check params.yaml and every profile in conf/")
    profile = commands.add_parser("profile", help="compose params.yaml from conf/base.yaml and a profile")
    profile.add_argument("name")
    return parser


def _run(args: argparse.Namespace) -> None:
    from . import settings  # after parsing: --help answers at once

    if args.command == "run":
        settings.read()  # a misspelled key anywhere stops here, before any work
        out = args.out or paths.executed() / f"{args.notebook}.ipynb"
        notebooks.run(args.notebook, out, dict(_parameter(p) for p in args.parameters))
    elif args.command == "check":
        settings.check_all()
        print("params.yaml and all profiles in conf/ are valid")
    elif args.command == "profile":
        print(f"{settings.write_profile(args.name).name}: profile {args.name}")


def _parameter(text: str) -> tuple[str, Any]:
    key, sep, value = text.partition("=")
    if not sep:
        raise UserError(f"-p {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value

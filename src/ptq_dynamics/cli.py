"""Command line: measure and average any trajectory; run notebooks, check and compose parameters."""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .core import notebooks, paths
from .core.config import digest
from .core.errors import UserError
from .core.files import sha256_file, write_text

PARTIAL = 3  # exit status: some checkpoints were left out

_TRAJECTORY = """\
Measure what quantization costs along a trajectory, and what averaging neighbours would give.

SOURCE is a folder whose sub-folders are checkpoints (ours, or Hugging Face folders named step1000, checkpoint-500,
global_step1000, iter_0001000, ...), a Hub repository owner/name, or a family of data/reference/families.yaml."""
_LEAVES = """\
Leaves in reports/trajectories/<name>/ (or --out): index.html (the page), table.csv, figure.png, figure.pdf,
trajectory.ipynb (executed) and report.json. A killed run goes on from what it measured.

Exit status: 0 all measured; 3 measured, but some checkpoints were left out (told on stderr and on the page);
2 nothing measured, with the reason in one line."""

# plain reading width, no script, nothing fetched from elsewhere
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }}
img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }}
th, td {{ padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }}
.anchor-link, .jp-InputPrompt, .jp-OutputPrompt {{ display: none; }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; a ``UserError`` is printed as one line, status 2."""
    try:
        if status := _run(_parser().parse_args(argv)):
            sys.exit(status)
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
    _add_trajectory(commands)
    _add_average(commands)
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


def _add_trajectory(commands: Any) -> None:
    p = commands.add_parser(
        "trajectory", help="measure any trajectory: a folder, a Hub repository or a family",
        description=_TRAJECTORY, epilog=_LEAVES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_source(p)
    p.add_argument(
        "--bits", nargs="+", type=int, default=[4, 3], metavar="B", help="bit widths (default: 4 3)"
    )
    p.add_argument("--method", default="gptq", choices=["gptq", "rtn"], help="quantizer (default: gptq)")
    p.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="columns per scale, -1 for a whole row (default: 128, or the largest that divides the widths)",
    )
    p.add_argument(
        "--window",
        type=int,
        default=5,
        metavar="N",
        help="checkpoints in the average of neighbours, 0 for none (default: 5)",
    )
    p.add_argument("--evaluation", metavar="FILE", help="plain text to evaluate on (default: our corpus)")
    p.add_argument("--calibration", metavar="FILE", help="plain text to calibrate on (default: our corpus)")
    p.add_argument("--tokens", type=int, metavar="N", help="evaluation tokens (default: as params.yaml says)")
    p.add_argument("--length", type=int, metavar="N", help="tokens per sequence")
    p.add_argument("--delete", action="store_true", help="delete each downloaded revision after use")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder of the results")
    p.add_argument("--dry-run", action="store_true",
                   help="list revisions, sizes, disk and time; download nothing")  # fmt: skip


def _add_average(commands: Any) -> None:
    p = commands.add_parser(
        "average", help="write the average of the last checkpoints of a trajectory (LAWA)"
    )
    _add_source(p)
    p.add_argument("--window", type=int, default=5, metavar="N", help="checkpoints to average (default: 5)")
    p.add_argument("--interval", type=int, default=1, metavar="N", help="take every N-th one (default: 1)")
    p.add_argument("--last", metavar="TOKENS/STEP",
                   help="the newest member: its tokens (20.48M), step or name (default: the last)")  # fmt: skip
    p.add_argument("--out", type=Path, metavar="DIR", help="folder (default: ./<name>-<last>-lawa<window>)")


def _add_source(p: argparse.ArgumentParser) -> None:
    p.add_argument("source", metavar="SOURCE", help="a folder of checkpoints, owner/name, or a family")
    p.add_argument(
        "--revisions", nargs="+", metavar="NAME", help="these only (default: all that state a step)"
    )
    p.add_argument("--tokens-per-step", type=int, metavar="N", help="turns steps into tokens")


def _run(args: argparse.Namespace) -> int:
    if args.command == "trajectory":
        return _trajectory(args)
    if args.command == "average":
        return _average(args)
    if args.command == "run":
        _check_params()
        out = args.out or paths.executed() / f"{args.notebook}.ipynb"
        notebooks.run(args.notebook, out, dict(_parameter(p) for p in args.parameters))
    elif args.command == "check":
        from . import settings

        settings.check_all()
        print("params.yaml and all profiles in conf/ are valid")
    elif args.command == "profile":
        from . import settings

        print(f"{settings.write_profile(args.name).name}: profile {args.name}")
    return 0


def _check_params() -> None:
    """A misspelled key anywhere in params.yaml stops here, before any work.

    The same text is checked once by the same code: the check imports all of the package, some seconds for each of the
    many stages of a pipeline.
    """
    mark = paths.root() / ".tmp-checked"
    code = {p.as_posix(): sha256_file(p) for p in sorted(Path(__file__).parent.rglob("*.py"))}
    found = paths.params_file()
    key = digest({"params": sha256_file(found) if found.is_file() else None, "code": code})
    if not (mark.is_file() and mark.read_text(encoding="utf-8") == key):
        from . import settings

        settings.read()
        write_text(mark, key)


def _trajectory(args: argparse.Namespace) -> int:
    from . import settings
    from .evaluation import wild

    known = settings.read()
    keys = (
        "source", "revisions", "bits", "method", "group_size", "window", "evaluation", "calibration", "tokens",
        "length", "tokens_per_step", "delete",
    )  # fmt: skip
    given = {k: getattr(args, k) for k in keys if getattr(args, k) is not None}
    for key in ("evaluation", "calibration"):
        if key in given:
            given[key] = str(Path(given[key]).resolve())  # the notebook runs from the root
    if Path(args.source).is_dir():
        given["source"] = str(Path(args.source).resolve())
    asked = wild.request(**given)
    source = wild.open_request(asked)  # what is wrong is told before a kernel starts
    if args.dry_run:
        print("\n".join(wild.estimate(source, asked, known.measure)))
        return PARTIAL if source.skipped else 0
    out = args.out.resolve() if args.out else wild.output_folder(source, asked)
    notebooks.run("trajectory", out / "trajectory.ipynb", given | {"out": str(out)})
    report = wild.read_report(out)
    write_text(out / "index.html", page(out / "trajectory.ipynb", report["title"]))
    if n := len(report["skipped"]):
        print(f"ptq-dynamics: {n} left out, told above and on the page", file=sys.stderr)
    for line in (*report["notes"], *report["words"]):
        print(line)
    print(f"{report['checkpoints']} checkpoints measured: {_shown(out / 'index.html')}")
    return PARTIAL if report["skipped"] else 0


def _average(args: argparse.Namespace) -> int:
    from .evaluation import wild
    from .trajectories import sources

    source = sources.open_source(args.source, args.revisions, tokens_per_step=args.tokens_per_step)
    out = args.out or Path(f"{source.name}-{args.last or source.items[-1].name}-lawa{args.window}")
    members = wild.write_average(source, out, args.window, args.interval, args.last)
    for s in source.skipped:
        print(f"ptq-dynamics: {s}", file=sys.stderr)
    print(f"{out}: average of {', '.join(members)}")
    return PARTIAL if source.skipped else 0


def page(notebook: Path, title: str) -> str:
    """An executed notebook as one self-contained HTML page, without its code and what libraries printed."""
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="basic", exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True,
        embed_images=True,
    )  # fmt: skip
    read = nbformat.read(notebook, as_version=4)
    for cell in read.cells:
        cell["outputs"] = [o for o in cell.get("outputs", []) if o.output_type != "stream"]
    body, _ = exporter.from_notebook_node(read)
    body = body.replace(
        "No description has been provided for this image",
        html.escape(f"Error of quantization along {title}, and quantized against full-precision loss"),
    )
    return _PAGE.format(title=html.escape(title), body=body)


def _shown(path: Path) -> str:
    return paths.relative(path) if path.resolve().is_relative_to(paths.root()) else str(path)


def _parameter(text: str) -> tuple[str, Any]:
    key, sep, value = text.partition("=")
    if not sep:
        raise UserError(f"-p {text}: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value

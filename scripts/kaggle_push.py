"""Run the notebooks on a Kaggle T4: push this commit in one notebook, wait, and bring the results back.

What is pushed carries the project exactly as committed. While it runs, and after this command was stopped too,
scripts/pull_from_kaggle.sh ADDRESS picks it up.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import kaggle_cli
import kaggle_pull
import yaml
from kaggle_cli import KaggleError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "kaggle"))

import payload  # noqa: E402
import plan  # noqa: E402

SESSION_MINUTES = 12 * 60  # what Kaggle gives a session
MARGIN_MINUTES = 20  # for Kaggle to start it, and for the driver to pack what there is
LIMIT_MINUTES = {True: 60, False: 600}  # by quick
SLUG = "flashattn-t4"


def parameters_from(args: argparse.Namespace, root: Path) -> dict[str, object]:
    """The driver's parameters, which payload.build() checks; raises ValueError for a limit beyond Kaggle's."""
    limit = LIMIT_MINUTES[not args.full] if args.limit is None else args.limit
    if not 0 < limit <= SESSION_MINUTES - MARGIN_MINUTES:
        raise ValueError(f"--limit: got {limit}, accepted are 1 to {SESSION_MINUTES - MARGIN_MINUTES} minutes")
    told: dict[str, dict[str, object]] = {}
    for notebook, name, value in args.parameters:
        try:
            told.setdefault(notebook, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"-p {notebook} {name}: got {value!r}, accepted is YAML: {error}") from None
    return {
        "notebooks": args.notebooks
        or sorted(path.stem for path in (root / "notebooks").glob("*.ipynb") if path.stem not in plan.NO_GPU),
        "quick": not args.full,
        "tritons": args.tritons,
        "notebook_parameters": told,
        "limit_minutes": limit,
        "accept_any_device": False,  # a rehearsal's: never from here
    }


def show(built: payload.Built, parameters: dict[str, object]) -> None:
    """What is about to be sent, and what it should cost."""
    manifest = built.manifest
    changed = ", with uncommitted changes" if manifest.dirty else ""
    print(f"commit     {manifest.commit}{changed}")
    print(f"notebook   {built.notebook.name}, {built.bytes:,} bytes, payload sha256 {built.sha256}")
    print(f"estimate   {built.minutes:.0f} minutes of GPU time, once Kaggle has a GPU for it")
    for name, value in parameters.items():
        print(f"    {name} = {value!r}")


def enough_gpu_hours(needed: float) -> None:
    """Raise ValueError where the week's GPU hours are used up; warn where they may not suffice."""
    hours, back = kaggle_cli.gpu_hours_left()
    if hours < 0.05:
        raise ValueError(f"quota: {hours:.2f} GPU hours are left this week; they come back at {back}. Nothing was sent")
    if hours < needed:
        print(f"warning: {hours:.1f} GPU hours are left until {back}, and the run should take {needed:.1f}")


def send(folder: Path, built: payload.Built, parameters: dict[str, object], root: Path) -> kaggle_cli.Address:
    """Push a built folder and remember what was pushed; raises KaggleError where Kaggle did not take it."""
    wanted = json.loads((folder / "kernel-metadata.json").read_text())["id"]
    try:
        address = kaggle_cli.push(folder, 60 * (parameters["limit_minutes"] + MARGIN_MINUTES))
    except KaggleError as error:
        if error.passing:
            page = kaggle_cli.Address.parse(wanted).page
            error.add_note(f"  whether Kaggle took it is unknown: look at {page} before another push")
        raise
    record = {"owner": address.owner, "slug": address.slug, "version": address.version}
    record |= {"commit": built.manifest.commit, "sha256": built.sha256, "parameters": parameters}
    path = kaggle_pull.record_file(root, address)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    print(f"pushed     {address}, {address.page}")
    if f"{address.owner}/{address.slug}".lower() != wanted.lower():
        print(f"warning: it landed there and not at {wanted}: Kaggle makes the address from the title")
    print(f"pick it up again with: scripts/pull_from_kaggle.sh {address}", flush=True)
    return address


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/push_to_kaggle.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", help="in order of worth; default: all that use the GPU, by name")
    parser.add_argument(
        "-p",
        nargs=3,
        action="append",
        default=[],
        dest="parameters",
        metavar=("NOTEBOOK", "NAME", "VALUE"),
        help="a notebook's parameter, its value in YAML: -p 02_benchmark seq_lens '[512, 1024]'",
    )
    parser.add_argument("--full", action="store_true", help="hours, for the tables; default: quick, within 20 minutes")
    parser.add_argument(
        "--tritons",
        nargs="+",
        default=["image", "3.2.0"],
        metavar="RELEASE",
        help="a pass for each: `image`, Kaggle's own, or a release beside it, "
        f"{plan.TRITONS[0]} to {plan.TRITONS[-1]}; default: image 3.2.0",
    )
    parser.add_argument("--limit", type=int, metavar="MINUTES", help="of the whole run; default: 60, with --full 600")
    parser.add_argument("--owner", help="whose kernel it is; default: the account of the kaggle command")
    parser.add_argument("--slug", default=SLUG, help=f"the kernel's name in its address; default: {SLUG}")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="push uncommitted changes of tracked files too; results say so"
    )
    parser.add_argument("--dry-run", action="store_true", help="build and show, send nothing, and keep the notebook")
    parser.add_argument("--no-wait", action="store_true", help="push and return")
    parser.add_argument("--no-commit", action="store_true", help="bring the results back, for a look first")
    kaggle_cli.add_poll(parser)
    return parser


def main(argv: Iterable[str] | None = None, root: Path = ROOT) -> int:
    args = parser().parse_args(argv)
    try:
        parameters = parameters_from(args, root)
        local = root / kaggle_pull.RECORDS
        local.mkdir(parents=True, exist_ok=True)
        build = partial(payload.build, root, slug=args.slug, parameters=parameters, allow_dirty=args.allow_dirty)
        if args.dry_run:
            built = build(local / args.slug, username=args.owner or "owner")
            show(built, parameters)
            print(f"sent nothing. To run it by hand: {built.notebook} (docs/running.md, Kaggle)")
            return 0
        with tempfile.TemporaryDirectory(dir=local) as folder:
            if not args.owner:
                build(Path(folder), username="owner")  # says what is wrong before an account is asked for
            built = build(Path(folder), username=args.owner or kaggle_cli.user())
            show(built, parameters)
            enough_gpu_hours(built.minutes / 60)
            address = send(Path(folder), built, parameters, root)
        if args.no_wait:
            return 0
        return kaggle_pull.finish(address, root, committing=not args.no_commit, poll_s=args.poll)
    except (KaggleError, ValueError) as error:
        print("\n".join([f"kaggle_push: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkaggle_push: stopped; what was pushed goes on at Kaggle, and can be picked up.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

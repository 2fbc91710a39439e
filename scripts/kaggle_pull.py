"""Bring a run back from Kaggle into results/<date>_<gpu>_<commit>/, regenerate what is made from it, and commit.

A run is judged by its status.json alone. Nothing that a server names is trusted: only known kinds of file are taken,
only into that folder, and only so many bytes of them. Running it twice changes nothing.
"""

import argparse
import json
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from datetime import date
from pathlib import Path, PurePosixPath
from time import sleep

import kaggle_cli
import readme_tables
import results_index
import run_status
from kaggle_cli import Address, KaggleError

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path("results", "local", "kaggle")  # what was pushed: a JSON file for each version
ARCHIVE = "flashattn_run.zip"  # all that the driver left, in one file
LOOSE = "run"  # the folder with the same files, for a run that ended before its zip
KINDS = (".ipynb", ".json", ".log", ".txt", ".csv", ".png", ".xml", ".md")
PART = r"[A-Za-z0-9][A-Za-z0-9_.+-]*"
MAX_DEPTH = 3
MAX_FILES = 2000
MAX_BYTES = 100 << 20
MAX_NAME = 200
MAX_LOG = 2 << 20


def known(name: str) -> bool:
    """Whether a file of this name is of a kind that is kept."""
    return name.endswith(KINDS)


def checked(name: str) -> PurePosixPath:
    """A name from elsewhere as a path inside a folder; raises ValueError for one that may lead out of it."""
    parts = name.split("/")
    if len(name) > MAX_NAME or len(parts) > MAX_DEPTH or not all(re.fullmatch(PART, part) for part in parts):
        raise ValueError(f"name: got {name[:MAX_NAME]!r}, accepted are letters, digits and _.+- in {MAX_DEPTH} levels")
    return PurePosixPath(name)


class Bound:
    """Counts files and bytes; raises ValueError where they are more than a run can need."""

    def __init__(self):
        self.files = self.bytes = 0

    def add(self, size: int, files: int = 0) -> None:
        self.files += files
        self.bytes += size
        if self.files > MAX_FILES or self.bytes > MAX_BYTES:
            raise ValueError(
                f"size: more than {MAX_FILES:,} files or {MAX_BYTES:,} bytes, which no run of this project leaves"
            )


def top_of(names: list[str]) -> tuple[str, ...] | None:
    """The parts of the folder in a zip that has a status file; None where none has, ValueError where several have."""
    tops = {tuple(name.split("/")[:-1]) for name in names if name.rpartition("/")[2] == run_status.FILE}
    plain = sorted(top for top in tops if len(top) <= MAX_DEPTH and all(part and part[0] != "." for part in top))
    if len(plain) > 1:
        folders = ", ".join(repr("/".join(top)[:100] or ".") for top in plain[:5])
        raise ValueError(f"runs: got {len(plain)} in one zip, such as {folders}, accepted is one: zip its folder alone")
    return plain[0] if plain else None


def unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack a run's zip into an empty folder; returns what was left out.

    Takes the driver's own zip, and one in which the same lies in a folder beside other things, as Kaggle's "Download
    all" makes it: of those and of unknown or hidden files in the folder nothing is taken. Raises ValueError for a zip
    that is damaged or has several runs, or whose run is too large or has a name or a link that may lead out of the
    folder.
    """
    left_out, seen, bound = [], set(), Bound()
    try:
        with zipfile.ZipFile(archive) as source:
            files = [info for info in source.infolist() if not info.is_dir()]
            top = top_of([info.filename for info in files])
            for info in files:
                parts = info.filename.split("/")
                if top is None or tuple(parts[: len(top)]) != top:
                    left_out.append(info.filename)
                    continue
                name = "/".join(parts[len(top) :])
                if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
                    raise ValueError(f"name: {info.filename} is a link or no plain file, accepted are plain files")
                leads_out = any(part in ("", ".", "..") for part in parts)
                hidden = any(part.startswith(".") for part in parts)  # Jupyter's checkpoints, say
                if not leads_out and (hidden or not known(name)):
                    left_out.append(info.filename)
                    continue
                target = folder / checked(name)
                if name.lower() in seen:
                    raise ValueError(f"name: {info.filename} is there twice")
                seen.add(name.lower())
                bound.add(0, files=1)
                target.parent.mkdir(parents=True, exist_ok=True)
                with source.open(info) as packed, target.open("xb") as unpacked:
                    while block := packed.read(1 << 20):  # what really comes, not what the header promises
                        bound.add(len(block))
                        unpacked.write(block)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error, OSError) as error:
        raise ValueError(
            f"{archive.name}: is no whole zip file ({error}): download it again, and see that its size is Kaggle's"
        ) from None
    return left_out


def tell(left_out: list[str]) -> None:
    """Print how many files of a zip were not taken, and the first of them."""
    if left_out:
        print(f"left out, as no part of a run: {len(left_out)}, such as", *(repr(name[:100]) for name in left_out[:5]))


def bounded(folder: Path) -> None:
    """Raise ValueError if a folder that is being filled holds too much."""
    bound = Bound()
    for path in folder.rglob("*"):
        try:
            bound.add(path.lstat().st_size, files=1)
        except FileNotFoundError:  # renamed meanwhile
            continue


def readable(log: str) -> str:
    """Kaggle's log, one JSON array, as the text that the run printed, its end; as it is where it is something else."""
    try:
        log = "".join(str(entry["data"]) for entry in json.loads(log))
    except (ValueError, KeyError, TypeError):
        pass
    return log[-MAX_LOG:]


def fetch(address: Address, folder: Path, poll_s: float) -> tuple[str, list[str]]:
    """Fill an empty folder with a run's files, from its zip, else loose ones. Returns (log, what was left out).

    The names of loose files pass two gates: the pattern of what is downloaded, and `checked`.
    """
    loose = rf"^{LOOSE}/({PART}/){{0,{MAX_DEPTH - 1}}}{PART}({'|'.join(map(re.escape, KINDS))})\Z"
    log = ""
    for pattern in (rf"^{re.escape(ARCHIVE)}\Z", loose):
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            came = Path(place, "came")
            came.mkdir()
            kaggle_cli.output(address, came, pattern, lambda came=came: bounded(came), poll_s)
            bounded(came)
            for path in came.glob("*.log"):
                log = readable(path.read_text(encoding="utf-8", errors="replace"))
            archive = came / ARCHIVE
            if archive.is_file() and not archive.is_symlink():
                try:
                    return log, unpack(archive, folder)
                except ValueError as error:  # the loose files may be whole
                    print(f"kaggle_pull: {error}; trying the loose files", file=sys.stderr)
                    shutil.rmtree(folder)
                    folder.mkdir()
            for path in sorted(came.glob(f"{LOOSE}/**/*")):
                name = path.relative_to(came / LOOSE).as_posix()
                if path.is_file() and not path.is_symlink() and known(checked(name).name):
                    target = folder / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(path, target)
    return log, []


# The repository ------------------------------------------------------------------------------------------------------


def git(root: Path, *args: str) -> str:
    """Its standard output; raises ValueError with what it said where it fails."""
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise ValueError(f"git {args[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def record_file(root: Path, address: Address) -> Path:
    return root / RECORDS / f"{address.owner}_{address.slug}_v{address.version}.json"


def recall(root: Path, address: Address | None) -> dict | None:
    """The record of a push: of this version, or the latest where the address has none or is None; None without one."""
    records = []
    for path in sorted((root / RECORDS).glob("*_v*.json")):
        try:
            record = json.loads(path.read_text())
            at = Address(record["owner"], record["slug"], record["version"])
        except (ValueError, KeyError, TypeError):
            continue
        if address is None or (at.owner, at.slug) == (address.owner, address.slug):
            if address is None or address.version in (None, at.version):
                records.append((path.stat().st_mtime_ns, at.version, record))
    return max(records, key=lambda entry: entry[:2])[2] if records else None


def check(status: dict, root: Path, record: dict | None, commit: str | None) -> None:
    """Raise ValueError unless the run is of the commit given or pushed, or else of one of this repository."""
    wanted = commit or (record and record["commit"])
    if wanted and not status["commit"].startswith(wanted):
        raise ValueError(f"commit: the run is of {status['commit']}, and {wanted} was pushed: it is another run")
    if record and not commit and status.get("payload_sha256") != record["sha256"]:
        raise ValueError(f"payload: the run's is {status.get('payload_sha256')}, pushed was {record['sha256']}")
    try:
        git(root, "cat-file", "-e", f"{status['commit']}^{{commit}}")
    except ValueError:
        raise ValueError(f"commit: the run is of {status['commit']}, which this repository does not have") from None


def same_run(a: dict, b: dict) -> bool:
    return all(a.get(name) == b.get(name) for name in ("commit", "payload_sha256", "started"))


def place(folder: Path, status: dict, results: Path) -> tuple[Path, bool]:
    """Move a run into results/; returns (where it lies, whether it is new there).

    Two runs of a commit on one day get _2, _3, ... The same run again changes nothing; raises ValueError where it is
    there in another state.
    """
    name = run_status.folder_name(status)
    for number in range(1, 1000):
        target = results / (name if number == 1 else f"{name}_{number}")
        there = run_status.read(target) if target.is_dir() else None
        if there == status:
            return target, False
        if there and same_run(there, status):
            raise ValueError(f"{target.name}: has this run in another state; remove that folder to take it in anew")
        if not target.exists():
            folder.rename(target)
            return target, True
    raise ValueError(f"{name}: has 999 runs already")


def source(address: Address | None, word: str) -> str:
    return f"Kaggle kernel {address}, which Kaggle calls {word}" if address else "a zip file brought by hand"


def report(status: dict, origin: str, folder: Path) -> str:
    """README.md of a run folder."""
    cell = results_index.cell
    day = date.fromisoformat(status["started"][:10])
    verdict = run_status.verdict(status)
    lines = [
        f"# {cell(run_status.gpu_name(status))}, {day.day} {day:%B %Y}, commit {status['commit'][:7]}",
        "",
        f"**{run_status.marks(status)}**: {run_status.VERDICTS[verdict]}. From {origin}.",
        *([cell(status["reason"], 500)] if status.get("reason") else []),
        "" if run_status.feeds_tables(status) else "\nIts figures are not quoted in the project's README.\n",
        "| step | Triton | ended | seconds | note |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for step in status["steps"]:
        cells = (step.get(name, "") for name in ("name", "triton", "state", "seconds", "note"))
        lines.append(f"| {' | '.join(cell(value, 300) for value in cells)} |")
    facts = {name: value for name, value in status["machine"].items() if isinstance(value, str | int | float) and value}
    lines += ["", "| machine | |", "| --- | --- |"]
    lines += [f"| {cell(name)} | {cell(value)} |" for name, value in facts.items()]
    paths = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    links = [f"[{path}]({path})" for path in paths if path != "README.md"]
    return "\n".join([*lines, "", f"Files: {', '.join(links)}.", ""])


def summary(status: dict, origin: str, folder: Path) -> str:
    """The commit's message: what ran where, and how it ended."""
    first = f"Results: {run_status.gpu_name(status)}, commit {status['commit'][:7]}, {run_status.marks(status)}"
    steps = [
        f"{step.get('name')} (Triton {step.get('triton')}): {step.get('state')}; {step.get('note') or 'no note'}"
        for step in status["steps"]
    ]
    lines = [*steps, f"From {origin}, to results/{folder.name}/."]
    if status.get("reason"):
        lines.insert(0, status["reason"])
    return "\n".join([kaggle_cli.plain(first, 120), "", *(kaggle_cli.plain(line, 300) for line in lines), ""])


def own_changes(root: Path) -> bool:
    """Whether README.md differs from HEAD in more than what is regenerated."""
    readme = (root / "README.md").read_text()
    head = git(root, "show", "HEAD:README.md")
    blank = [readme_tables.BLOCK.sub(r"\1\5", text) for text in (readme, head)]
    return blank[0] != blank[1]


def regenerate(root: Path) -> None:
    """Make results/README.md and the README's tables and figures anew from results/."""
    results, readme = root / "results", root / "README.md"
    (results / results_index.INDEX).write_text(results_index.text(results))
    readme.write_text(readme_tables.updated(readme.read_text(), results))


def commit(root: Path, folder: Path, message: str) -> bool:
    """Commit a run folder and what was regenerated, and nothing else; returns whether there was anything to commit."""
    paths = [path.relative_to(root).as_posix() for path in (folder, root / "README.md", folder.parent / "README.md")]
    git(root, "add", "--force", "--", *paths)  # whatever a global ignore file says of logs
    if not git(root, "diff", "--cached", "--name-only", "HEAD", "--", *paths):
        return False
    git(root, "commit", "--quiet", "-m", message, "--", *paths)
    return True


# The command ---------------------------------------------------------------------------------------------------------


def take_in(
    folder: Path,
    root: Path,
    origin: str,
    record: dict | None = None,
    commit_of: str | None = None,
    committing: bool = True,
) -> dict:
    """Check a run's files, place them, regenerate and commit; returns its status. Raises ValueError, with why."""
    status = run_status.read(folder)
    if status is None:
        raise ValueError(
            f"{run_status.FILE}: is not there: this is no run of the driver, or it never began; of a zip in "
            f"which there is another one, {ARCHIVE}, give that"
        )
    check(status, root, record, commit_of)
    if committing and own_changes(root):
        raise ValueError("README.md: has changes of your own: commit them first, or give --no-commit")
    (folder / "README.md").write_text(report(status, origin, folder))
    target, new = place(folder, status, root / "results")
    if not new and git(root, "ls-files", "--modified", "--", target.relative_to(root).as_posix()):
        raise ValueError(f"{target.name}: its files were changed since it was taken in: git restore brings them back")
    try:
        regenerate(root)
    except Exception as error:  # what is made of all runs must not fail from now on because of this one
        if new:
            shutil.rmtree(target)
        raise ValueError(f"results/{target.name}: the README cannot be made with it: {error}") from error
    print(f"results/{target.name}/: {run_status.marks(status)}" + " (it was here already)" * (not new))
    for step in status["steps"]:
        print("   ", kaggle_cli.plain(" ".join(str(step.get(n, "")) for n in ("name", "triton", "state", "note")), 200))
    if status.get("reason"):
        print("   ", kaggle_cli.plain(status["reason"], 500))
    if committing:
        done = commit(root, target, summary(status, origin, target))
        print("committed" if done else "nothing to commit")
    tuned = [path.relative_to(root).as_posix() for path in sorted(target.rglob("*_triton*_*.json"))]
    if tuned and run_status.feeds_tables(status):
        print("Tuned tiles came too. One of these ships them, as a change to look at:")
        print(
            *(f'    "$(scripts/setup.sh)" scripts/adopt_tuned.py {path}' for path in tuned),
            "and then: git add --intent-to-add flashattn/tuned && git diff flashattn/tuned",
            sep="\n",
        )
    return status


def pull(
    address: Address,
    root: Path,
    ended: tuple[str, str],
    record: dict | None = None,
    commit_of: str | None = None,
    committing: bool = True,
    poll_s: float = 30.0,
) -> dict:
    """Fetch a run that has ended and take it in. Raises ValueError or KaggleError, with why and what to do."""
    word, message = ended
    local = root / RECORDS
    local.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=local) as temporary:
        folder = Path(temporary, "run")
        folder.mkdir()
        for attempt in range(1, kaggle_cli.OUTPUT_ATTEMPTS + 1):
            log, left_out = fetch(address, folder, poll_s)
            if (folder / run_status.FILE).is_file() or word != "COMPLETE" or attempt == kaggle_cli.OUTPUT_ATTEMPTS:
                break
            print(f"{word}, and no {run_status.FILE} yet: the output may be still to come, asking again", flush=True)
            sleep(poll_s)
            shutil.rmtree(folder)
            folder.mkdir()
        tell(left_out)
        if not (folder / run_status.FILE).is_file():
            kept = local / f"{address.owner}_{address.slug}_v{address.version or 'latest'}.log"
            kept.write_text(log, encoding="utf-8")
            lines = [f"    {kaggle_cli.plain(line, 160)}" for line in log.strip().splitlines()[-10:]]
            why = "it drops what a run left that failed or was cancelled, so that there is nothing to take in"
            if word == "COMPLETE":
                why = f"see {address.page}: where the output is there, pull again, or download all of it for --zip"
            raise ValueError(
                f"{address}: Kaggle says {word}{': ' + message if message else ''}, and no {run_status.FILE} came: "
                f"{why}. The log is in {kept.relative_to(root)}"
                + (" and ends so:\n" if lines else ", and is empty")
                + "\n".join(lines)
            )
        (folder / "kaggle.log").write_text(log, encoding="utf-8")
        return take_in(folder, root, source(address, word), record, commit_of, committing)


def finish(
    address: Address,
    root: Path,
    *,
    commit_of: str | None = None,
    committing: bool = True,
    waiting: bool = True,
    poll_s: float = 30.0,
) -> int:
    """Wait for a run, bring it back, and return the exit status: 0 for a complete run, 1 for any other that came."""
    record = recall(root, address)
    if record and address.version is None:
        address = Address(address.owner, address.slug, record["version"])
    if waiting:
        ended = kaggle_cli.wait(address, poll_s, pushed=record is not None)
    else:
        ended = kaggle_cli.state(address)
        if (word := ended[0]) not in kaggle_cli.ENDED:
            print(f"{address}: {word}, {kaggle_cli.UNDER_WAY[word]}; ask again later, or without --no-wait")
            return 1
    status = pull(address, root, ended, record, commit_of, committing, poll_s)
    return int(run_status.verdict(status) != "complete")


def by_hand(archive: Path, root: Path, *, commit_of: str | None = None, committing: bool = True) -> int:
    """Take in a zip file that a person downloaded; the exit status is finish()'s."""
    if not archive.is_file():
        raise ValueError(f"--zip: there is no file {archive}")
    (root / RECORDS).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / RECORDS) as temporary:
        folder = Path(temporary, "run")
        folder.mkdir()
        tell(unpack(archive, folder))
        status = take_in(folder, root, source(None, ""), None, commit_of, committing)
    return int(run_status.verdict(status) != "complete")


def commit_hash(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{7,40}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted are 7 to 40 hexadecimal digits")
    return text


def main(argv: Iterable[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/pull_from_kaggle.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="?", help="OWNER/SLUG, OWNER/SLUG/VERSION or URL; default: the last push")
    parser.add_argument("--zip", type=Path, metavar="FILE", help=f"take in a {ARCHIVE} that was downloaded by hand")
    parser.add_argument("--commit", type=commit_hash, help="what the run must be of, where it was not pushed from here")
    parser.add_argument("--no-commit", action="store_true", help="place and regenerate, for a look first")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a run that is under way")
    kaggle_cli.add_poll(parser)
    args = parser.parse_args(argv)

    options = {"commit_of": args.commit, "committing": not args.no_commit}
    try:
        if args.zip:
            if args.address:
                parser.error("address: got one and --zip, accepted is one of them")
            return by_hand(args.zip, root, **options)
        address = Address.parse(args.address) if args.address else None
        if address is None:
            record = recall(root, None)
            if record is None:
                parser.error("address: nothing was pushed from here: name the run, OWNER/SLUG/VERSION")
            address = Address(record["owner"], record["slug"], record["version"])
        return finish(address, root, waiting=not args.no_wait, poll_s=args.poll, **options)
    except (KaggleError, ValueError) as error:
        print("\n".join([f"kaggle_pull: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkaggle_pull: stopped; the run goes on. The same command picks it up again.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

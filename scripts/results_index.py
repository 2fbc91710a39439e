"""Make results/README.md, the index of the runs: a line for each pass of each run folder, from what is in it.

A pass is a run folder itself, a folder triton<release>/ in it, or a log tests_triton<release>*.log of pytest.
"""

import argparse
import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import run_status

ROOT = Path(__file__).resolve().parents[1]
INDEX = "README.md"
RUN_FOLDER = re.compile(r"(\d{4}-\d{2}-\d{2})_([a-z0-9]+)_([0-9a-f]{7})(_\d+)?")
MODES = ("forward", "forward+backward")
HEAD = """\
# Results

Made by `scripts/results_index.py` from the run folders, `<date>_<gpu>_<commit>/`, the newest day first; each has a
README of its own. Best rates are flashattn's highest median TFLOP/s in `attention.csv`, over all head dims and lengths.
The project's README quotes complete runs of a commit on the GPU that they were meant for, and runs made by hand, which
have no `status.json`.

| Date | GPU | Triton | Tests passed | Best forward | Best forward+backward | Run | Files |
| --- | --- | --- | ---: | ---: | ---: | --- | --- |
"""


@dataclass(frozen=True)
class Pass:
    """A line of the index, as text; "" where the folder does not say."""

    date: str
    gpu: str
    triton: str
    tests: str
    best: dict[str, str]  # by mode
    run: str  # its folder's name
    marks: str
    files: tuple[str, ...]  # notebooks or logs, as seen from results/


def cell(text: object, width: int = 120) -> str:
    """Text for a cell of a Markdown table: what it shows is a run's, and steers nothing here."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(str(text).split()))[:width]
    return re.sub(r"([\\`*{}\[\]<>|#!])", r"\\\1", line)


def counted(passed: int, failed: int, skipped: int) -> str:
    """ "876 of 884, 1 failed, 7 skipped"."""
    others = f", {failed} failed" * bool(failed) + f", {skipped} skipped" * bool(skipped)
    return f"{passed} of {passed + failed + skipped}{others}"


def tests_of_folder(folder: Path) -> str:
    """As 01_tests.json has them; "" without one."""
    try:
        counts = json.loads((folder / "01_tests.json").read_text(encoding="utf-8"))["counts"]
        return counted(*(int(counts[name]) for name in ("passed", "failed", "skipped")))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def tests_of_log(text: str) -> str:
    """As pytest's closing line has them; "" without one."""
    found = re.findall(r"(\d+) (passed|failed|errors?|skipped)(?=.* in [\d.]+s)", text)
    counts = {name: int(count) for count, name in found}
    failed = sum(count for name, count in counts.items() if name[:4] in ("fail", "erro"))
    return counted(counts["passed"], failed, counts.get("skipped", 0)) if "passed" in counts else ""


def shown_by_notebooks(folder: Path, fact: str) -> str:
    """What the first notebook that says it shows of its machine; "" where none does."""
    for path in sorted(folder.glob("*.ipynb")):
        if found := re.search(rf'"{fact}  +(\S.*?)\\n"', path.read_text(encoding="utf-8", errors="replace")):
            return found[1]
    return ""


def rows(folder: Path) -> list[dict[str, str]]:
    """flashattn's rows of attention.csv, of its part "lengths"."""
    try:
        with (folder / "attention.csv").open(newline="", encoding="utf-8") as file:
            ours = [row for row in csv.DictReader(file) if row.get("provider") == "flashattn"]
            return [row for row in ours if row.get("part", "lengths") == "lengths"]  # older ones have no parts
    except (OSError, ValueError, csv.Error):
        return []


def best(rows: list[dict[str, str]], mode: str) -> str:
    """The highest rate among those measured; "" where none was."""
    rates = [row["tflops"] for row in rows if row.get("mode") == mode and row.get("status") == "measured"]
    highest = max((float(rate) for rate in rates if re.fullmatch(r"[0-9.]+(e[+-]?\d+)?", rate or "")), default=None)
    return "" if highest is None else f"{highest:.{0 if highest >= 100 else 1}f}"


def passes(run: Path) -> list[Pass]:
    """The passes of one run folder: its own, those of folders in it, those of its logs."""
    date, gpu, *_ = RUN_FOLDER.fullmatch(run.name).groups()
    status = run_status.read(run)
    marks = run_status.marks(status) if status else "made by hand"
    gpu = run_status.gpu_name(status) if status else shown_by_notebooks(run, "gpu") or gpu.upper()
    found = []
    for folder in [run, *sorted(run.glob("triton*/"))]:
        files = tuple(path.relative_to(run.parent).as_posix() for path in sorted(folder.glob("*.ipynb")))
        if files or (status and folder == run):
            measured = rows(folder)
            own = shown_by_notebooks(run, "triton") or (status or {"machine": {}})["machine"].get("triton", "")
            triton = own if folder == run else folder.name.removeprefix("triton")
            best_rates = {mode: best(measured, mode) for mode in MODES}
            found.append(Pass(date, gpu, triton, tests_of_folder(folder), best_rates, run.name, marks, files))
    for log in sorted(run.glob("tests_triton*.log")):
        text = log.read_text(encoding="utf-8", errors="replace")
        header = re.match(r"torch \S+ Triton (\S+) (.*) commit ", text)
        if not header:
            raise ValueError(f"{log.name}: begins with {text[:40]!r}, accepted is 'torch ... Triton ... commit ...'")
        path, no_rates = log.relative_to(run.parent).as_posix(), dict.fromkeys(MODES, "")
        found.append(Pass(date, header[2], header[1], tests_of_log(text), no_rates, run.name, marks, (path,)))
    return found


def text(results: Path) -> str:
    """The index of a results folder; raises ValueError, naming the folder, for a status or log that is malformed."""
    lines = []
    for run in sorted(filter(Path.is_dir, results.iterdir()), reverse=True):
        if not RUN_FOLDER.fullmatch(run.name):
            continue
        try:
            found = passes(run)
        except ValueError as error:
            raise ValueError(f"{run.name}/{error}") from None
        for p in found:
            links = ", ".join(f"[{cell(Path(path).stem)}]({quote(path)})" for path in p.files)
            cells = (p.date, p.gpu, p.triton, p.tests, *(p.best[mode] for mode in MODES))
            shown = " | ".join(cell(value) or "-" for value in cells)
            lines.append(f"| {shown} | [{cell(p.marks)}]({quote(p.run)}) | {links or '-'} |\n")
    return HEAD + "".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the index is out of step")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    args = parser.parse_args(argv)

    index = args.results / INDEX
    try:
        new = text(args.results)
    except ValueError as error:
        parser.error(str(error))
    if args.check:
        if not index.is_file() or index.read_text() != new:
            print(f"{index.parent.name}/{index.name} is out of step with the run folders: run scripts/results_index.py")
            return 1
        return 0
    index.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

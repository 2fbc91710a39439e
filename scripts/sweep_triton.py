"""What each Triton release makes of kernels for sm_75, stock and restored: triton_versions.csv and triton_versions.png.

Needs no GPU; on a Turing GPU the forward is also run, checked and timed. Releases are fetched once by
triton_releases.py, some 0.2 GB each, and each compiles in a process of its own, with an empty cache. What fails,
crashes, hangs or cannot be had is a row that says so.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd
import torch
import triton_releases
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from flashattn import measure, sass

CHILD = Path(__file__).with_name("sweep_kernels.py")
RELEASES = tuple("3.0.0 3.1.0 3.2.0 3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0".split())
KERNELS = {"matmul": "matmul", "forward": "forward", "dq": "dQ", "dkdv": "dK/dV"}  # names, and how a figure has them
PATHS = ("stock", "restored")
COUNTS = ("mma", "fma", "ldmatrix", "cp_async", "registers", "stack_bytes", "shared_bytes")
COLUMNS = ("triton", "kernel", "path", "result", *COUNTS, "compile_s", "forward_ms", "tflops")
NOT_NEEDED = "not needed"  # the result of a restored kernel where stock Triton has tensor cores
CANNOT_BE_FETCHED = "cannot be fetched"
SHARED_BYTES = sass.MULTIPROCESSORS[75].shared_bytes


def on_turing() -> bool:
    """Whether the current GPU is of compute capability 7.5: then the forward is worth timing."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (7, 5)


# The sweep -----------------------------------------------------------------------------------------------------------


def sweep(
    releases: Sequence[str] = RELEASES,
    kernels: Sequence[str] = tuple(KERNELS),
    *,
    time: bool | None = None,
    limit_s: float = 600.0,
) -> list[dict]:
    """A row of COLUMNS and the run's metadata for each release, kernel and path; "triton" is the release compiled with.

    time: whether to run and time the forward as well; None does so on a Turing GPU. limit_s bounds a release's
    process, and what it told until then is kept. Prints each release and each row as it goes. Raises ValueError where
    there is no GPU to time on.
    """
    time = on_turing() if time is None else time
    if time and not torch.cuda.is_available():
        raise ValueError("time: got True, which needs a CUDA device")
    metadata, rows = measure.run_metadata(), []
    for index, version in enumerate(releases, 1):
        print(f"[{index}/{len(releases)}] Triton {version}", flush=True)
        try:
            if not triton_releases.path(version):
                print("    fetching", flush=True)
            release = triton_releases.fetch(version)
        except (RuntimeError, OSError) as error:
            print(f"    {CANNOT_BE_FETCHED}: {error}", flush=True)
            made = _rows_of(_pairs(kernels), f"{CANNOT_BE_FETCHED}: {error}")
        else:
            made = release_rows(release, kernels, time=time, limit_s=limit_s)
        rows += [{**dict.fromkeys(COLUMNS), **metadata, **row, "triton": version} for row in made]
    return rows


def release_rows(release: Path, kernels: Sequence[str], *, time: bool, limit_s: float) -> list[dict]:
    """The columns that the release in a folder fills, a row for each kernel and path; prints each as it comes."""
    missing, rows = _pairs(kernels), []
    with tempfile.TemporaryDirectory() as scratch:
        child = Child(release, kernels, time, limit_s, Path(scratch))
        for row in child.rows():
            missing.remove((row["kernel"], row["path"]))
            print(f"    {row['kernel']:8}{row['path']:10}{_brief(row)}", flush=True)
            rows.append(row)
        if missing:
            end = child.end()
            print(f"    {end}", flush=True)
            rows += _rows_of(missing[:1], end) + _rows_of(missing[1:], "not reached")
    return rows


def _pairs(kernels: Iterable[str]) -> list[tuple[str, str]]:
    return [(kernel, path) for kernel in kernels for path in PATHS]


def _rows_of(pairs: Iterable[tuple[str, str]], result: str) -> list[dict]:
    return [{"kernel": kernel, "path": path, "result": result} for kernel, path in pairs]


class Child:
    """A release's process: its rows as they come, and then how it ended."""

    def __init__(self, release: Path, kernels: Iterable[str], time: bool, limit_s: float, scratch: Path):
        self._limit_s = limit_s
        self._cut = False
        self._errors = scratch / "stderr"  # kept from the screen: a pass that fails prints its whole module
        self._read = 0
        path = [str(release), str(triton_releases.ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TRITON_CACHE_DIR": str(scratch / "cache"),  # empty: compile times are cold
        }
        command = [sys.executable, str(CHILD), *kernels, "--release", str(release), *(["--time"] if time else [])]
        with self._errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
            )

    def rows(self) -> Iterator[dict]:
        """What the process prints until it ends or its time is up, a failure with LLVM's own word for it."""
        timer = threading.Timer(self._limit_s, self._cut_off)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith('{"kernel"'):
                    row = json.loads(line)
                    cause = _llvm_error(self._said(row.pop("stderr_bytes")))
                    yield row | {"result": f"{row['result']} ({cause})"} if cause and row["result"] != "ok" else row
            self._process.wait()
        finally:  # also where the caller is interrupted
            timer.cancel()
            self._kill()
            self._process.stdout.close()
            self._process.wait()

    def end(self) -> str:
        """Why rows are missing, in one line."""
        if self._cut:
            return f"cut off after {self._limit_s:g} s"
        code, said = self._process.returncode, self._said()
        cause = _llvm_error(said) or next((line for line in reversed(said.splitlines()) if line.strip()), "")
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{ended}: {cause.strip()}" if cause else ended

    def _said(self, end: int | None = None) -> str:
        """What came on stderr from where the last call stopped, up to byte `end`."""
        said = self._errors.read_bytes()[self._read : end]
        self._read += len(said)
        return said.decode(errors="replace")

    def _cut_off(self) -> None:
        self._cut = True
        self._kill()

    def _kill(self) -> None:
        """The process and the compilers that it started, unless it has ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _llvm_error(stderr: str) -> str:
    found = re.search(r"LLVM ERROR: (.*\S)", stderr)
    return found[1] if found else ""


def _brief(row: dict) -> str:
    if "mma" not in row:
        return row["result"]
    code = f"{row['mma']:4} mma {row['fma']:6} fma {row['registers']:4} registers {row['stack_bytes']:5} bytes spilled"
    timed = f", {row['tflops']:.3g} TFLOP/s" if row.get("tflops") else ""
    return f"{code}, {row['compile_s']:.1f} s{timed}" + ("" if row["result"] == "ok" else f": {row['result']}")


# What it shows -------------------------------------------------------------------------------------------------------


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows by kernel, path and release, for the eye: the history of a figure runs down its column."""
    order = {name: rank for rank, name in enumerate([*KERNELS, *PATHS])}
    frame = frame.sort_values(["kernel", "path"], key=lambda names: names.map(order), kind="stable")
    frame = frame[list(COLUMNS)].astype(dict.fromkeys(COUNTS, "Int64")).astype(object)
    return frame.where(frame.notna(), "").set_index(["kernel", "path", "triton"])


def verdict(frame: pd.DataFrame) -> dict[str, object]:
    """{"ok": whether the kernels of all releases that were had have tensor cores, "counts": how many}.

    Where a release needs no help its stock kernel is meant, else the restored one, which must have as many mma as the
    releases of the same sweep that need none; where there are none of them, any.
    """
    had = ~frame["result"].str.startswith(CANNOT_BE_FETCHED)
    unaided = frame["triton"].isin(frame.loc[frame["result"] == NOT_NEEDED, "triton"])
    meant = frame[had & (frame["path"] == unaided.map({True: "stock", False: "restored"}))]
    models = frame[unaided & (frame["path"] == "stock")].groupby("kernel")["mma"].agg(["min", "max"]).T.to_dict("list")

    def with_tensor_cores(row: dict) -> bool:
        least, most = models.get(row["kernel"], (1, float("inf")))
        return row["result"] == "ok" and max(least, 1) <= row["mma"] <= most

    good = [with_tensor_cores(row) for row in meant.to_dict("records")]
    missing = frame.loc[~had, "triton"].nunique()
    return {
        "ok": bool(good) and all(good),
        "counts": {
            "releases": frame["triton"].nunique() - missing,
            "not to be had": missing,
            "kernels with tensor cores": sum(good),
            "without": len(good) - sum(good),
        },
    }


# Okabe and Ito's colours, which the colour-blind tell apart; a cell also says in signs what it is.
TENSOR, SCALAR, TOO_LARGE, AS_STOCK, NOTHING = "#0072B2", "#F0C05A", "#D55E00", "#CFE3F1", "#ECECEC"


def save_figure(frame: pd.DataFrame, path: Path) -> None:
    """Draw the number of mma by release, kernel and path into `path`, and below them TFLOP/s where there are any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _draw(frame).savefig(path, dpi=130)


def _draw(frame: pd.DataFrame) -> Figure:
    releases, kernels = list(frame["triton"].unique()), [name for name in KERNELS if name in set(frame["kernel"])]
    timed = frame[frame["tflops"].notna()]
    heights = [len(kernels)] * len(PATHS) + ([3.5] if len(timed) else [])
    figure = Figure(figsize=(max(0.66 * len(releases) + 1.2, 8.6), 0.42 * sum(heights) + 1.9), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    panels[0].set_xlim(-0.5, len(releases) - 0.5)
    panels[0].set_xticks(range(len(releases)), releases)
    for panel, path, title in zip(panels[:2], PATHS, ("stock Triton", "with flashattn.turing"), strict=True):
        for row in frame[frame["path"] == path].to_dict("records"):
            _cell(panel, releases.index(row["triton"]), kernels.index(row["kernel"]), row)
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
        panel.set_ylim(len(kernels) - 0.5, -0.5)
        panel.set_yticks(range(len(kernels)), [KERNELS[name] for name in kernels])
        panel.tick_params(length=0, labelbottom=True)
        panel.spines[:].set_visible(False)
    if len(timed):
        _bars(panels[2], timed, releases)
    figure.suptitle("Tensor-core instructions (mma) in kernels compiled for Turing, by Triton release", fontsize=11)
    meanings = {
        TENSOR: "on the tensor cores",
        SCALAR: "0: scalar FMAs",
        TOO_LARGE: f"0, and more than Turing's {SHARED_BYTES >> 10} KB of shared memory",
        AS_STOCK: "= needs no help",
        NOTHING: "\N{MULTIPLICATION SIGN} no code",
    }
    patches = [Patch(color=colour, label=meaning) for colour, meaning in meanings.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _cell(panel, x: int, y: int, row: dict) -> None:
    """One kernel of one release: a tile, and in it the number of mma, or a sign where there is no code."""
    if pd.isna(row["mma"]):
        colour, text = (AS_STOCK, "=") if row["result"] == NOT_NEEDED else (NOTHING, "\N{MULTIPLICATION SIGN}")
        ink = "black"
    elif row["mma"] > 0:
        colour, text, ink = TENSOR, f"{row['mma']:.0f}", "white"
    elif row["shared_bytes"] > SHARED_BYTES:
        colour, text, ink = TOO_LARGE, "0", "white"
    else:
        colour, text, ink = SCALAR, "0", "black"
    panel.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, color=colour, linewidth=0))
    panel.text(x, y, text, color=ink, ha="center", va="center_baseline", fontsize=9 if text.isdigit() else 13)


def _bars(panel, timed: pd.DataFrame, releases: list[str]) -> None:
    """TFLOP/s of the forward, a bar for each release and path, in the colour of its code."""
    for row in timed.to_dict("records"):
        place = releases.index(row["triton"]) + (-0.22 if row["path"] == "stock" else 0.22)
        bar = panel.bar(place, row["tflops"], 0.42, color=TENSOR if row["mma"] > 0 else SCALAR)
        panel.bar_label(bar, fmt="{:.3g}", fontsize=7)
    title = f"TFLOP/s of the forward on {timed['gpu'].iloc[0]}: stock left, restored right"
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    panel.margins(y=0.15)
    panel.tick_params(axis="x", length=0)
    panel.spines[["top", "right"]].set_visible(False)


# The command ---------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--triton", nargs="+", default=RELEASES, metavar="VERSION", help=f"default: {' '.join(RELEASES)}")
    add("--kernels", nargs="+", default=tuple(KERNELS), choices=KERNELS, help="default: all")
    add("--limit-s", type=float, default=600.0, help="for a release, in seconds; default: 600")
    add("--time", action="store_true", help="time the forward on any CUDA GPU, where it is no figure of Turing's")
    add("--output", type=Path, default=Path("results/local"), help="folder for the CSV and the PNG")
    args = parser.parse_args(argv)
    try:
        rows = sweep(args.triton, args.kernels, time=args.time or None, limit_s=args.limit_s)
    except ValueError as error:
        parser.error(str(error))
    measure.write_csv(args.output / "triton_versions.csv", rows)
    frame = pd.DataFrame(rows)
    save_figure(frame, args.output / "triton_versions.png")
    print(table(frame).to_string())
    judged = verdict(frame)
    print(", ".join(f"{count} {name}" for name, count in judged["counts"].items()))
    return int(not judged["ok"])


if __name__ == "__main__":
    sys.exit(main())

"""Replace the README's tables by what the newest run folder of their GPU says.

A table stands between <!-- table:GPU_MODE --> and <!-- /table:GPU_MODE -->, as in table:h200_forward: it is
made from attention.csv of the newest results/<date>_<gpu>_<commit>/, a full run before a quick one. Of the runs
with a status.json only those count that run_status.feeds_tables() lets. <!-- figure:GPU --> is the same run's
attention.png. <!-- table:GPU_MODE if any --> and <!-- figure:GPU if any --> say so while there is no run, and pass over
one that lacks the mode or the figure.
"""

import argparse
import re
import sys
from pathlib import Path

import pandas as pd
import run_status

NONE_YET = {
    "table": "No complete run yet.\n",
    "figure": "**No figure here is from a {gpu} yet**: none was at hand, and its speed is still to be measured.\n",
}
ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- (table|figure):(\S+)( if any)? -->\n).*?(<!-- /\2:\3 -->)", re.DOTALL)
COLUMNS = {
    "flashattn": "flashattn",
    "sdpa_flash": "SDPA FLASH",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA EFFICIENT",
    "flex": "FlexAttention",
    "flash_attn_triton": "flash-attn-triton",
    "flash_attention_triton": "flash-attention-triton",
}


def runs(results: Path, gpu: str) -> list[Path]:
    """attention.csv of each run folder of this GPU that counts: partial benchmarks first, then the oldest first."""
    dated = []
    for path in results.glob(f"*_{gpu}_*/attention.csv"):
        status = run_status.read(path.parent)
        if status is None or run_status.feeds_tables(status):
            told = {} if status is None else status["parameters"]
            # other lengths or modes than the benchmark's own make it a part, too
            full = told.get("quick") is not True and "02_benchmark" not in told.get("notebook_parameters", {})
            dated.append((full, pd.read_csv(path, usecols=["date"])["date"].max(), path))
    return [path for *_, path in sorted(dated)]


def shows(csv: Path, kind: str, mode: str) -> bool:
    """Whether a run has the rows of a table of this mode, or the figure."""
    if kind == "figure":
        return csv.with_suffix(".png").is_file()
    return bool((pd.read_csv(csv, usecols=["mode"])["mode"] == mode).any())


def table(csv: Path, mode: str) -> str:
    """The table of one mode in Markdown: TFLOP/s, and how many times SDPA FLASH, or else EFFICIENT, flashattn is."""
    rows = pd.read_csv(csv, dtype=dict.fromkeys(("commit", "torch", "triton", "driver"), str))
    if "part" in rows:  # of before there were parts all rows are of this one
        rows = rows[rows["part"] == "lengths"]
    rows = rows[rows["mode"] == mode]
    if rows.empty:
        raise ValueError(f"table: got mode {mode!r}, which {csv.parent.name}/{csv.name} does not have")
    run = rows.iloc[0]
    tflops = rows.pivot(index=["head_dim", "causal", "seqlen"], columns="provider", values="tflops")
    names = [name for name in COLUMNS if name in tflops]
    other = "sdpa_flash" if tflops["sdpa_flash"].notna().any() else "sdpa_efficient"  # FLASH refuses Turing
    ratio_to = COLUMNS[other].removeprefix("SDPA ")
    lines = [
        f"| head dim | causal | length | {' | '.join(COLUMNS[name] for name in names)} | ratio to {ratio_to} |",
        "| ---: | :---: | ---: |" + " ---: |" * (len(names) + 1),
    ]
    for (head_dim, causal, seqlen), row in tflops.iterrows():
        cells = [_number(row[name], 0 if row.max() >= 100 else 1) for name in names]
        ratio = _number(row["flashattn"] / row[other], 2)
        lines.append(f"| {head_dim} | {'yes' if causal else 'no'} | {seqlen:,} | {' | '.join(cells)} | {ratio} |")
    tokens, width = _all(rows["batch"] * rows["seqlen"]), _all(rows["heads"] * rows["head_dim"])
    changed = " with uncommitted changes" if run["dirty"] == "yes" else ""
    caption = (
        f"{run['gpu']}, {mode}, {run['dtype']}, median TFLOP/s; batch x length is {tokens}, "
        f"heads x head dim {width}. torch {run['torch']}, Triton {run['triton']}, driver {run['driver']}, "
        f"commit {run['commit'][:7]}{changed}, {run['date'][:10]}: "
        f"[{csv.name}](results/{csv.parent.name}/{csv.name})."
    )
    return "\n".join([*lines, "", caption, ""])


def _number(value: float, digits: int) -> str:
    return "-" if pd.isna(value) else f"{value:.{digits}f}"


def _all(values: pd.Series) -> str:
    return " or ".join(f"{value:,}" for value in sorted(values.unique()))


def figure(csv: Path) -> str:
    """The figure beside a run's attention.csv, as Markdown; raises ValueError where it has none."""
    path = csv.with_suffix(".png")
    if not path.is_file():
        raise ValueError(f"figure: {csv.parent.name} has no {path.name}")
    gpu = pd.read_csv(csv, usecols=["gpu"]).iloc[0]["gpu"]
    return f"![TFLOP/s over length, {gpu}](results/{path.parent.name}/{path.name})\n"


def updated(readme: str, results: Path) -> str:
    """The README's text with every table and figure made anew."""

    def block(match: re.Match) -> str:
        opening, kind, name, if_any, closing = match.groups()
        gpu, _, mode = name.partition("_")
        found = runs(results, gpu)
        showing = [csv for csv in found if shows(csv, kind, mode)] if if_any else found
        if showing:
            return opening + (table(showing[-1], mode) if kind == "table" else figure(showing[-1])) + closing
        if not if_any:
            raise ValueError(f"{kind}: got GPU {gpu!r}, and no {results.name}/*_{gpu}_*/attention.csv counts")
        said = NONE_YET[kind].format(gpu=gpu.upper()) if kind == "table" or not found else ""
        return opening + said + closing

    return BLOCK.sub(block, readme)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of step")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    args = parser.parse_args(argv)

    old = args.readme.read_text()
    try:
        new = updated(old, args.results)
    except ValueError as error:
        parser.error(str(error))
    if args.check:
        if new != old:
            print(f"{args.readme.name} is out of step with {args.results.name}/: run scripts/readme_tables.py")
        return int(new != old)
    args.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

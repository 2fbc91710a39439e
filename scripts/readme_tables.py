"""Replace the README's tables by what the newest run folder of their GPU says.

A table stands between <!-- table:GPU_MODE --> and <!-- /table:GPU_MODE -->, as in table:h200_forward: it is
made from attention.csv of the newest results/<date>_<gpu>_<commit>/.
"""

import argparse
import re
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)
COLUMNS = {
    "flashattn": "flashattn",
    "sdpa_flash": "SDPA FLASH",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA EFFICIENT",
}


def newest(results: Path, gpu: str) -> Path:
    """attention.csv of the newest run folder of this GPU; raises ValueError where there is none."""
    found = results.glob(f"*_{gpu}_*/attention.csv")
    dated = [(pd.read_csv(path, usecols=["date"])["date"].max(), path) for path in found]
    if not dated:
        raise ValueError(f"table: got GPU {gpu!r}, and there is no {results.name}/*_{gpu}_*/attention.csv")
    return max(dated)[1]


def table(csv: Path, mode: str) -> str:
    """The table of one mode in Markdown: TFLOP/s, and how many times SDPA FLASH flashattn is."""
    rows = pd.read_csv(csv, dtype=dict.fromkeys(("commit", "torch", "triton", "driver"), str))
    rows = rows[rows["mode"] == mode]
    if rows.empty:
        raise ValueError(f"table: got mode {mode!r}, which {csv.parent.name}/{csv.name} does not have")
    run = rows.iloc[0]
    tflops = rows.pivot(index=["head_dim", "causal", "seqlen"], columns="provider", values="tflops")
    names = [name for name in COLUMNS if name in tflops]
    lines = [
        f"| head dim | causal | length | {' | '.join(COLUMNS[name] for name in names)} | ratio to FLASH |",
        "| ---: | :---: | ---: |" + " ---: |" * (len(names) + 1),
    ]
    for (head_dim, causal, seqlen), row in tflops.iterrows():
        cells = [_number(row[name], 0 if row.max() >= 100 else 1) for name in names]
        ratio = _number(row["flashattn"] / row["sdpa_flash"], 2)
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


def updated(readme: str, results: Path) -> str:
    """The README's text with every table made anew."""

    def block(match: re.Match) -> str:
        gpu, _, mode = match[2].partition("_")
        return match[1] + table(newest(results, gpu), mode) + match[3]

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

"""Tables and figures of the benchmark's rows."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

PANEL = ["head_dim", "causal"]


def save_figure(frame: pd.DataFrame, value: str, label: str, path: Path, log: bool = False) -> None:
    """Draw `value` over length into `path`, where any row has a value."""
    frame = frame[frame[value].notna()]
    if not frame.empty:
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(frame, value, label, log).savefig(path, dpi=110)


def describe(frame: pd.DataFrame) -> str:
    """The machine and the versions that the rows are from, in one line."""
    row = frame.iloc[0]
    machine = row["gpu"] or f"CPU ({row['platform']})"
    changed = ", with uncommitted changes" if row["dirty"] == "yes" else ""
    return (
        f"{machine}, {row['dtype']}, torch {row['torch']}, Triton {row['triton'] or 'none'}, "
        f"commit {row['commit'][:7]}{changed}"
    )


def part(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Its rows of one of benchmark.PARTS; those of before there were parts are all the first's."""
    return frame[frame["part"] == name] if "part" in frame else frame


def table(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """`value` with a line for each mode and shape and a column for each provider; NaN is not measured."""
    grouped = "heads_k" in frame and (frame["heads_k"] != frame["heads"]).any()
    shape = [*PANEL, *(["heads", "heads_k"] if grouped else []), "seqlen"]
    wide = frame.pivot(index=["mode", *shape], columns="provider", values=value)
    return wide[frame["provider"].unique()].astype(float)


def memory_reduction(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak extra MiB of naive attention and of flashattn, how many times less that is; and with its output released."""
    frame = frame[frame["mode"] != "backward"]
    extra = table(frame, "extra_mib")[["naive", "flashattn"]]
    released = table(frame, "released_mib")["flashattn"]
    return extra.assign(reduction=extra["naive"] / extra["flashattn"], released=released)


def not_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Which provider has no figure, in which modes, at how many lengths, and why."""
    rows = frame[frame["status"] != "measured"].fillna({"note": ""})
    groups = rows.groupby(["provider", "status", "note"], sort=False)
    return groups.agg(
        modes=("mode", lambda modes: ", ".join(modes.unique())), lengths=("seqlen", "nunique")
    ).reset_index()


def _draw(frame: pd.DataFrame, value: str, label: str, log: bool) -> Figure:
    """`value` over length: a row of panels for each mode, a column for each head dim, causal or not."""
    modes = frame["mode"].unique()
    panels = list(frame[PANEL].drop_duplicates().itertuples(index=False, name=None))
    figure = Figure(figsize=(3.6 * len(panels) + 2, 2.8 * len(modes) + 1.4), layout="constrained")
    axes = figure.subplots(len(modes), len(panels), sharex=True, sharey="row", squeeze=False)
    for line, mode in zip(axes, modes, strict=True):
        for axis, (head_dim, causal) in zip(line, panels, strict=True):
            rows = frame[(frame["mode"] == mode) & (frame["head_dim"] == head_dim) & (frame["causal"] == causal)]
            _lines(axis, rows, value, frame["provider"].unique())
            axis.set_title(f"{mode}, head dim {head_dim}, {'causal' if causal else 'not causal'}", fontsize=9)
        line[0].set_ylabel(label)
        if log:
            line[0].set_yscale("log")
        else:
            line[0].set_ylim(bottom=0)  # once all panels of the shared axis are drawn: it ends autoscaling
    lengths = sorted(frame["seqlen"].unique())
    for axis in axes[-1]:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator(lengths))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticklabels(lengths, rotation=45)
        axis.set_xlabel("length (tokens)")
    figure.suptitle(describe(frame), fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _lines(axis, rows: pd.DataFrame, value: str, providers: list[str]) -> None:
    """A line for each provider, the colour its own in every panel."""
    for number, name in enumerate(providers):
        line = rows[rows["provider"] == name].sort_values("seqlen")
        width = 2.4 if name == "flashattn" else 1.2
        y = line[value].astype(float)
        axis.plot(line["seqlen"], y, label=name, color=f"C{number}", linewidth=width, marker="o", markersize=3)
    axis.grid(alpha=0.3)

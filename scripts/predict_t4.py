"""Predict what a T4 makes of the shipped fp16 tiles, by the model of flashattn/sm75.py; needs no GPU.

Prints a row for each tile, then forward and backward against what SDPA's kernels have in the same model. "useful" is
the utilisation of the tensor cores by FLOPs that count: not padding of the head dim, nor products that several warps
repeat. A row counts all products of its kernel, the backward's rows 5 of the 7 or 8 that its kernels make: dkdv, or dk
and dv where the tile has them apart, and dq.
"ins/kF" and "B/kF" are warp instructions and bytes through shared memory for a thousand useful FLOP.
"TF 1.59" and "TF 1.0" are useful TFLOP/s at these GHz, "aim" is what the project set out to reach.
Nothing here was measured; docs/t4_model.md says how far to trust it.
"""

import argparse
import csv
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch
import triton_releases

from flashattn import codegen, configs, launcher, launches, measure, sm75, turing

BASELINE = Path(__file__).resolve().parents[1] / "tests" / "t4_predictions.json"
BASELINE_RELEASES = ("3.2.0", "3.6.0")
MAIN_HEAD_DIMS = (64, 80, 128, 192)  # 80 and 192 are held in two parts, dK and dV of 192 apart
TOLERANCE = 0.03  # of useful utilisation: what the model cannot tell apart
BOOST_GHZ = 1.59  # the T4's highest clock
HELD_GHZ = 1.0  # a guess at what 70 W allow under such load; the base clock is 0.585

# Utilisation of SDPA's memory-efficient kernels in the same model, useful, by head dim: what predict_sdpa.py prints.
SDPA = {"forward": {64: 0.332, 128: 0.327}, "backward": {64: 0.260, 128: 0.274}}
# What this project set out to reach.
AIMS = {
    "forward d64 full": 0.80,
    "forward d64 causal": 0.75,
    "forward d128 full": 0.62,
    "backward d64 full": 0.50,
    "backward d128 full": 0.33,
}
FORWARD_BACKWARD_AIM = 1.9  # times SDPA's speed, head dim 64


class Case(NamedTuple):
    """A tile to predict; rank is its place among the candidates, 0 the default."""

    pass_: str
    head_dim: int
    causal: bool
    rank: int
    tile: configs.Tile

    def key(self, kernel: str) -> str:
        return f"{kernel} d{self.head_dim} {'causal' if self.causal else 'full'}"


def cases(passes: Iterable[str], head_dims: Iterable[int], causal: Iterable[bool], first: bool = False) -> list[Case]:
    """All candidates for a T4, or the first of each."""
    return [
        Case(pass_, head_dim, mask, rank, tile)
        for pass_ in passes
        for head_dim in head_dims
        for mask in causal
        for rank, tile in enumerate(launches.shipped_tiles(pass_, head_dim, torch.float16)[: 1 if first else None])
    ]


def tile_name(tile: configs.Tile) -> str:
    """Short, for a table."""
    levers = [name for name, value in tile.choices.items() if value is True]
    limit = [f"max_registers={tile.max_registers}"] if tile.max_registers else []
    return " ".join([f"{tile.block_m}x{tile.block_n} w{tile.num_warps}", *levers, *limit])


def case_rows(case: Case) -> list[dict[str, object]]:
    """A row for each kernel of a case: one, or dk and dv where the tile has them apart."""
    made = launches.launches(case.pass_, head_dim=case.head_dim, causal=case.causal, tile=case.tile)
    kernels = ("dk", "dv") if case.tile.apart else (case.pass_,)
    return [row(case, *pair) for pair in zip(kernels, made, strict=True)]


def row(case: Case, kernel: str, launch: launcher.Launch) -> dict[str, object]:
    """The columns of a kernel; "result" is "ok", or why there is no prediction."""
    columns = {"kernel": case.key(kernel), "rank": case.rank, "tile": tile_name(case.tile)}
    try:
        compiled = codegen.compile_for(launch, 75)
        columns |= {name: getattr(compiled, name) for name in ("registers", "stack_bytes", "shared_bytes")}
        found = sm75.predict(compiled)
        cost = sm75.score_cost(found, kernel, launch.constants)
    except Exception as error:  # the compiler raises what it likes; the other tiles still have their rows
        lines = str(error).strip().splitlines() or [""]
        return columns | {"result": f"{type(error).__name__}: {lines[-1]}"}
    return columns | predicted(found, cost, sm75.PRODUCTS[kernel], case.head_dim)


def predicted(found: sm75.Prediction, cost: sm75.Cost, products: int, head_dim: int) -> dict[str, object]:
    """The columns that come from the model."""
    useful = cost.useful(products, head_dim)
    kflop = 2 * products * head_dim / 1000  # useful ones, a score
    return {
        "programs": found.programs,
        "utilisation": round(found.utilisation, 4),
        "lowest": round(found.lowest, 4),
        "highest": round(found.highest, 4),
        "ceiling": round(found.ceiling, 4),
        "bound": found.bound,
        "useful": round(useful, 4),
        f"tflops_{BOOST_GHZ}": round(sm75.tflops(useful, BOOST_GHZ), 2),
        f"tflops_{HELD_GHZ}": round(sm75.tflops(useful, HELD_GHZ), 2),
        "instructions_per_kflop": round(cost.instructions / kflop, 3),
        "shared_bytes_per_kflop": round(cost.shared_bytes / kflop, 1),
        "turn_cycles": round(found.cycles, 1),
        **{f"score_{name}": value for name, value in cost._asdict().items()},
        "stalls": " ".join(f"{name.replace(' ', '_')}={share:.3f}" for name, share in found.stalls.items()),
        "result": "ok",
    }


def _not_interpreted() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # in which nothing compiles


def rows(wanted: Sequence[Case], processes: int | None = None) -> list[dict[str, object]]:
    """The rows of each case, compiled and simulated in processes of their own; a compiler that dies is a row, too."""
    spawn = multiprocessing.get_context("spawn")

    def pool(size: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(size, spawn, _not_interpreted)

    with pool(processes or os.cpu_count() or 1) as together:
        futures = [together.submit(case_rows, case) for case in wanted]
    found = []
    for case, future in zip(wanted, futures, strict=True):
        try:
            found += future.result()
        except BrokenProcessPool:  # it took the others with it: which one was it?
            with pool(1) as alone:
                try:
                    found += alone.submit(case_rows, case).result()
                except BrokenProcessPool:
                    died = {"kernel": case.key(case.pass_), "rank": case.rank, "result": "the compiler's process died"}
                    found.append(died)
    return found


# What it comes to ----------------------------------------------------------------------------------------------------


def _cost(rows: Iterable[dict[str, object]]) -> sm75.Cost:
    """Of a score in all the kernels."""
    return sm75.Cost(*(sum(r[f"score_{name}"] for r in rows) for name in sm75.Cost._fields))


def useful(found: Iterable[dict], pass_: str, head_dim: int, mask: str, default: bool) -> float | None:
    """Useful utilisation of "forward" or "backward" with the default tiles, or the best; None without a row."""
    best = []
    for kernels in (("dkdv", "dk", "dv"), ("dq",)) if pass_ == "backward" else ((pass_,),):
        names = [f"{kernel} d{head_dim} {mask}" for kernel in kernels]
        tiles = defaultdict(list)
        for r in found:
            if r["kernel"] in names and not (default and r["rank"]):
                tiles[r["rank"]].append(r)
        good = [rows for rows in tiles.values() if all(r["result"] == "ok" for r in rows)]
        if not good:
            return None
        best += min(good, key=_cost)
    products = sm75.BACKWARD_PRODUCTS if pass_ == "backward" else sm75.PRODUCTS[pass_]
    return _cost(best).useful(products, head_dim)


def forward_backward_ratio(forward: float, backward: float) -> float:
    """How many times SDPA's speed at head dim 64; the backward has 2.5 times the forward's FLOPs."""
    sdpa = 1 / SDPA["forward"][64] + 2.5 / SDPA["backward"][64]
    return sdpa / (1 / forward + 2.5 / backward)


def summary(found: list[dict]) -> list[dict[str, object]]:
    """What the rows come to with the default tiles and with the best, each beside its aim and SDPA."""
    lines = []
    for name, aim in AIMS.items():
        pass_, head_dim, mask = name.split()
        head_dim = int(head_dim[1:])
        made = {kind: useful(found, pass_, head_dim, mask, kind == "default") for kind in ("default", "best")}
        sdpa = SDPA[pass_][head_dim] if mask == "full" else None
        lines.append({"what": name, **made, "aim": aim, "sdpa": sdpa})
    both = {"what": "forward with backward d64, times SDPA", "aim": FORWARD_BACKWARD_AIM, "sdpa": 1.0}
    for kind in ("default", "best"):
        parts = [useful(found, pass_, 64, "full", kind == "default") for pass_ in ("forward", "backward")]
        both[kind] = forward_backward_ratio(*parts) if all(parts) else None
    return [*lines, both]


def beside_measured(lines: Iterable[dict], results: Path) -> list[dict[str, object]]:
    """TFLOP/s of the default tiles as predicted, and as the README's T4 run measured them; None where there is none.

    Measured is the median of flashattn at the longest length.
    """
    import pandas as pd  # not for the processes that compile
    import readme_tables

    csvs = readme_tables.runs(results, "t4")
    rates = {}
    if csvs:
        frame = pd.read_csv(csvs[-1])
        frame = frame[(frame["provider"] == "flashattn") & (frame["dtype"] == "float16") & frame["tflops"].notna()]
        for r in frame.sort_values("seqlen").to_dict("records"):
            rates[f"{r['mode']} d{r['head_dim']} {'causal' if r['causal'] else 'full'}"] = r["tflops"]
    return [
        {
            "what": line["what"],
            **{
                f"predicted at {ghz} GHz": line["default"] and round(sm75.tflops(line["default"], ghz), 1)
                for ghz in (BOOST_GHZ, HELD_GHZ)
            },
            "measured": rates.get(line["what"]),
        }
        for line in lines
        if line["what"] in AIMS
    ]


# The baseline, to which tests/test_predict_t4.py holds the main tiles -------------------------------------------------


def main_rows(environment: dict[str, str], processes: int | None = None) -> list[dict[str, str]]:
    """Rows of the default tiles at MAIN_HEAD_DIMS, as a CSV has them, made in an environment."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.csv")
        command = [sys.executable, __file__, "--first", "--head-dims", *map(str, MAIN_HEAD_DIMS), "--csv", str(file)]
        command += ["--processes", str(processes)] if processes else []
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not file.is_file():
            raise RuntimeError(done.stderr)
        with file.open(newline="") as lines:
            return list(csv.DictReader(lines))


def held(of: dict) -> dict[str, object]:
    """What the baseline keeps of a row; the tile is for its readers."""
    numbers = {name: int(of[name]) for name in ("registers", "stack_bytes")}
    return {"tile": of["tile"], **numbers, "useful": float(of["useful"])}


def changes(found: Iterable[dict], baseline: dict[str, dict]) -> list[str]:
    """What of the rows is worse than a release's baseline, or so much better that the baseline is out of date."""
    missing = dict(baseline)
    lines = []
    for r in found:
        before = missing.pop(r["kernel"], None)
        if before is None or r["result"] != "ok":
            lines.append(f"{r['kernel']}: {'is not in the baseline' if before is None else r['result']}")
            continue
        now = held(r)
        for name in ("registers", "stack_bytes"):
            if now[name] > before[name]:
                lines.append(f"{r['kernel']}: {name} {now[name]}, were {before[name]}")
        if abs(now["useful"] - before["useful"]) > TOLERANCE:
            lines.append(f"{r['kernel']}: useful utilisation {now['useful']:.3f}, was {before['useful']:.3f}")
    return lines + [f"{name}: has no row" for name in missing]


def write_baseline(reason: str) -> None:
    """Predict the main tiles under every release of the baseline; raises RuntimeError where one is not here."""
    made = {}
    for release in BASELINE_RELEASES:
        environment = dict(os.environ)
        if release != turing.triton_version():
            if not (folder := triton_releases.path(release)):
                raise RuntimeError(triton_releases.not_here(release))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
        found = main_rows(environment)
        if bad := [f"{r['kernel']}: {r['result']}" for r in found if r["result"] != "ok"]:
            raise RuntimeError("; ".join(bad))
        made[release] = {r["kernel"]: held(r) for r in found}
        print(f"Triton {release}: {len(found)} kernels")
    BASELINE.write_text(json.dumps({"reason": reason, "triton": made}, indent=1) + "\n")


# The command ---------------------------------------------------------------------------------------------------------


def print_rows(found: Iterable[dict]) -> None:
    print(
        f"{'kernel':20}{'regs':>5}{'stack':>6}{'progs':>6}{'util':>7}{'low':>6}{'high':>6}{'ceiling':>9}  "
        f"{'by':9}{'useful':>7}{f'TF {BOOST_GHZ}':>9}{f'TF {HELD_GHZ}':>8}{'ins/kF':>8}{'B/kF':>7}  tile"
    )
    for r in found:
        tile = f"  {r.get('tile', '')}"  # last, since its length varies
        if r["result"] != "ok":
            print(f"{r['kernel']:20}{r['result']}{tile}")
            continue
        util, low, high, ceiling, good = (
            100 * r[name] for name in ("utilisation", "lowest", "highest", "ceiling", "useful")
        )
        print(
            f"{r['kernel']:20}{r['registers']:5}{r['stack_bytes']:6}{r['programs']:6}{util:7.1f}{low:6.1f}{high:6.1f}"
            f"{ceiling:9.1f}  {r['bound']:9}{good:7.1f}{r[f'tflops_{BOOST_GHZ}']:9.1f}{r[f'tflops_{HELD_GHZ}']:8.1f}"
            f"{r['instructions_per_kflop']:8.2f}{r['shared_bytes_per_kflop']:7.0f}{tile}"
        )


def print_summary(lines: Iterable[dict]) -> None:
    print(f"{'useful utilisation in %, predicted':40}{'default':>9}{'best':>9}{'aim':>9}{'SDPA':>9}")
    for line in lines:
        scale, digits = (1, 2) if line["what"].endswith("SDPA") else (100, 1)
        numbers = [line[name] for name in ("default", "best", "aim", "sdpa")]
        print(f"{line['what']:40}" + "".join(f"{'-' if x is None else f'{scale * x:.{digits}f}':>9}" for x in numbers))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--passes", nargs="+", choices=configs.PASSES, default=configs.PASSES)
    add("--head-dims", type=int, nargs="+", default=list(configs.TILES["sm_75"]["forward", 2]), metavar="D")
    add("--causal", choices=["no", "yes", "both"], default="both")
    add("--first", action="store_true", help="only the first candidate of each, the default for long sequences")
    add("--processes", type=int, help="default: one for each core")
    add("--write-baseline", metavar="REASON", help=f"write {BASELINE.name} anew, with why it may change, and no table")
    add("--csv", type=Path, metavar="FILE", help="write the rows there, too")
    args = parser.parse_args(argv)

    if args.write_baseline is not None:
        if not args.write_baseline.strip():
            parser.error("--write-baseline: got no reason, accepted is why the baseline may change")
        try:
            write_baseline(args.write_baseline)
        except RuntimeError as error:
            parser.exit(1, f"{error}\n")
        return 0
    if wrong := [d for d in args.head_dims if not 1 <= d <= configs.MAX_HEAD_DIM]:
        parser.error(f"--head-dims: got {wrong[0]}, accepted are 1 to {configs.MAX_HEAD_DIM}")
    if args.processes is not None and args.processes < 1:
        parser.error(f"--processes: got {args.processes}, accepted are 1 or more")
    masks = {"no": [False], "yes": [True], "both": [False, True]}[args.causal]
    found = rows(cases(args.passes, args.head_dims, masks, args.first), args.processes)
    print_rows(found)
    print()
    print_summary(summary(found))
    if args.csv:
        metadata = measure.run_metadata()
        measure.write_csv(args.csv, [r | metadata for r in found])
    return int(any(r["result"] != "ok" for r in found))


if __name__ == "__main__":
    sys.exit(main())

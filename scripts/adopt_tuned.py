"""Make tiles that were tuned the shipped defaults: reorder their architecture's table in flashattn/configs.py.

A change to look at, with `git diff`, before it is committed. An entry of the table has one order for every length and
mask: the tile that was the fastest in most of the buckets from 1,024 on goes first, and the others keep their order.
float32 has one table for all architectures, and stays as it is.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashattn import configs  # noqa: E402

LONG = 1024
HALF = 2  # bytes an element
KEY = re.compile(r"(\w+) 16bit d(\d+) n(\d+) (causal|full)")  # configs.tuned_key()


@dataclass(frozen=True)
class Entry:
    """A line of candidates in the source: where each is written, and what it is."""

    spans: tuple[tuple[int, int], ...]
    tiles: tuple[configs.Tile, ...]


def winners(tuned: dict[str, dict]) -> dict[tuple[str, int], Counter]:
    """{(pass, padded head dim): how often each tile was the fastest at a long length} of a tuned file."""
    found: dict[tuple[str, int], Counter] = {}
    for key, tile in tuned.items():
        match = KEY.fullmatch(key)
        if match and int(match[3]) >= LONG:
            found.setdefault((match[1], int(match[2])), Counter())[configs.Tile(**tile)] += 1
    return found


def entries(source: str, architecture: str) -> dict[tuple[str, int], Entry]:
    """The 16-bit entries of an architecture in the source of configs.py; raises ValueError where it has none."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    table = next(node.value for node in assigned if node.target.id == "TILES").args[0]
    found = {}
    for name, passes in zip(table.keys, table.values, strict=True):
        for key, by_head_dim in zip(passes.keys, passes.values, strict=True):
            if name.value != architecture or not isinstance(key, ast.Tuple):  # **_FLOAT_TILES has no key
                continue
            for head_dim, tiles in zip(by_head_dim.keys, by_head_dim.values, strict=True):
                ends = [(tile.lineno, tile.col_offset, tile.end_lineno, tile.end_col_offset) for tile in tiles.elts]
                spans = tuple((starts[a - 1] + b, starts[c - 1] + d) for a, b, c, d in ends)
                made = configs.TILES[architecture][key.elts[0].value, HALF][head_dim.value]
                found[key.elts[0].value, head_dim.value] = Entry(spans, made)
    if not found:
        raise ValueError(f"architecture: got {architecture!r}, accepted are {', '.join(configs.TILES)}")
    return found


def adopted(source: str, architecture: str, tuned: dict[str, dict]) -> tuple[str, list[str]]:
    """The source with the fastest tiles first, and a line for each entry that changed."""
    data, changes, edits = source.encode(), [], []
    known = entries(source, architecture)
    for (pass_, head_dim), wins in winners(tuned).items():
        entry = known.get((pass_, max(32, head_dim)))
        if not entry or not any(tile in entry.tiles for tile in wins):
            continue
        best = max(entry.tiles, key=lambda tile: wins[tile])  # the first of equals
        if best == entry.tiles[0]:
            continue
        order = sorted(range(len(entry.tiles)), key=lambda i: entry.tiles[i] != best)
        edits += [(entry.spans[to], data[slice(*entry.spans[i])]) for to, i in enumerate(order)]
        shape = f"{best.block_m} x {best.block_n}, {best.num_warps} warps, {best.num_stages} stages"
        changes.append(
            f"{pass_} d{head_dim}: {shape} goes first; the fastest in {wins[best]} of {wins.total()} buckets"
        )
    for (start, end), text in sorted(edits, reverse=True):
        data = data[:start] + text + data[end:]
    return data.decode(), changes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a tuned file, as scripts/tune.py leaves it: results/*/tuned/*.json")
    parser.add_argument("--architecture", default="sm_75", choices=list(configs.TILES), help="default: sm_75, the T4's")
    parser.add_argument("--configs", type=Path, default=ROOT / "flashattn" / "configs.py", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        tuned = json.loads(args.file.read_text())
        new, changes = adopted(args.configs.read_text(), args.architecture, tuned)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        print(f"adopt_tuned: {args.file}: {error}", file=sys.stderr)
        return 1
    args.configs.write_text(new)
    print(*changes or ["nothing to change: the fastest tiles are the defaults already"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

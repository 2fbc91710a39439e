"""Ship tuned tiles: merge a tuned file into flashattn/tuned/<architecture>.json.

A change to look at, with `git diff`, before it is committed. It prints for what another tile is chosen from now on,
the length buckets near those of the file included. What is no candidate of the architecture is left out.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from flashattn import configs  # noqa: E402


def kinds(device: configs.Device) -> dict[str, tuple]:
    """{tuned_key: the arguments of configs.shipped_tile()} for all that can be tuned on a device."""
    table = configs.TILES[device.architecture]
    found = {}
    for pass_, dtype in product(configs.PASSES, (torch.float16, torch.float32)):
        for rest in product(table[pass_, dtype.itemsize], configs.LENGTH_BUCKETS, (True, False)):
            kind = pass_, device, dtype, *rest
            found[configs.tuned_key(*kind)] = kind
    return found


def adopt(architecture: str, tuned: dict[str, configs.Tile]) -> list[str]:
    """Merge tuned tiles into the architecture's file; a line for each that is left out or chosen from now on.

    Raises ValueError, and leaves the file, where all are left out: they were tuned on another architecture.
    """
    known = kinds(configs.DEVICES[architecture])
    before = {key: configs.shipped_tile(*kind) for key, kind in known.items()}
    merged = configs.load_shipped(architecture) | tuned
    good = {key: tile for key, tile in merged.items() if key in known and tile in configs.candidates(*known[key][:4])}
    if not tuned.keys() & good.keys():
        raise ValueError(f"has no tile that is a candidate of {architecture}: give the --architecture it was tuned on")
    configs.write_tiles(configs.shipped_file(architecture), good)
    configs.load_shipped.cache_clear()
    after = {key: configs.shipped_tile(*kind) for key, kind in known.items()}
    left_out = [f"{key}: left out, as {tile} is no candidate" for key, tile in merged.items() if key not in good]
    return left_out + [f"{key}: {after[key]}; was {before[key]}" for key in known if after[key] != before[key]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a tuned file, as scripts/tune.py leaves it: results/*/tuned/*.json")
    parser.add_argument("--architecture", default="sm_75", choices=list(configs.TILES), help="default: sm_75, the T4's")
    args = parser.parse_args(argv)
    try:
        changes = adopt(args.architecture, configs.read_tiles(args.file))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        print(f"adopt_tuned: {args.file}: {error}", file=sys.stderr)
        return 1
    print(*changes or ["nothing to change: these tiles are chosen already"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tuned tiles become shipped defaults by a change of their order, and of nothing else."""

import json
import sys
from dataclasses import asdict

import pytest
from children import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import adopt_tuned

from flashattn import configs

SOURCE = (ROOT / "flashattn" / "configs.py").read_text()
TILES = configs.TILES["sm_75"]["forward", 2][64]


def tuned(*wins, pass_="forward", head_dim=64):
    """A tuned file's content: the tile with index wins[i] was the fastest at length 1024 * 2**i."""
    return {f"{pass_} 16bit d{head_dim} n{1024 << i} causal": asdict(TILES[win]) for i, win in enumerate(wins)}


def tables(source):
    """TILES of a source, as it would be imported."""
    module = {"__name__": "flashattn.adopted", "__package__": "flashattn"}
    sys.modules["flashattn.adopted"] = sys  # dataclasses look their module up
    try:
        exec(compile(source, "configs.py", "exec"), module)
    finally:
        del sys.modules["flashattn.adopted"]
    return {a: {key: dict(by) for key, by in table.items()} for a, table in module["TILES"].items()}


def shapes(tiles):
    return [(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages) for tile in tiles]


def test_the_tile_that_won_most_goes_first():
    new, changes = adopt_tuned.adopted(SOURCE, "sm_75", tuned(2, 2, 0))
    shape = f"{TILES[2].block_m} x {TILES[2].block_n}, {TILES[2].num_warps} warps"
    assert len(changes) == 1 and f"forward d64: {shape}" in changes[0] and "2 of 3 buckets" in changes[0]
    old_tables, new_tables = tables(SOURCE), tables(new)
    order = [TILES[2], TILES[0], TILES[1], *TILES[3:]]
    assert shapes(new_tables["sm_75"]["forward", 2].pop(64)) == shapes(order)
    old_tables["sm_75"]["forward", 2].pop(64)
    assert repr(new_tables) == repr(old_tables)
    assert sorted(new) == sorted(SOURCE)


@pytest.mark.parametrize(
    "data",
    [
        tuned(0, 0, 1),
        tuned(0, 1),  # the first of equals
        {"forward 16bit d64 n64 full": asdict(TILES[1])},  # a short length
        {"forward 32bit d64 n4096 full": asdict(TILES[1])},
        {"forward 16bit d64 n4096 full": asdict(configs.Tile(8, 8, 1))},  # of another table
        {},
    ],
)
def test_nothing_to_change(data):
    assert adopt_tuned.adopted(SOURCE, "sm_75", data) == (SOURCE, [])


def test_command(tmp_path, capsys):
    file, copy = tmp_path / "Tesla_T4_triton3.6.0_restored.json", tmp_path / "configs.py"
    copy.write_text(SOURCE)
    file.write_text(json.dumps(tuned(1)))
    assert adopt_tuned.main([str(file), "--configs", str(copy)]) == 0
    assert (
        f"{TILES[1].block_m} x {TILES[1].block_n}, {TILES[1].num_warps} warps" in capsys.readouterr().out
        and copy.read_text() != SOURCE
    )
    file.write_text("{")
    assert adopt_tuned.main([str(file), "--configs", str(copy)]) == 1
    assert file.name in capsys.readouterr().err

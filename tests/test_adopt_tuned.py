"""Tuned tiles are shipped by a merge into their architecture's file, and what is shipped can be chosen."""

import dataclasses
import json
import sys

import pytest
import torch
from children import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import adopt_tuned

from flashattn import configs
from flashattn.configs import DEVICES, LENGTH_BUCKETS, TILES, Tile

SHIPPED = ROOT / "flashattn" / "tuned"
FORWARD = TILES["sm_75"]["forward", 2][64]
KEY = "forward 16bit d64 n1024 causal"


def test_shipped_files_are_of_architectures():
    assert {*SHIPPED.glob("*")} <= {configs.shipped_file(architecture) for architecture in TILES}


@pytest.mark.parametrize("architecture", TILES)
def test_every_shipped_tile_is_a_candidate_that_fits(architecture, tmp_path):
    configs.load_shipped.cache_clear()
    tiles = configs.load_shipped(architecture)
    known = adopt_tuned.kinds(DEVICES[architecture])
    assert tiles.keys() <= known.keys()
    for key, tile in tiles.items():
        assert tile in configs.candidates(*known[key][:4]), key
        assert configs.shipped_tile(*known[key]) == tile, key
    if tiles:
        configs.write_tiles(tmp_path / "again.json", tiles)
        assert (tmp_path / "again.json").read_text() == configs.shipped_file(architecture).read_text()


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """The T4's file, in a folder where nothing is shipped yet."""
    monkeypatch.setattr(configs, "shipped_file", lambda architecture: tmp_path / "tuned" / f"{architecture}.json")
    configs.load_shipped.cache_clear()
    yield configs.shipped_file("sm_75")
    configs.load_shipped.cache_clear()


def test_every_kind_of_launch_is_known_once():
    known = adopt_tuned.kinds(DEVICES["sm_75"])
    entries = sum(len(by_head_dim) for by_head_dim in TILES["sm_75"].values())
    assert len(known) == entries * len(LENGTH_BUCKETS) * 2
    assert known[KEY] == ("forward", DEVICES["sm_75"], torch.float16, 64, 1024, True)


def test_what_is_chosen_from_now_on_is_said(shipped):
    changes = adopt_tuned.adopt("sm_75", {KEY: FORWARD[2]})
    assert configs.read_tiles(shipped) == {KEY: FORWARD[2]}
    assert f"{KEY}: {FORWARD[2]}; was {FORWARD[0]}" in changes
    old, new = (
        [configs.default_tile(x, "forward", n) for n in LENGTH_BUCKETS] for x in (FORWARD, FORWARD[2:3] + FORWARD)
    )
    lengths = [n for n, a, b in zip(LENGTH_BUCKETS, old, new, strict=True) if a != b]  # it is the nearest of all
    assert {change.split(":")[0] for change in changes} == {f"forward 16bit d64 n{n} causal" for n in lengths}
    assert adopt_tuned.adopt("sm_75", {KEY: FORWARD[2]}) == []

    other = KEY.replace("1024 causal", "2048 full")
    assert all(" full: " in change for change in adopt_tuned.adopt("sm_75", {other: FORWARD[1]}))
    assert configs.read_tiles(shipped) == {KEY: FORWARD[2], other: FORWARD[1]}  # what was there stays
    changes = adopt_tuned.adopt("sm_75", {KEY: FORWARD[0]})
    assert f"{KEY}: {FORWARD[0]}; was {FORWARD[2]}" in changes
    assert configs.read_tiles(shipped) == {KEY: FORWARD[0], other: FORWARD[1]}


def test_float32_is_of_its_architecture(shipped):
    tile = TILES["sm_90"]["dq", 4][128][1]
    key = "dq 32bit d128 n4096 full"
    assert f"{key}: {tile}; was {TILES['sm_90']['dq', 4][128][0]}" in adopt_tuned.adopt("sm_90", {key: tile})
    assert configs.load_shipped("sm_90") == {key: tile} and configs.load_shipped("sm_75") == {}


@pytest.mark.parametrize("key", [KEY, KEY.replace("1024", "1000"), KEY.replace("d64", "d48"), "forward"])
def test_what_cannot_be_chosen_is_left_out(shipped, key):
    good = {KEY.replace("causal", "full"): FORWARD[1]}
    bad = Tile(8, 8, 1) if key == KEY else FORWARD[0]
    assert f"{key}: left out, as {bad} is no candidate" in adopt_tuned.adopt("sm_75", good | {key: bad})
    assert configs.read_tiles(shipped) == good
    before = shipped.read_text()
    with pytest.raises(ValueError, match="no tile that is a candidate of sm_75"):
        adopt_tuned.adopt("sm_75", {key: bad})
    assert shipped.read_text() == before


def test_a_shipped_tile_that_left_the_table_goes(shipped):
    gone = {KEY: Tile(8, 8, 1)}
    configs.write_tiles(shipped, gone)
    kept = {KEY.replace("causal", "full"): FORWARD[0]}
    assert adopt_tuned.adopt("sm_75", kept) == [f"{KEY}: left out, as {gone[KEY]} is no candidate"]
    assert configs.read_tiles(shipped) == kept


def test_command(shipped, tmp_path, capsys):
    file = tmp_path / "Tesla_T4_triton3.6.0_restored.json"
    file.write_text(json.dumps({KEY: dataclasses.asdict(FORWARD[1])}))  # with registers, as it once was
    assert adopt_tuned.main([str(file)]) == 0
    assert f"{KEY}: {FORWARD[1]}; was {FORWARD[0]}\n" in capsys.readouterr().out
    before = shipped.read_text()
    assert '"registers"' not in before
    assert adopt_tuned.main([str(file), "--architecture", "sm_75"]) == 0
    assert "nothing to change" in capsys.readouterr().out
    for text in ("{", "[]", '{"a": 3}', '{"a": {"block_m": 3}}', "{}"):
        file.write_text(text)
        assert adopt_tuned.main([str(file)]) == 1
        assert file.name in capsys.readouterr().err
    assert shipped.read_text() == before

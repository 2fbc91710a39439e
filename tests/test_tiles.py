"""The tables: every tile computes the right thing, fits where it is chosen, and tuned ones take its place."""

import dataclasses
import json
import math

import pytest
import torch
from oracle import DEVICE, dense, inputs, lse_terms

from flashattn import configs, turing
from flashattn.configs import DEVICES, PASSES, TILES, Device, Tile
from flashattn.reference import dense_attention
from flashattn.testing import check, score_condition

HERE = configs.device_of(torch.device(DEVICE))


def every_tile():
    """(pass, dtype, head dim, tile): each once, and only what a kernel on this device can tell apart."""
    seen = {}
    for table in TILES.values():
        for (pass_, itemsize), by_head_dim in table.items():
            for head_dim, tiles in by_head_dim.items():
                for tile in tiles:
                    if HERE.capability >= 90 and (tile.k_ahead or tile.hold):
                        continue  # wrong there, and in no table that serves it: see Tile
                    if DEVICE == "cpu":  # the interpreter knows no warps, and of stages whether there are several
                        tile = dataclasses.replace(tile, num_warps=4, num_stages=min(tile.num_stages, 2))
                    tile = dataclasses.replace(tile, registers=255, stack_bytes=0)
                    needed = configs.smem_bytes(pass_, tile, head_dim, itemsize, HERE.capability)
                    if DEVICE == "cpu" or needed <= HERE.shared_bytes:
                        seen[pass_, itemsize, head_dim, tile] = None
    return list(seen)


def tile_id(value):
    if isinstance(value, Tile):
        flags = "r" * value.reload + "h" * value.hold + "s" * value.split + "a" * value.apart
        return f"{value.block_m}x{value.block_n}w{value.num_warps}s{value.num_stages}{flags}"
    return str(value)


@pytest.mark.parametrize("pass_, itemsize, head_dim, tile", every_tile(), ids=tile_id)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_tile(pass_, itemsize, head_dim, tile, causal):
    """Whole blocks, diagonal blocks and edges in one shape: a block and a half of each kind."""
    from flashattn.backward import backward, delta
    from flashattn.forward import forward

    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    seqlen_q, seqlen_k = tile.block_m * 3 // 2 + 1, tile.block_n * 5 // 2 + 1
    leaves = [x.requires_grad_() for x in inputs(1, 1, seqlen_q, seqlen_k, head_dim, dtype=dtype)]
    do = torch.randn_like(leaves[0])
    exact, baseline = (dense(leaves, causal, None, do, None, t) for t in (torch.float64, dtype))
    q, k, v = (x.detach() for x in leaves)
    options = {"causal": causal, "scale": head_dim**-0.5}
    condition = score_condition(q, k)
    if pass_ == "forward":
        o, lse_log2 = forward(q, k, v, **options, tile=tile)
        check("o", o, exact["o"], baseline["o"], condition=condition)
        lse, fp32 = lse_log2 * math.log(2), dense(leaves, causal, None, do, None, torch.float32)
        check("lse", lse, exact["lse"], fp32["lse"], terms=lse_terms(q, k, tile))
        return
    lse_log2 = (exact["lse"] / math.log(2)).float().detach()
    needs = (pass_ == "dq", pass_ == "dkdv", pass_ == "dkdv")
    tiles = {"dkdv_tile": tile, "dq_tile": tile}
    arguments = q, k, v, do, lse_log2, delta(exact["o"].to(dtype), do, None)
    grads = backward(*arguments, **options, **tiles, needs=needs)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if grad is not None:
            check(name, grad, exact[name], baseline[name], condition=condition)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_q_reaches_the_registers_unchanged(head_dim):
    """fp16's extremes and subnormals on a diagonal, against one unit vector as the only key: lse is the element."""
    from flashattn.forward import forward

    tile = next(tile for tile in TILES["sm_75"]["forward", 2][head_dim] if tile.q_in_registers)
    elements = torch.tensor([65504.0, -65504.0, 2.0**-24, -(2.0**-24), 3 * 2.0**-16, 1.0009765625], device=DEVICE)
    elements = elements.repeat(head_dim)[:head_dim].half()
    units = torch.eye(head_dim, device=DEVICE).half()[None, None]
    q = units * elements
    for i in (*range(6), head_dim - 1):
        key = units[:, :, i : i + 1]
        scale = 1.0 if abs(elements[i]) > 1 else 2.0**24  # lse has fp32's roundings of numbers up to 128
        _, lse_log2 = forward(q, key, key, causal=False, scale=scale, tile=tile)
        assert torch.allclose(lse_log2[0, 0, i] * math.log(2), elements[i].float() * scale, rtol=1e-5, atol=0)
        assert torch.equal(lse_log2[0, 0].nonzero().flatten().cpu(), torch.tensor([i]))


@pytest.mark.parametrize("distance", [14.0, 17.5, 19.0])
def test_one_key_far_above_thousands(distance):
    """What a shifted exponential, which is 0 from 2**-126 on, loses of a key, it loses of all of them."""
    from flashattn.forward import forward

    tile = next(tile for tile in TILES["sm_75"]["forward", 2][128] if tile.integer_p and not tile.k_ahead)
    q, k, v = inputs(1, 1, 3, 8193, 128)
    q[..., 0], k[:] = 1.0, 0.0
    k[:, :, 100, 0] = distance
    o, lse_log2 = forward(q, k, v, causal=False, scale=1.0, tile=tile)
    exact, lse = dense_attention(q, k, v, scale=1.0)
    check("o", o, exact, dense_attention(q, k, v, scale=1.0, dtype=q.dtype)[0])
    adding_up = 8193 / tile.block_n * torch.finfo(torch.float32).eps
    assert (lse_log2 * math.log(2) - lse).abs().max() < 8193 * 2.0**-29 + adding_up


@pytest.mark.parametrize("architecture", TILES)
@pytest.mark.parametrize("pass_", PASSES)
def test_at_least_three_candidates_fit(architecture, pass_):
    device = DEVICES[architecture]
    assert device.architecture == architecture
    for head_dim in (64, 128):
        tiles = configs.candidates(pass_, device, torch.float16, head_dim)
        assert len(set(tiles)) == len(tiles) >= 3


KIN = {"sm_100": Device("B200", 100, 232448), "sm_120": Device("RTX 5090", 120, 101376)}  # with others' tables


@pytest.mark.parametrize("device", [*DEVICES.values(), *KIN.values()], ids=[*DEVICES, *KIN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pass_", PASSES)
def test_some_tile_fits_for_every_head_dim(device, dtype, pass_):
    for head_dim in range(1, 257):
        tiles = configs.candidates(pass_, device, dtype, head_dim)
        assert tiles
        for bucket in (16, 1024, 32768):
            assert configs.default_tile(tiles, pass_, bucket) in tiles


def test_a_tile_that_does_not_fit_is_pruned():
    small = Device("small", 80, 60000)
    tiles = configs.candidates("forward", small, torch.float16, 128)
    assert tiles and set(tiles) < set(configs.candidates("forward", DEVICES["sm_80"], torch.float16, 128))
    assert all(configs.smem_bytes("forward", tile, 128, 2, 80) <= 60000 for tile in tiles)


def test_what_is_remembered_during_a_tuning_is_forgotten_after_it(tmp_path, monkeypatch):
    """The number by which interface.attention remembers tiles changes when the new ones are in force, not before."""
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    device, before, seen = Device("some GPU", 75, 65536), configs.tunings, []
    monkeypatch.setattr(configs, "write_tiles", lambda *args: seen.append(configs.tunings))
    configs.save_tuned(device, {})
    assert seen == [before] and configs.tunings == before + 1


def test_where_no_tile_fits_it_is_said(monkeypatch):
    monkeypatch.setattr(configs, "device_of", lambda _: Device("tiny", 86, 1000))
    monkeypatch.setattr(configs, "load_tuned", lambda _: {})
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="no tile of forward .* head_dim 64 fits the 1000 bytes .* of tiny"):
        configs.choose("forward", q, 100, True)


@pytest.mark.parametrize(
    "release, path",
    [("3.2.0", "stock"), ("3.3.0", "restored"), ("3.5.1.post22", "restored"), ("3.9.0", "restored")]
    + [("3.6.2", "scalar"), ("3.10.0+git1234", "scalar")],
)
def test_code_path_on_turing(release, path, monkeypatch):
    """A release of which nothing is known is left as it is; without tensor cores 16-bit elements take fp32's tiles."""
    monkeypatch.setattr(turing, "triton_version", lambda: release)
    assert DEVICES["sm_75"].code_path == path and DEVICES["sm_80"].code_path == "stock"
    table = TILES["sm_75"]["forward", 4 if path == "scalar" else 2][128]
    assert configs.candidates("forward", DEVICES["sm_75"], torch.float16, 128) == table


def test_shared_memory_by_hand():
    half = {"head_dim": 64, "itemsize": 2}
    # Q 128x64 and one of K and V 64x64.
    assert configs.smem_bytes("forward", Tile(128, 64, 4), **half, capability=75) == 2 * (128 * 64 + 64 * 64)
    # Q, and two buffers each of K and V where three stages are asked for before sm_90.
    assert configs.smem_bytes("forward", Tile(128, 64, 4, 3), **half, capability=80) == 2 * (128 * 64 + 4 * 64 * 64)
    # K, and then V, in padded rows on their way to registers; Q and dO that stream by are smaller.
    assert configs.smem_bytes("dkdv", Tile(16, 128, 8, hold=True), 128, 2, 75) == 2 * 128 * (128 + 8)
    # Head dims are padded: 40 as 64.
    assert configs.smem_bytes("dq", Tile(128, 64, 8), 40, 2, 75) == 2 * (2 * 128 * 64 + 2 * 64 * 64)


def test_head_dims_are_held_in_two_parts_where_that_is_less():
    known = {8: (16, 0), 24: (32, 0), 40: (32, 16), 56: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0)}
    known |= {64: (64, 0), 128: (128, 0), 129: (128, 16), 160: (128, 32), 192: (128, 64), 256: (128, 128)}
    assert {d: configs.head_parts(d) for d in known} == known
    for d in range(1, 257):
        main, tail = configs.head_parts(d)
        assert d <= main + tail <= configs.padded_head_dim(d) and main <= 128 and (main < d or not tail)


def test_default_follows_the_length():
    tiles = (Tile(128, 64, 4), Tile(64, 64, 4), Tile(32, 128, 4))
    assert configs.default_tile(tiles, "forward", 1024) == tiles[0]
    assert configs.default_tile(tiles, "forward", 64) == tiles[1]
    assert configs.default_tile(tiles, "forward", 16) == tiles[2]  # none is as short: the shortest
    assert configs.default_tile(tiles[::-1], "dkdv", 64) == tiles[1]  # its own block is of keys


def test_length_buckets():
    assert [configs.length_bucket(n) for n in (0, 1, 16, 17, 1024, 1025, 10**6)] == [16, 16, 16, 32, 1024, 2048, 32768]


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """A device with a cache folder and shipped files of its own, and nothing remembered."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(configs, "shipped_file", lambda architecture: tmp_path / "shipped" / f"{architecture}.json")
    device = dataclasses.replace(DEVICES["sm_86"], name="Some GPU (24 GB)")
    monkeypatch.setattr(configs, "device_of", lambda _: device)
    forget()
    yield device
    forget()


def forget():
    for cached in (configs.load_shipped, configs.load_tuned, configs._choose):
        cached.cache_clear()


def ship(pass_="forward", causal=True, **tiles):
    """Ship tiles for 16 bits and head dim 64, by length bucket: n1024=tile."""
    entries = {
        configs.tuned_key(pass_, DEVICES["sm_86"], torch.float16, 64, int(n[1:]), causal): tile
        for n, tile in tiles.items()
    }
    configs.write_tiles(configs.shipped_file("sm_86"), entries)
    forget()


def test_tuned_tiles_are_picked_up(tuned):
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    tiles = configs.candidates("forward", tuned, torch.float16, 64)
    assert configs.choose("forward", q, 900, True) == tiles[0]
    before = configs.tunings
    path = configs.save_tuned(tuned, {configs.tuned_key("forward", tuned, torch.float16, 64, 1024, True): tiles[2]})
    assert configs.tunings == before + 1
    assert path.name.startswith("Some_GPU_24_GB_triton") and path.name.endswith("_stock.json")
    assert configs.choose("forward", q, 900, True) == tiles[2]
    assert configs.choose("forward", q.bfloat16(), 1024, True) == tiles[2]
    assert configs.choose("forward", q, 1025, True) == tiles[2]  # the nearest that was tuned
    assert configs.choose("forward", q, 900, False) == tiles[0]
    configs.save_tuned(tuned, {configs.tuned_key("dq", tuned, torch.float16, 64, 1024, True): tiles[1]})
    assert configs.choose("forward", q, 900, True) == tiles[2]  # what was there stays


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', '{"a": {"block_m": 3}}'])
def test_a_broken_tuned_file_is_ignored_with_a_warning(tuned, text):
    configs.tuned_file(tuned).write_text(text)
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    with pytest.warns(UserWarning, match="tuned tiles in .* are ignored"):
        assert configs.choose("forward", q, 900, True) == configs.candidates("forward", tuned, torch.float16, 64)[0]


def test_a_tuned_tile_that_is_no_candidate_is_not_used(tuned):
    key = configs.tuned_key("forward", tuned, torch.float16, 64, 1024, True)
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    tiles = configs.candidates("forward", tuned, torch.float16, 64)
    ship(n1024=Tile(512, 512, 4), n4096=tiles[1])
    configs.tuned_file(tuned).write_text(json.dumps({key: dataclasses.asdict(Tile(512, 512, 4))}))
    assert configs.choose("forward", q, 900, True) == tiles[1]  # the nearest that is one
    ship(n1024=Tile(512, 512, 4))
    assert configs.choose("forward", q, 900, True) == tiles[0]


def test_order_of_preference(tuned):
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    table, shipped, own = configs.candidates("forward", tuned, torch.float16, 64)[:3]
    assert configs.choose("forward", q, 900, True) == table
    ship(n1024=shipped)
    assert configs.choose("forward", q, 900, True) == configs.choose("forward", q.bfloat16(), 900, True) == shipped
    assert configs.choose("forward", q, 900, False) == table
    assert configs.choose("forward", q.float(), 900, True) in configs.candidates("forward", tuned, torch.float32, 64)
    configs.save_tuned(tuned, {configs.tuned_key("forward", tuned, torch.float16, 64, 1024, True): own})
    assert configs.choose("forward", q, 900, True) == own
    ship(n2048=shipped)
    assert configs.choose("forward", q, 1025, True) == shipped  # another bucket
    assert configs.choose("forward", q, 513, True) == own


def test_the_interpreter_has_the_default(tuned, monkeypatch):
    monkeypatch.setattr(configs, "device_of", lambda _: configs.INTERPRETER)
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    tiles = TILES["sm_75"]["forward", 2][64]
    key = configs.tuned_key("forward", tuned, torch.float16, 64, 1024, True)
    configs.write_tiles(configs.shipped_file("sm_75"), {key: tiles[1]})
    configs.write_tiles(configs.tuned_file(configs.INTERPRETER), {key: tiles[1]})
    forget()
    assert configs.choose("forward", q, 1024, True) == tiles[0]
    assert configs.shipped_tile("forward", DEVICES["sm_75"], torch.float16, 64, 1024, True) == tiles[1]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(128, 1), (256, 1), (512, 1), (1024, 1), (2048, 2), (4096, 2), (10**6, 2)]  # 1024 is as near to both
    + [(64, 2), (16, 2)],  # where the nearest is too tall, the table's default
)
def test_a_length_that_was_not_tuned_has_the_nearest_tile(tuned, monkeypatch, length, expected):
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    tiles = Tile(128, 64, 4), Tile(128, 32, 4), Tile(64, 64, 4)
    monkeypatch.setattr(configs, "candidates", lambda *_: tiles)
    ship(n512=tiles[1], n2048=tiles[2])
    assert configs.choose("forward", q, length, True) == tiles[expected]
    assert configs.choose("forward", q, length, False) == configs.default_tile(tiles, "forward", length)
    ship(n16=tiles[1])
    assert configs.choose("forward", q, 16, True) == tiles[1]  # what was tuned for a length is used there


def test_a_new_register_count_voids_no_file(tuned):
    key = configs.tuned_key("forward", tuned, torch.float16, 64, 1024, True)
    best = configs.candidates("forward", tuned, torch.float16, 64)[1]
    entry = dataclasses.asdict(best) | {"registers": 99, "stack_bytes": 8}
    configs.tuned_file(tuned).write_text(json.dumps({key: entry}))
    assert configs.choose("forward", torch.empty(1, 1, 1, 64, dtype=torch.float16), 1024, True) == best


def test_files_are_read_once(tuned, monkeypatch):
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    tiles = configs.candidates("forward", tuned, torch.float16, 64)
    ship(n512=tiles[1])
    configs.write_tiles(
        configs.tuned_file(tuned), {configs.tuned_key("dq", tuned, torch.float16, 64, 512, True): tiles[1]}
    )
    read = []
    monkeypatch.setattr(
        configs, "read_tiles", lambda path, original=configs.read_tiles: read.append(path) or original(path)
    )
    assert configs.choose("forward", q, 512, True) == tiles[1]
    assert read == [configs.shipped_file("sm_86"), configs.tuned_file(tuned)]
    for forbidden in ("exists", "stat", "open", "read_text"):
        monkeypatch.setattr(type(read[0]), forbidden, None)
    for length in (500, 512, 4096):
        assert configs.choose("forward", q, length, True) == tiles[1]
    configs.choose("dkdv", q.float(), 512, False)
    assert len(read) == 2


def test_a_file_of_tiles_is_short_and_comes_back(tmp_path):
    tiles = {
        "dq 16bit d64 n128 full": Tile(64, 32, 4, 2, registers=99),
        "dq 16bit d64 n64 full": Tile(8, 16, 1, reload=True),
    }
    configs.write_tiles(tmp_path / "a" / "b.json", tiles)
    assert (tmp_path / "a" / "b.json").read_text().splitlines() == [
        "{",
        '  "dq 16bit d64 n64 full": {"block_m": 8, "block_n": 16, "num_warps": 1, "reload": true},',
        '  "dq 16bit d64 n128 full": {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}',
        "}",
    ]
    assert configs.read_tiles(tmp_path / "a" / "b.json") == tiles
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "b.json"]

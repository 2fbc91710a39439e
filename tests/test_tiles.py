"""The tables: every tile computes the right thing, fits where it is chosen, and tuned ones take its place."""

import dataclasses
import json
import math

import pytest
import torch
from oracle import DEVICE, dense, inputs, score_condition

from flashattn import configs, turing
from flashattn.configs import PASSES, TILES, Device, Tile
from flashattn.testing import check

DEVICES = {
    "sm_75": Device("T4", 75, 65536),
    "sm_80": Device("A100", 80, 166912),
    "sm_86": Device("L4", 89, 101376),
    "sm_90": Device("H100", 90, 232448),
}
HERE = configs.device_of(torch.device(DEVICE))


def every_tile():
    """(pass, dtype, head dim, tile): each once, and only what a kernel on this device can tell apart."""
    seen = {}
    for table in TILES.values():
        for (pass_, itemsize), by_head_dim in table.items():
            for head_dim, tiles in by_head_dim.items():
                for tile in tiles:
                    if DEVICE == "cpu":  # the interpreter knows neither warps nor stages
                        tile = dataclasses.replace(tile, num_warps=4, num_stages=1)
                    tile = dataclasses.replace(tile, registers=255, stack_bytes=0)
                    needed = configs.smem_bytes(pass_, tile, head_dim, itemsize, HERE.capability)
                    if DEVICE == "cpu" or needed <= HERE.shared_bytes:
                        seen[pass_, itemsize, head_dim, tile] = None
    return list(seen)


def tile_id(value):
    if isinstance(value, Tile):
        return f"{value.block_m}x{value.block_n}w{value.num_warps}s{value.num_stages}" + "r" * value.reload
    return str(value)


@pytest.mark.parametrize("pass_, itemsize, head_dim, tile", every_tile(), ids=tile_id)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_tile(pass_, itemsize, head_dim, tile, causal):
    """Whole blocks, diagonal blocks and edges in one shape: a block and a half of each kind."""
    from flashattn.backward import backward
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
        check("lse", lse_log2 * math.log(2), exact["lse"], dense(leaves, causal, None, do, None, torch.float32)["lse"])
        return
    lse_log2 = (exact["lse"] / math.log(2)).float().detach()
    needs = (pass_ == "dq", pass_ == "dkdv", pass_ == "dkdv")
    tiles = {"dkdv_tile": tile, "dq_tile": tile}
    grads = backward(q, k, v, exact["o"].to(dtype), lse_log2, do, None, **options, **tiles, needs=needs)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if grad is not None:
            check(name, grad, exact[name], baseline[name], condition=condition)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_q_reaches_the_registers_unchanged(head_dim):
    """fp16's extremes and subnormals on a diagonal, against one unit vector as the only key: lse is the element."""
    from flashattn.forward import forward

    tile = next(tile for tile in TILES["sm_75"]["forward", 2][head_dim] if tile.q_in_registers)
    elements = torch.tensor([65504.0, -65504.0, 2.0**-24, -(2.0**-24), 3 * 2.0**-16, 1.0009765625], device=DEVICE)
    elements = elements.repeat(head_dim)[:head_dim].half()
    units = torch.eye(head_dim, device=DEVICE).half()[None, None]
    q = units * elements
    for i in (*range(6), head_dim - 1):
        _, lse_log2 = forward(q, units[:, :, i : i + 1], units[:, :, i : i + 1], causal=False, scale=1.0, tile=tile)
        assert torch.allclose(lse_log2[0, 0, i] * math.log(2), elements[i].float(), rtol=1e-6, atol=0)
        assert torch.equal(lse_log2[0, 0].nonzero().flatten().cpu(), torch.tensor([i]))


@pytest.mark.parametrize("architecture", TILES)
@pytest.mark.parametrize("pass_", PASSES)
def test_at_least_three_candidates_fit(architecture, pass_):
    device = DEVICES[architecture]
    assert device.architecture == architecture
    for head_dim in (64, 128):
        tiles = configs.candidates(pass_, device, torch.float16, head_dim)
        assert len(set(tiles)) == len(tiles) >= 3


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
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
    # Head dims are padded: 40 as 64.
    assert configs.smem_bytes("dq", Tile(128, 64, 8), 40, 2, 75) == 2 * (2 * 128 * 64 + 2 * 64 * 64)


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
    """A device with a cache folder of its own, and nothing remembered."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    device = dataclasses.replace(DEVICES["sm_86"], name="Some GPU (24 GB)")
    monkeypatch.setattr(configs, "device_of", lambda _: device)
    yield device
    configs.load_tuned.cache_clear()
    configs._choose.cache_clear()


def test_tuned_tiles_are_picked_up(tuned):
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    tiles = configs.candidates("forward", tuned, torch.float16, 64)
    assert configs.choose("forward", q, 900, True) == tiles[0]
    path = configs.save_tuned(tuned, {configs.tuned_key("forward", torch.float16, 64, 1024, True): tiles[2]})
    assert path.name.startswith("Some_GPU_24_GB_triton") and path.name.endswith("_stock.json")
    assert configs.choose("forward", q, 900, True) == tiles[2]
    assert configs.choose("forward", q.bfloat16(), 1024, True) == tiles[2]
    assert configs.choose("forward", q, 1025, True) == tiles[0]
    assert configs.choose("forward", q, 900, False) == tiles[0]
    configs.save_tuned(tuned, {configs.tuned_key("dq", torch.float16, 64, 1024, True): tiles[1]})
    assert configs.choose("forward", q, 900, True) == tiles[2]  # what was there stays


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', '{"a": {"block_m": 3}}'])
def test_a_broken_tuned_file_is_ignored_with_a_warning(tuned, text):
    configs.tuned_file(tuned).write_text(text)
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    with pytest.warns(UserWarning, match="tuned tiles in .* are ignored"):
        assert configs.choose("forward", q, 900, True) == configs.candidates("forward", tuned, torch.float16, 64)[0]


def test_a_tuned_tile_that_is_no_candidate_is_not_used(tuned):
    key = configs.tuned_key("forward", torch.float16, 64, 1024, True)
    configs.tuned_file(tuned).write_text(json.dumps({key: dataclasses.asdict(Tile(512, 512, 4))}))
    q = torch.empty(1, 1, 1, 64, dtype=torch.float16)
    assert configs.choose("forward", q, 900, True) == configs.candidates("forward", tuned, torch.float16, 64)[0]

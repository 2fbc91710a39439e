"""Tiles: which there are for an architecture, which of them fit a device, and which one a call takes.

Pure Python, no Triton. A table's entry is keyed by pass, bytes an element and the largest head dim that it is for, as
tiles hold it (head_parts), and lists the candidates; the first is the default for long sequences. `scripts/tune.py`
measures the candidates on the machine at hand, for each length bucket and mask, and leaves the fastest in a file in the
user's cache folder, which `choose` prefers from then on. Next come the files in tuned/, one for each architecture that
was measured, and last the default.
"""

import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType

import torch

from . import turing

PASSES = ("forward", "dkdv", "dq")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


FUSED = {"enable_fp_fusion": True}  # products and sums in one FFMA: said, since Triton 3.10 is to change the default


@dataclass(frozen=True)
class Tile:
    """Rows of a query block and of a key block, warps a program, and stages of the load pipeline (several: PIPELINED).

    reload (dK/dV only) loads K and V anew for each query block, where shared memory cannot hold both.
    Forward only, and for sm_75, where nothing loads behind a kernel's back: q_in_registers keeps Q there and not in
    shared memory, whose reads are the bottleneck; k_transposed loads K as the dot takes it; k_ahead and v_ahead load
    the next block's K and V into registers beside this block; integer_p (fp16) computes P shifted, for
    primitives.to_half to round.
    hold (dK/dV and dQ, 16 bits, on sm_75) keeps the two tiles of the program's own rows in registers, and loads each
    pair that streams by a block ahead: Turing reads shared memory at half the rate of later chips, and Triton pipelines
    nothing there. It wants 16 own rows a warp or more, and as many in all as the head dim: warps are else laid out
    across the columns. What loads ahead is wrong on sm_90: Triton fences tiles off from products after the barrier.
    apart (dK/dV) makes dK and dV in launches of their own: of wide heads, registers do not hold both.
    split holds a head dim such as 80 in two tiles of powers of two of columns, 64 and 16 (head_parts), in place of one
    of 128. max_registers is what a thread may have: so that one more program fits an SM, or since ptxas then makes
    faster code; told of 255, all that there are, it does not give up and take 64, and memory for the rest.
    registers and stack_bytes (spills) a thread are the most that ptxas takes for it on sm_75 under Triton 3.2.0,
    3.6.0 and 3.9.0; tests hold it to them. They are facts about a tile, and tiles compare without them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    reload: bool = False
    q_in_registers: bool = False
    k_transposed: bool = False
    k_ahead: bool = False
    v_ahead: bool = False
    integer_p: bool = False
    hold: bool = False
    apart: bool = False
    split: bool = False
    max_registers: int | None = None
    registers: int = field(default=255, compare=False)
    stack_bytes: int = field(default=0, compare=False)

    @property
    def options(self) -> dict[str, int]:
        """What a launch with this tile tells the compiler."""
        limit = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages} | limit | FUSED

    @property
    def choices(self) -> dict[str, int | bool]:
        """The fields that tell it from another tile, without those at their defaults."""
        chosen = [x for x in fields(self) if x.compare and getattr(self, x.name) != x.default]
        return {x.name: getattr(self, x.name) for x in chosen}

    def __str__(self) -> str:
        text = f"{self.block_m} x {self.block_n}, {self.num_warps} warps, {self.num_stages} stages"
        shape = "block_m", "block_n", "num_warps", "num_stages"
        return ", ".join([text, *(f"{name}={value}" for name, value in self.choices.items() if name not in shape)])


def padded_head_dim(head_dim: int) -> int:
    """The power of two, 16 at least, that a kernel's tiles have for a head dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def head_parts(head_dim: int) -> tuple[int, int]:
    """Columns of the two tiles that hold a head dim: powers of two, from 16 to 128.

    The second is 0 where it would save nothing; over 128 there are always two.
    """
    whole = padded_head_dim(head_dim)
    main = min(128, whole // 2)
    tail = padded_head_dim(max(head_dim - main, 1))
    return (main, tail) if whole > 128 or main + tail < whole else (whole, 0)


def tile_columns(tile: Tile, head_dim: int) -> tuple[int, int]:
    """Columns of the one tile, or of the two, that hold a head dim in a kernel."""
    return head_parts(head_dim) if tile.split else (padded_head_dim(head_dim), 0)


def tile_constants(tile: Tile, head_dim: int, stride_unit: int, causal: bool) -> dict[str, int | bool]:
    """The constexpr arguments that every kernel with a tile takes."""
    main, tail = tile_columns(tile, head_dim)
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": main,
        "TAIL_D": tail,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STRIDE_UNIT": stride_unit,
        "CAUSAL": causal,
        "PIPELINED": tile.num_stages > 1,
    }


_HALF, _FLOAT = 2, 4  # bytes an element: fp16 and bf16 share their tiles

# Levers, see Tile.
_K = {"k_transposed": True}
_KQ = {**_K, "q_in_registers": True, "integer_p": True}
_K_AHEAD = {**_KQ, "k_ahead": True}
_KV_AHEAD = {**_K_AHEAD, "v_ahead": True}

# {(pass, bytes an element): {largest head dim: candidates, the default for long sequences first}}
Table = Mapping[tuple[str, int], Mapping[int, tuple[Tile, ...]]]


def _split(tiles: dict[int, tuple[Tile, ...]]) -> dict[int, tuple[Tile, ...]]:
    """With the head dims that are cheaper in two parts, in the tiles of the next larger one: a guess."""
    parts = {48: 64, 80: 128, 96: 128, 160: 256, 192: 256}
    return tiles | {d: tuple(replace(tile, split=True) for tile in tiles[of]) for d, of in parts.items()}


def _frozen(table: Mapping) -> Mapping:
    return MappingProxyType({key: _frozen(x) if isinstance(x, Mapping) else x for key, x in table.items()})


# float32 runs on the FMA units of every architecture; so do 16-bit elements where the tensor cores are missing.
_FLOAT_TILES: Table = {
    ("forward", _FLOAT): {
        32: (Tile(64, 32, 4, registers=96), Tile(32, 32, 4, registers=108)),
        64: (
            Tile(64, 32, 8, registers=108),
            Tile(64, 64, 8, registers=255, stack_bytes=16),
            Tile(32, 32, 4, registers=127, stack_bytes=8),
        ),
        128: (
            Tile(32, 32, 8, registers=254),
            Tile(32, 16, 8, registers=80, stack_bytes=8),
            Tile(32, 16, 4, registers=128, stack_bytes=16),
            Tile(16, 16, 4, registers=96, stack_bytes=8),
        ),
        256: (Tile(32, 16, 4, registers=255), Tile(16, 16, 4, registers=168, stack_bytes=24)),
    },
    ("dkdv", _FLOAT): {
        32: (Tile(32, 32, 4, registers=168),),
        64: (
            Tile(32, 32, 8, registers=118),
            Tile(16, 32, 8, registers=80, stack_bytes=16),
            Tile(16, 32, 4, registers=142, stack_bytes=8),
        ),
        128: (
            Tile(16, 32, 8, registers=111),
            Tile(16, 16, 8, registers=80, stack_bytes=8),
            Tile(16, 16, 4, registers=128, stack_bytes=16),
        ),
        256: (Tile(16, 16, 8, reload=True, registers=251, stack_bytes=16),),
    },
    ("dq", _FLOAT): {
        32: (Tile(32, 32, 4, registers=222),),
        64: (
            Tile(32, 32, 8, registers=222),
            Tile(32, 16, 4, registers=228),
            Tile(16, 16, 4, registers=255, stack_bytes=8),
        ),
        128: (
            Tile(16, 16, 8, registers=255),
            Tile(32, 16, 8, registers=255, stack_bytes=184),
            Tile(16, 16, 4, registers=255, stack_bytes=216),
        ),
        256: (Tile(16, 16, 8, registers=255, stack_bytes=176),),
    },
}

TILES: Mapping[str, Table] = _frozen(
    {
        "sm_75": {
            ("forward", _HALF): {
                32: (
                    Tile(128, 64, 4, **_KV_AHEAD, registers=234),
                    Tile(128, 128, 4, **_KQ, registers=255, stack_bytes=72),
                    Tile(64, 64, 4, registers=148),
                ),
                48: (
                    Tile(128, 64, 4, **_KV_AHEAD, split=True, registers=255),
                    Tile(128, 32, 4, **_KV_AHEAD, split=True, registers=212),
                    Tile(64, 64, 4, **_K, split=True, registers=178, stack_bytes=8),
                ),
                64: (
                    Tile(128, 64, 4, **_KV_AHEAD, registers=255, stack_bytes=32),
                    Tile(128, 32, 4, **_KV_AHEAD, max_registers=168, registers=168, stack_bytes=40),
                    Tile(256, 64, 8, **_KV_AHEAD, registers=255),
                    Tile(64, 64, 4, **_K, registers=178, stack_bytes=8),
                ),
                80: (
                    Tile(128, 32, 4, **_KV_AHEAD, split=True, registers=255),
                    Tile(128, 64, 4, **_KV_AHEAD, split=True, registers=255, stack_bytes=88),
                    Tile(64, 32, 4, **_K, split=True, registers=168, stack_bytes=8),
                ),
                96: (
                    Tile(128, 32, 4, **_KV_AHEAD, split=True, registers=255, stack_bytes=88),
                    Tile(128, 64, 8, **_KV_AHEAD, split=True, registers=248),
                    Tile(64, 32, 4, **_K, split=True, registers=198),
                ),
                128: (
                    Tile(128, 64, 8, **_KV_AHEAD, registers=255),
                    Tile(128, 16, 4, **_KQ, registers=255, stack_bytes=16),
                    Tile(256, 32, 8, **_KQ, registers=255, stack_bytes=296),
                    Tile(64, 32, 4, **_K, registers=238),
                ),
                160: (
                    Tile(128, 64, 8, **_KQ, split=True, registers=255, stack_bytes=88),
                    Tile(128, 32, 8, **_KQ, split=True, registers=255),
                    Tile(64, 32, 4, **_K, split=True, registers=255),
                ),
                192: (
                    Tile(128, 64, 8, **_KQ, split=True, registers=255, stack_bytes=112),
                    Tile(128, 32, 8, **_KQ, split=True, registers=255, stack_bytes=96),
                    Tile(64, 32, 4, **_K, split=True, registers=255),
                ),
                256: (
                    Tile(128, 16, 8, **_KV_AHEAD, split=True, registers=255, stack_bytes=88),
                    Tile(128, 32, 8, **_KQ, split=True, registers=255, stack_bytes=48),
                    Tile(64, 32, 4, **_K, split=True, registers=255, stack_bytes=96),
                ),
            },
            ("dkdv", _HALF): {
                32: (
                    Tile(32, 128, 4, hold=True, registers=255, stack_bytes=16),
                    Tile(32, 64, 4, hold=True, registers=233, stack_bytes=16),
                ),
                48: (
                    Tile(16, 128, 4, hold=True, split=True, registers=255, stack_bytes=48),
                    Tile(32, 64, 4, hold=True, split=True, registers=255, stack_bytes=48),
                ),
                64: (
                    Tile(16, 128, 4, hold=True, registers=255, stack_bytes=136),
                    Tile(32, 64, 4, hold=True, registers=255, stack_bytes=16),
                    Tile(32, 128, 8, hold=True, registers=255, stack_bytes=40),
                ),
                80: (
                    Tile(32, 64, 4, hold=True, split=True, registers=255, stack_bytes=64),
                    Tile(32, 128, 8, hold=True, split=True, registers=255, stack_bytes=72),
                    Tile(16, 64, 4, hold=True, split=True, registers=255, stack_bytes=8),
                ),
                96: (
                    Tile(32, 128, 8, hold=True, split=True, registers=255, stack_bytes=168),
                    Tile(16, 64, 4, hold=True, split=True, registers=255, stack_bytes=32),
                ),
                128: (
                    Tile(16, 128, 8, hold=True, registers=255, stack_bytes=184),
                    Tile(64, 32, 4, registers=255, stack_bytes=16),
                    Tile(32, 32, 4, registers=198, stack_bytes=32),
                ),
                160: (
                    Tile(16, 128, 8, hold=True, apart=True, split=True, registers=255, stack_bytes=184),
                    Tile(16, 64, 4, split=True, registers=255, stack_bytes=112),
                    Tile(16, 32, 4, split=True, registers=255, stack_bytes=112),
                ),
                192: (
                    Tile(16, 128, 8, hold=True, apart=True, split=True, registers=255, stack_bytes=456),
                    Tile(16, 32, 4, split=True, registers=255, stack_bytes=16),
                    Tile(16, 16, 4, split=True, registers=248, stack_bytes=16),
                ),
                256: (
                    Tile(
                        16, 128, 8, hold=True, apart=True, split=True, max_registers=255, registers=255, stack_bytes=816
                    ),
                    Tile(16, 32, 4, split=True, registers=255, stack_bytes=96),
                    Tile(16, 16, 4, registers=186, stack_bytes=24),
                ),
            },
            ("dq", _HALF): {
                32: (Tile(128, 32, 4, hold=True, registers=168), Tile(64, 64, 4, hold=True, registers=158)),
                48: (
                    Tile(128, 32, 4, hold=True, split=True, registers=255, stack_bytes=8),
                    Tile(64, 32, 4, hold=True, split=True, registers=168),
                ),
                64: (
                    Tile(128, 32, 4, hold=True, registers=255, stack_bytes=24),
                    Tile(128, 64, 8, hold=True, registers=252),
                    Tile(64, 32, 4, hold=True, registers=182),
                ),
                80: (
                    Tile(128, 16, 4, hold=True, split=True, registers=255, stack_bytes=64),
                    Tile(128, 64, 8, hold=True, split=True, registers=255, stack_bytes=48),
                    Tile(64, 32, 4, hold=True, split=True, registers=255),
                ),
                96: (
                    Tile(128, 64, 8, hold=True, split=True, registers=255, stack_bytes=40),
                    Tile(64, 32, 4, hold=True, split=True, registers=255, stack_bytes=8),
                ),
                128: (
                    Tile(128, 32, 8, hold=True, registers=255, stack_bytes=24),
                    Tile(32, 64, 4, registers=235),
                    Tile(32, 32, 4, registers=209, stack_bytes=8),
                ),
                160: (
                    Tile(128, 16, 8, hold=True, split=True, registers=255, stack_bytes=128),
                    Tile(64, 16, 4, hold=True, split=True, registers=255, stack_bytes=56),
                    Tile(32, 32, 4, split=True, registers=255, stack_bytes=16),
                ),
                192: (
                    Tile(128, 16, 8, hold=True, split=True, registers=255, stack_bytes=176),
                    Tile(64, 16, 4, split=True, registers=255, stack_bytes=16),
                    Tile(32, 32, 4, split=True, registers=255, stack_bytes=24),
                ),
                256: (
                    Tile(128, 16, 8, hold=True, split=True, registers=255, stack_bytes=488),
                    Tile(32, 32, 4, split=True, registers=255, stack_bytes=16),
                ),
            },
            **_FLOAT_TILES,
        },
        "sm_80": {
            ("forward", _HALF): _split(
                {
                    32: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
                    64: (Tile(128, 64, 4, 3), Tile(128, 128, 8, 2), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3)),
                    128: (Tile(128, 64, 8, 2), Tile(128, 32, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3)),
                    256: (Tile(64, 32, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 4, 2)),
                }
            ),
            ("dkdv", _HALF): _split(
                {
                    32: (Tile(64, 64, 4, 2), Tile(64, 128, 4, 2)),
                    64: (Tile(64, 128, 8, 2), Tile(32, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 4, 2)),
                    128: (Tile(64, 64, 8, 2), Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
                    256: (Tile(32, 32, 8, 1), Tile(16, 64, 8, 2), Tile(16, 32, 4, 2)),
                }
            ),
            ("dq", _HALF): _split(
                {
                    32: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
                    64: (Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
                    128: (Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
                    256: (Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
                }
            ),
            **_FLOAT_TILES,
        },
        "sm_86": {
            ("forward", _HALF): _split(
                {
                    32: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
                    64: (Tile(128, 64, 4, 2), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3)),
                    128: (Tile(128, 32, 4, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
                    256: (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
                }
            ),
            ("dkdv", _HALF): _split(
                {
                    32: (Tile(64, 64, 4, 2), Tile(64, 128, 4, 2)),
                    64: (Tile(32, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 4, 2)),
                    128: (Tile(32, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 128, 8, 2)),
                    256: (Tile(32, 32, 8, 1), Tile(16, 32, 4, 2)),
                }
            ),
            ("dq", _HALF): _split(
                {
                    32: (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
                    64: (Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
                    128: (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
                    256: (Tile(32, 32, 8, 2), Tile(32, 16, 4, 2)),
                }
            ),
            **_FLOAT_TILES,
        },
        "sm_90": {
            ("forward", _HALF): {
                32: (Tile(64, 64, 4, 3), Tile(128, 128, 4, 2)),
                48: (Tile(128, 64, 8, 3, split=True), Tile(64, 64, 4, 3, split=True), Tile(64, 64, 4, 3)),
                64: (
                    Tile(64, 64, 4, 3),
                    Tile(64, 64, 4, 2, max_registers=96),
                    Tile(64, 128, 4, 2, max_registers=168),
                ),
                80: (Tile(128, 64, 8, 3, split=True), Tile(64, 64, 4, 2, split=True), Tile(64, 64, 4, 3, split=True)),
                96: (Tile(64, 64, 4, 2, split=True), Tile(64, 64, 4, 3, split=True), Tile(128, 64, 4, 2, split=True)),
                128: (Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 32, 4, 3)),
                160: (Tile(128, 64, 8, 3, split=True), Tile(64, 64, 4, 2, split=True)),
                192: (Tile(128, 64, 8, 3, split=True), Tile(64, 64, 4, 3, split=True)),
                256: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
            },
            ("dkdv", _HALF): {
                32: (Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
                48: (Tile(32, 128, 4, 3, split=True), Tile(64, 64, 4, 3, split=True), Tile(64, 64, 4, 3)),
                64: (
                    Tile(64, 64, 4, 3),
                    Tile(32, 64, 4, 3, max_registers=168),
                    Tile(32, 128, 8, 3, max_registers=128),
                ),
                80: (Tile(64, 64, 4, 3, split=True), Tile(64, 64, 4, 2, split=True), Tile(32, 64, 4, 2, split=True)),
                96: (Tile(64, 64, 4, 3, split=True), Tile(64, 64, 4, 2, split=True), Tile(32, 64, 4, 2, split=True)),
                128: (Tile(64, 128, 8, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 2)),
                160: (Tile(32, 128, 8, 2, split=True), Tile(32, 64, 4, 2, split=True)),
                192: (Tile(64, 128, 8, 2, split=True), Tile(32, 128, 8, 2, split=True), Tile(64, 64, 8, 2, split=True)),
                256: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2, split=True), Tile(32, 64, 8, 2), Tile(32, 64, 4, 1)),
            },
            ("dq", _HALF): {
                32: (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
                48: (Tile(64, 64, 4, 3, split=True), Tile(128, 64, 8, 3, split=True), Tile(64, 64, 4, 3)),
                64: (
                    Tile(64, 64, 4, 2, max_registers=128),
                    Tile(64, 32, 4, 3, max_registers=96),
                    Tile(128, 64, 8, 3),
                ),
                80: (Tile(64, 64, 4, 3, split=True), Tile(64, 32, 4, 3, split=True), Tile(64, 64, 4, 2, split=True)),
                96: (Tile(64, 64, 4, 2, split=True), Tile(64, 64, 4, 3, split=True), Tile(64, 32, 4, 3, split=True)),
                128: (
                    Tile(128, 64, 8, 3),
                    Tile(128, 32, 8, 3, max_registers=128),
                    Tile(64, 32, 4, 2),
                    Tile(64, 64, 4, 2),
                ),
                160: (Tile(128, 64, 8, 3, split=True), Tile(64, 32, 4, 3, split=True)),
                192: (Tile(64, 64, 4, 3, split=True), Tile(128, 64, 8, 2, split=True), Tile(64, 32, 4, 3, split=True)),
                256: (Tile(64, 64, 4, 2, split=True), Tile(128, 32, 8, 2), Tile(64, 64, 8, 1), Tile(64, 32, 4, 2)),
            },
            **_FLOAT_TILES,
        },
    }
)


def smem_bytes(pass_: str, tile: Tile, head_dim: int, itemsize: int, capability: int) -> int:
    """Shared memory that a kernel takes at most, in bytes.

    With m and n the block sizes, d the columns that hold the head dim, in one tile or two, c those of the first, and b
    the buffers that the load pipeline holds of each tile that streams by (num_stages; one less before sm_90; one, and
    no pipeline, on sm_75), in elements:

        forward  m*d [Q] + b * 2*n*d [K, V]           unpipelined: m*d + n*d, K being dead when V comes
        dkdv     2*n*d [K, V] + b * 2*m*d [Q, dO]     reload: n*d [K or V] + 2*m*d
        dq       2*m*d [Q, dO] + b * 2*n*d [K, V]

    and m*n [P or dS] more where the output's tile is wider than tall, c > m (c > n for dkdv): its warps are then laid
    out side by side, and P crosses between them. float32 runs on the FMA units, where P always crosses; on sm_100
    forward's P may too.
    A forward tile with Q in registers has it pass m*16 + 16*d at a time before the loop, K and V in it, together only
    with v_ahead, and after it c + 8 for each of m rows, or of 16 a warp, to turn the output round for its store.
    Unpipelined dq, and reload, let it take V's place if it fits there. dkdv may take m*n more to turn P round, or
    from Triton 3.3 on m*d in its place for a second copy of Q or dO, and 8*m*b bytes for lse and delta, but for 16
    bits on sm_75; forward 8*m bytes, in float32 or on sm_90, for maxima and sums, and 24*m on sm_100. There, where
    products take more copies, dq has m*n and n*d more, dkdv twice m*n and m*d, and both 16*m bytes.

    With hold, shared memory passes the own tiles on to registers, one by one and in rows padded by 8, and the output
    back; in the loop it has the streamed pair, and the second copy.
    """
    m, n, columns = tile.block_m, tile.block_n, tile_columns(tile, head_dim)
    d, c = sum(columns), columns[0]
    pipelined = capability >= 80 and tile.num_stages > 1
    buffers = tile.num_stages - (capability < 90) if pipelined else 1
    own, other = (n * d, m * d) if pass_ == "dkdv" else (m * d, n * d)  # a tile that is kept, one that streams by
    blackwell = 100 <= capability < 120
    crossing = m * n if own < d * c or itemsize == 4 or (blackwell and pass_ == "forward") else 0
    if pass_ == "forward" and tile.q_in_registers:
        return max((1 + tile.v_ahead) * other, min(m, 16 * tile.num_warps) * (c + 8)) * itemsize
    if tile.hold:
        return max(own // d * (c + 8), 3 * other) * itemsize
    if pass_ == "forward":
        elements = own + (2 * buffers if pipelined else 1 + tile.v_ahead) * other + crossing
        return elements * itemsize + (24 * m if blackwell else 8 * m if capability >= 90 or itemsize == 4 else 0)
    copies = (other + m * n) * itemsize * (2 if pass_ == "dkdv" else 1) + 16 * m if blackwell else 0
    if pass_ == "dq":
        streamed = 2 * buffers * other
        return copies + (2 * own + (streamed + crossing if pipelined else other + max(other, crossing))) * itemsize
    kept = max(own, crossing) if tile.reload else 2 * own + max(crossing + m * n, other)
    statistics = 0 if itemsize == _HALF and capability < 80 else 8 * m * buffers
    return (kept + 2 * buffers * other) * itemsize + statistics + copies


@dataclass(frozen=True)
class Device:
    """What of a GPU decides its tiles; shared_bytes is what one program may ask for."""

    name: str
    capability: int
    shared_bytes: int

    @property
    def architecture(self) -> str:
        """The table that serves it: its own, or that of its nearest kin."""
        if self.capability < 80:
            return "sm_75"
        if self.capability in (80, 87):
            return "sm_80"
        return "sm_90" if 90 <= self.capability < 120 else "sm_86"  # from 120 on: consumer chips, 99 KB as sm_86

    @property
    def code_path(self) -> str:
        """How dots of 16-bit elements compile: "stock" or "restored" on tensor cores, or "scalar" (turing.py)."""
        return turing.code_path(self.capability)


# What the tables are made for, by architecture.
DEVICES = {
    "sm_75": Device("T4", 75, 65536),
    "sm_80": Device("A100", 80, 166912),
    "sm_86": Device("L4", 89, 101376),
    "sm_90": Device("H100", 90, 232448),
}
INTERPRETER = Device("interpreter", 75, 65536)  # a laptop runs the T4's tiles


@functools.cache
def device_of(device: torch.device) -> Device:
    """The facts of a torch device; a CPU stands for Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    found = Device(properties.name, capability, properties.shared_memory_per_block_optin)
    if capability == 75 and found.code_path == "scalar":
        turing.warn_scalar(found.name)
    return found


LENGTH_BUCKETS = tuple(2**i for i in range(4, 16))  # 16 to 32768


def length_bucket(length: int) -> int:
    """The first of LENGTH_BUCKETS that is no shorter than a length, else the last."""
    return min(max(16, 1 << (length - 1).bit_length()), LENGTH_BUCKETS[-1]) if length else 16


def head_dim_bucket(architecture: str, pass_: str, itemsize: int, head_dim: int) -> int:
    """The table's key for a head dim."""
    held = sum(head_parts(head_dim))
    return min(key for key in TILES[architecture][pass_, itemsize] if key >= held)


def table_entry(architecture: str, pass_: str, itemsize: int, head_dim: int) -> tuple[Tile, ...]:
    """The shipped tiles for a head dim, the default for long sequences first."""
    return TILES[architecture][pass_, itemsize][head_dim_bucket(architecture, pass_, itemsize, head_dim)]


def candidates(pass_: str, device: Device, dtype: torch.dtype, head_dim: int) -> tuple[Tile, ...]:
    """The shipped tiles of a pass that fit the device's shared memory, in the table's order."""
    scalar = dtype.itemsize == _HALF and device is not INTERPRETER and device.code_path == "scalar"
    itemsize = _FLOAT if scalar else dtype.itemsize  # without tensor cores 16-bit tiles are laid out as fp32 ones
    tiles = table_entry(device.architecture, pass_, itemsize, head_dim)
    return tuple(
        tile for tile in tiles if smem_bytes(pass_, tile, head_dim, itemsize, device.capability) <= device.shared_bytes
    )


def default_tile(tiles: tuple[Tile, ...], pass_: str, bucket: int) -> Tile:
    """The first tile whose own block (keys for dkdv, else queries) is no longer than the bucket, else the shortest."""

    def own_rows(tile: Tile) -> int:
        return tile.block_n if pass_ == "dkdv" else tile.block_m

    return next((tile for tile in tiles if own_rows(tile) <= bucket), min(tiles, key=own_rows))


def tile_of(
    tuned: Mapping[str, Tile], pass_: str, device: Device, dtype: torch.dtype, head_dim: int, bucket: int, causal: bool
) -> Tile:
    """The tile that was tuned for the bucket; else default_tile().

    A bucket that was not tuned has the tile of the nearest one that was, where its own block is no longer than the
    bucket. The interpreter always has the default.
    """
    tiles = candidates(pass_, device, dtype, head_dim)
    if device is not INTERPRETER:
        for n in sorted(LENGTH_BUCKETS, key=lambda n: max(n, bucket) // min(n, bucket)):  # of two as near the shorter
            tile = tuned.get(tuned_key(pass_, device, dtype, head_dim, n, causal))
            if tile in tiles:
                return tile if n == bucket else default_tile((tile, *tiles), pass_, bucket)
    return default_tile(tiles, pass_, bucket)


def shipped_tile(pass_: str, device: Device, dtype: torch.dtype, head_dim: int, bucket: int, causal: bool) -> Tile:
    """The tile where none was tuned on this machine: by the package's tuned/, else the table's default."""
    return tile_of(load_shipped(device.architecture), pass_, device, dtype, head_dim, bucket, causal)


def choose(pass_: str, q: torch.Tensor, length: int, causal: bool) -> Tile:
    """The tile for tensors like q: as tuned on this machine, else shipped_tile().

    length is that of the program's own axis: queries, or keys for "dkdv"; only its power-of-two bucket counts.
    """
    return _choose(pass_, device_of(q.device), q.dtype, q.shape[-1], length_bucket(length), causal)


@functools.cache
def _choose(pass_: str, device: Device, dtype: torch.dtype, head_dim: int, bucket: int, causal: bool) -> Tile:
    if not candidates(pass_, device, dtype, head_dim):
        raise NotImplementedError(
            f"backend='triton': no tile of {pass_} for {dtype} and head_dim {head_dim} fits the {device.shared_bytes} "
            f"bytes of shared memory of {device.name}; use backend='reference'"
        )
    tuned = {**load_shipped(device.architecture), **load_tuned(device)}
    return tile_of(tuned, pass_, device, dtype, head_dim, bucket, causal)


def cache_dir() -> Path:
    """Where tuned tiles live: $FLASHATTN_CACHE_DIR, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FLASHATTN_CACHE_DIR") or Path(base) / "flashattn")


def tuned_file(device: Device) -> Path:
    """One file for each GPU, Triton release and code path."""
    gpu = re.sub(r"[^A-Za-z0-9]+", "_", device.name).strip("_")
    return cache_dir() / f"{gpu}_triton{turing.triton_version()}_{device.code_path}.json"


def tuned_key(pass_: str, device: Device, dtype: torch.dtype, head_dim: int, bucket: int, causal: bool) -> str:
    """What a tuned tile is for: fp16 and bf16 share it, as do head dims that share the table's entry."""
    mask = "causal" if causal else "full"
    largest = head_dim_bucket(device.architecture, pass_, dtype.itemsize, head_dim)
    return f"{pass_} {8 * dtype.itemsize}bit d{largest} n{bucket} {mask}"


def read_tiles(path: Path) -> dict[str, Tile]:
    """The tiles of a file, by tuned_key."""
    return {key: Tile(**tile) for key, tile in json.loads(path.read_text()).items()}


def write_tiles(path: Path, tiles: dict[str, Tile]) -> None:
    """Make a file of tiles by tuned_key, an entry a line, in the order of their numbers."""
    keys = sorted(tiles, key=lambda key: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", key)])
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(tiles[key].choices)}" for key in keys)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(f"{{\n{lines}\n}}\n")
    partial.replace(path)  # a reader sees the old file or the new one


def shipped_file(architecture: str) -> Path:
    """Where the package has the tiles that were tuned for an architecture, if they were (scripts/adopt_tuned.py)."""
    return Path(__file__).with_name("tuned") / f"{architecture}.json"


@functools.cache
def load_shipped(architecture: str) -> dict[str, Tile]:
    """The shipped tuned tiles of an architecture, by tuned_key; empty where there are none."""
    path = shipped_file(architecture)
    return read_tiles(path) if path.exists() else {}


tunings = 0  # of this process; what remembers a tile, as interface.attention does, is to choose anew after one


@functools.cache
def load_tuned(device: Device) -> dict[str, Tile]:
    """The tiles tuned for this device, by tuned_key; empty where none were, or where the file cannot be read."""
    if device is INTERPRETER:
        return {}
    path = tuned_file(device)
    try:
        return read_tiles(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"flashattn: tuned tiles in {path} are ignored: {error}", stacklevel=2)
        return {}


def save_tuned(device: Device, tiles: dict[str, Tile]) -> Path:
    """Add tuned tiles to the device's file, and use them from now on."""
    global tunings
    path = tuned_file(device)
    load_tuned.cache_clear()  # another process may have tuned the same kind of device
    write_tiles(path, load_tuned(device) | tiles)
    load_tuned.cache_clear()
    _choose.cache_clear()
    tunings += 1  # last: what another thread remembers in between is forgotten
    return path

"""Launches on tensors without memory, for compiling the kernels with no GPU (codegen.py)."""

import dataclasses
from functools import partial

import torch

from .configs import DTYPES, MAX_HEAD_DIM, Device, Tile, table_entry
from .launcher import Launch


def shipped_tiles(pass_: str, head_dim: int, dtype: torch.dtype, capability: int = 75) -> tuple[Tile, ...]:
    """The candidates of a pass, the default for long sequences first."""
    return table_entry(Device("", capability, 0).architecture, pass_, dtype.itemsize, head_dim)


def launches(
    pass_: str,
    *,
    head_dim: int = 64,
    causal: bool = False,
    dtype: torch.dtype | str = torch.float16,
    capability: int = 75,
    tile: Tile | None = None,
    **tile_fields: int,
) -> list[Launch]:
    """What launches "forward", "dkdv" or "dq" with a tile, or the default of a capability with other tile_fields.

    Raises ValueError for a value that the kernels do not take.
    """
    from .backward import dkdv_launches, dq_launch  # which import Triton
    from .forward import forward_launch

    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    fields = [field.name for field in dataclasses.fields(Tile)]
    unknown = [name for name in tile_fields if name not in fields]
    sizes = [value for name, value in tile_fields.items() if name in ("block_m", "block_n")]
    for name, value, good, accepted in (
        ("head_dim", head_dim, head_dim in range(1, MAX_HEAD_DIM + 1), f"1 to {MAX_HEAD_DIM}"),
        ("causal", causal, isinstance(causal, bool), "True, False"),
        ("dtype", dtype, dtype in DTYPES, "float16, bfloat16, float32"),
        ("dtype", dtype, capability >= 80 or dtype != torch.bfloat16, "float16, float32: it runs in float16 there"),
        ("argument", ", ".join(unknown), not unknown, ", ".join(["head_dim", "causal", "dtype", *fields])),
        ("block", sizes, all(size in (16, 32, 64, 128, 256) for size in sizes), "16, 32, 64, 128, 256"),
    ):
        if not good:
            raise ValueError(f"{name}: got {value}, accepted are {accepted}")
    tile = dataclasses.replace(tile or shipped_tiles(pass_, head_dim, dtype, capability)[0], **tile_fields)
    q, k, v, o = (torch.empty(2, 8, 1024, head_dim, dtype=dtype, device="meta") for _ in range(4))
    row = torch.empty(2, 8, 1024, device="meta")
    options = {"causal": causal, "scale": head_dim**-0.5, "tile": tile}
    if pass_ == "forward":
        return [forward_launch(q, k, v, o, row, **options)]
    if pass_ == "dkdv":
        return dkdv_launches(q, k, v, o, k, v, row, row, **options)
    return [dq_launch(q, k, v, o, q, row, row, **options)]


forward, dkdv, dq = (partial(launches, pass_) for pass_ in ("forward", "dkdv", "dq"))

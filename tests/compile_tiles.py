"""Compile shipped tiles for an architecture that need not be at hand; a line of JSON for each.

    compile_tiles.py CAPABILITY PASS DTYPE HEAD_DIM...

For sm_75 every tile, elsewhere the default; in float32, which compiles slowly, with the causal mask only.
A process of its own, since the test suite's may run Triton's interpreter, in which nothing compiles.
"""

import json
import sys
from dataclasses import asdict

import torch

from flashattn import configs
from flashattn.backward import dkdv_launch, dq_launch
from flashattn.codegen import compile_for
from flashattn.forward import forward_launch


def launch(pass_, tile, dtype, head_dim, causal):
    """A launch of the pass on tensors without memory."""
    q, k, v, o = (torch.empty(2, 8, 1024, head_dim, dtype=dtype, device="meta") for _ in range(4))
    row = torch.empty(2, 8, 1024, device="meta")
    options = {"causal": causal, "scale": 0.1, "tile": tile}
    if pass_ == "forward":
        return forward_launch(q, k, v, o, row, **options)
    if pass_ == "dkdv":
        return dkdv_launch(q, k, v, o, k, v, row, row, **options)
    return dq_launch(q, k, v, o, q, row, row, **options)


def main(capability, pass_, dtype, *head_dims):
    dtype = getattr(torch, dtype)
    table = configs.TILES[configs.Device("", int(capability), 0).architecture][pass_, dtype.itemsize]
    for head_dim in map(int, head_dims):
        for tile in table[head_dim] if int(capability) == 75 else table[head_dim][:1]:
            for causal in (True,) if dtype == torch.float32 else (False, True):
                made = compile_for(launch(pass_, tile, dtype, head_dim, causal), int(capability))
                facts = {key: value for key, value in made._asdict().items() if isinstance(value, int)}
                mma = made.ptx.count("mma.sync") + made.ptx.count("wgmma.mma_async")
                promised = configs.smem_bytes(pass_, tile, head_dim, dtype.itemsize, int(capability))
                row = {"tile": asdict(tile), "head_dim": head_dim, "causal": causal, "mma": mma, "promised": promised}
                print(json.dumps(row | facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compile shipped tiles for an architecture that need not be at hand; a line of JSON for each kernel.

    compile_tiles.py CAPABILITY WHICH PASS DTYPE HEAD_DIM...

WHICH: "all" tiles, or the "default" of each head dim. In float32, which compiles slowly, with the causal mask only.
A process of its own: the test suite's may run Triton's interpreter, in which nothing compiles, or another Triton.
"""

import json
import re
import sys
from dataclasses import asdict

import torch

from flashattn import configs, sass
from flashattn.codegen import compile_for
from flashattn.launches import launches, shipped_tiles


def main(capability, which, pass_, dtype, *head_dims):
    capability, dtype = int(capability), getattr(torch, dtype)
    for head_dim in map(int, head_dims):
        for tile in shipped_tiles(pass_, head_dim, dtype, capability)[: 1 if which == "default" else None]:
            for causal in (True,) if dtype == torch.float32 else (False, True):
                for launch in launches(pass_, head_dim=head_dim, causal=causal, dtype=dtype, tile=tile):
                    made = compile_for(launch, capability)
                    row = {
                        "pass": pass_,
                        "head_dim": head_dim,
                        "causal": causal,
                        "tile": asdict(tile),
                        "promised": configs.smem_bytes(pass_, tile, head_dim, dtype.itemsize, capability),
                        "mma": made.mma,
                        "forbidden": [name for name in ("cp.async", "bf16", "tf32") if name in made.ptx],
                        "registers": made.registers,
                        "stack_bytes": made.stack_bytes,
                        "shared_bytes": made.shared_bytes,
                    }
                    if tile.integer_p:  # to_half's shift, as in the PTX and as ptxas has left it
                        left = re.findall(r"\bLEA .*, 0x8000, 0x3 ", sass.listing(made.cubin))
                        row["halves"] = made.ptx.count(", 32768;"), len(left)
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

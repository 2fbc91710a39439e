"""torch.compile over a Triton kernel, on the path of a T4: stock, enabled, stock again; a line of JSON for each.

A process of its own: it has caches, and worker processes that compile, which nothing else has used.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch._dynamo.device_interface
import turing_path
from foreign_kernels import matmul, matmul_kernel
from torch._inductor import config

from flashattn import turing


def report(compiled, folder, seen):
    """Run the function and tell its error and the kernels that are new on disk."""
    case = matmul("cuda")
    out = compiled(*case.launch.args[:2])
    new = [path for path in Path(folder).rglob("matmul_kernel*.ptx") if path not in seen]
    seen.update(new)
    with_mma = sum("mma.sync.aligned.m16n8k8" in path.read_text() for path in new)
    error = float((out.double() - case.exact).abs().max() / case.exact.abs().max())
    facts = {"error": error, "sum": float(out.double().sum())}
    print(json.dumps(facts | {"new with mma": with_mma, "new without": len(new) - with_mma}), flush=True)


def function(a, b):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    matmul_kernel[(15,)](a, b, c, m, n, k, BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP=2, num_warps=4, num_stages=4)
    return c * 1.0


def main():
    torch.manual_seed(0)
    turing_path.install()
    interface = torch._dynamo.device_interface.CudaInterface
    interface.get_compute_capability = staticmethod(lambda device=None: 75)  # what Inductor compiles for
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        seen = set()
        compiled = torch.compile(function)
        for on in (False, True, False):
            torch.manual_seed(0)
            if on:
                config.compile_threads = 4  # enable() has to see that no worker is asked
                with turing.enable():
                    report(compiled, folder, seen)
            else:
                config.compile_threads = 1  # a worker would assemble for a GPU that is not here
                report(compiled, folder, seen)


if __name__ == "__main__":
    main()

"""Compile kernels for sm_75 with the Triton at hand, stock and restored, and print what became of each.

sweep_triton.py runs this with one release after the other: a line of JSON for each kernel and path, as soon as it is
known. Kernels are the library's three, with the tiles that a T4 takes for head dim 64, and a plain matmul.
"""

import argparse
import json
import math
import os
import sys
import warnings
from pathlib import Path
from time import perf_counter

import benchmark
import torch
import triton
import triton.language as tl

from flashattn import codegen, launcher, launches, measure, turing
from flashattn.forward import forward_launch

HEAD_DIM = 64

# What is timed: 0.27 TFLOP, on a T4 some 12 ms with its tensor cores and 200 ms without.
CASE = benchmark.Case(batch=4, heads=16, seqlen=4096, head_dim=HEAD_DIM, causal=False, dtype="float16")

# Dots in the code of each kernel. In a dK/dV or dQ step scores and dP are made anew; the library's loops over
# blocks stand there twice, with a mask and without.
DOTS = {"matmul": 1, "forward": 2 * 2, "dq": 3 * 2, "dkdv": 4 * 2}


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, size_n, size_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """C = A B, row-major, fp16 with an fp32 accumulator; the blocks divide the matrices."""
    blocks_n = size_n // BLOCK_N
    offs_m = tl.program_id(0) // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, size_k, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * size_k + start_k + offs_k[None, :])
        b = tl.load(b_ptr + (start_k + offs_k[:, None]) * size_n + offs_n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m[:, None] * size_n + offs_n[None, :], acc.to(tl.float16))


@triton.jit
def empty_kernel():
    pass


def launch(kernel: str) -> launcher.Launch:
    """A launch of one of DOTS, on tensors without memory."""
    if kernel != "matmul":
        return launches.launches(kernel, head_dim=HEAD_DIM)[0]
    a, b, c = (torch.empty(1024, 1024, dtype=torch.float16, device="meta") for _ in range(3))
    tile = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32}
    stages = {"num_warps": 4, "num_stages": 3}  # more than sm_75 can pipeline: they have to do no harm
    return launcher.Launch(matmul_kernel, 8 * 16, (a, b, c, 1024, 1024), tile, stages)


def predict(kernel: str) -> dict[str, int]:
    """The instructions that the dots of a kernel take: "mma" on the tensor cores, or else "fma".

    A dot of M x N x K is as many multiply-adds: one each for a thread's FMA, 16 * 8 * 8 for a warp's m16n8k8. Dots
    that bring tiles into registers, before the loop, come on top.
    """
    described = launch(kernel)
    blocks = [described.constants.get(name, 1) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D")]
    per_warp = DOTS[kernel] * math.prod(blocks) // described.options["num_warps"]
    return {"mma": per_warp // (16 * 8 * 8), "fma": per_warp // 32}


def compile_kernel(kernel: str, restored: bool) -> dict[str, object]:
    """The columns of a kernel that come from its code; "result" is "ok", or why there is no such code."""
    if restored and turing.code_path(75) != "restored":
        known = {"stock": "not needed", "scalar": "flashattn.turing does not know this release"}
        return {"result": known[turing.code_path(75)]}
    described = launch(kernel)
    start = perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            code = codegen.compile_for(described, 75, restored)
        except Exception as error:  # a release fails in its own way, and the next kernel may compile
            return {"result": one_line(error)}
    seconds = perf_counter() - start
    not_restored = [str(w.message) for w in caught if str(w.message).startswith("flashattn.turing")]
    return {
        "result": "; ".join(not_restored) or "ok",
        "mma": sum(code.mma.values()),
        "fma": code.count("fma.rn.f32"),
        "ldmatrix": code.count("ldmatrix"),
        "cp_async": code.count("cp.async"),
        "registers": code.registers,
        "stack_bytes": code.stack_bytes,
        "shared_bytes": code.shared_bytes,
        "compile_s": round(seconds, 2),
    }


def time_forward(restored: bool) -> dict[str, object]:
    """The forward on the current GPU, checked against fp64 and then timed: its columns, with the GPU's state."""
    device = measure.default_device()
    tensors = benchmark.random_tensors(CASE, device)
    o, lse_log2 = torch.empty_like(tensors[0]), torch.empty(tensors[0].shape[:3], device=device)
    (tile, *_) = launches.shipped_tiles("forward", HEAD_DIM, torch.float16)
    described = forward_launch(*tensors[:3], o, lse_log2, causal=False, scale=HEAD_DIM**-0.5, tile=tile)
    # Launch.run() would restore the tensor cores whether or not that is asked for here
    options = described.options | turing.compile_options(75, restored)

    def run():
        described.kernel[(described.grid,)](*described.args, **described.constants, **options)

    try:
        run()
        benchmark.Truth(tensors, causal=False).check({"o": o})
        timing = measure.time(run, device=device)
    except Exception as error:  # wrong, or refused at launch: the other path may still do
        return {"result": f"not timed: {one_line(error)}"}
    tflops = CASE.flops("forward") / timing.median_ms / 1e9
    return {"forward_ms": round(timing.median_ms, 4), "tflops": round(tflops, 3), **measure.gpu_state(device)}


def one_line(error: Exception) -> str:
    """The type of an error and the last line of its text: the lines before it are sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[-1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", choices=DOTS)
    parser.add_argument("--time", action="store_true", help="also run and time the forward on the current GPU")
    parser.add_argument("--release", type=Path, help="fail unless the Triton at hand is that of this folder")
    args = parser.parse_args()
    if args.release and Path(triton.__file__).parents[1] != args.release:
        sys.exit(f"another Triton goes before that of {args.release.name}: {triton.__version__}")
    codegen.compile_for(launcher.Launch(empty_kernel, 1, (), {}, {}), 75)  # Triton's start is no kernel's compile time
    for kernel in args.kernels:
        for path in ("stock", "restored"):
            row = {"kernel": kernel, "path": path, **compile_kernel(kernel, restored=path == "restored")}
            if args.time and kernel == "forward" and row["result"] == "ok":
                row |= time_forward(restored=path == "restored")
            # what the compiler said of this kernel ends there
            print(json.dumps(row | {"stderr_bytes": os.fstat(2).st_size}), flush=True)


if __name__ == "__main__":
    main()

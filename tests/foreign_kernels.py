"""Triton kernels that are not the library's, as other people write them: what turing.py has to get right.

Each entry of CASES makes a Case on a device; on the meta device it can be compiled, not run.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashattn.launcher import Launch


class Case(NamedTuple):
    """The launch fills out; exact is the same in fp64, baseline in PyTorch; sums are of terms of this size in all."""

    launch: Launch
    out: torch.Tensor
    exact: torch.Tensor
    baseline: torch.Tensor
    terms: torch.Tensor


def sizes(a, b):
    """The largest sum of |terms| in a @ b."""
    return (a.double().abs() @ b.double().abs()).amax()


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The tutorials' matmul: tiles in grouped order, the loop pipelined by num_stages, a ragged K."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    first = pid // (GROUP * blocks_n) * GROUP
    rows = tl.minimum(blocks_m - first, GROUP)
    pid_m = first + pid % (GROUP * blocks_n) % rows
    pid_n = pid % (GROUP * blocks_n) // rows
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        live = offs_k + k * BLOCK_K < K
        a = tl.load(a_ptr + (offs_m % M)[:, None] * K + k * BLOCK_K + offs_k[None, :], mask=live[None, :], other=0.0)
        b = tl.load(b_ptr + (k * BLOCK_K + offs_k)[:, None] * N + (offs_n % N)[None, :], mask=live[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(c_ptr.dtype.element_ty), mask=inside)


def matmul(device, dtype=torch.float16):
    m, n, k = 300, 264, 520
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    c = torch.empty(m, n, device=device, dtype=dtype)
    constants = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP": 2}
    launch = Launch(matmul_kernel, 3 * 5, (a, b, c, m, n, k), constants, {"num_warps": 4, "num_stages": 4})
    return Case(launch, c, a.double() @ b.double(), a @ b, sizes(a, b))


@triton.jit
def softmax_matmul_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr,
    BLOCK_M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """softmax(a @ b) @ c, a block of rows a program: two dots with reductions between them."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n, offs_k, offs_d = tl.arange(0, N), tl.arange(0, K), tl.arange(0, D)
    a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
    s = tl.dot(a, tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :]))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    o = tl.dot(p.to(tl.float16), tl.load(c_ptr + offs_n[:, None] * D + offs_d[None, :]))
    tl.store(out_ptr + offs_m[:, None] * D + offs_d[None, :], o.to(tl.float16))


def softmax_matmul(device):
    m, n, k, d = 192, 128, 64, 64
    a, b, c = (torch.randn(shape, device=device).half() for shape in ((m, k), (k, n), (n, d)))
    b = b / 8
    out = torch.empty(m, d, device=device, dtype=torch.float16)
    constants = {"BLOCK_M": 64, "N": n, "K": k, "D": d}
    launch = Launch(softmax_matmul_kernel, m // 64, (a, b, c, out), constants, {"num_warps": 4, "num_stages": 3})
    exact, baseline = ((x @ y).softmax(-1) @ z for x, y, z in ((t.double() for t in (a, b, c)), (a, b, c)))
    return Case(launch, out, exact, baseline, sizes(b, c) / n)


@triton.jit
def split_k_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SPLIT programs a tile of the output, each with every SPLIT-th block of K, summed by atomics."""
    pid = tl.program_id(0)
    part, tile = pid % SPLIT, pid // SPLIT
    offs_m = tile // (N // BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile % (N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(part * BLOCK_K, K, SPLIT * BLOCK_K, num_stages=3):  # stages of the loop's own
        offs_k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * K + offs_k[:, None])  # b is transposed in memory
        acc += tl.dot(a, b)
    tl.atomic_add(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc)


def split_k(device):
    m, n, k, split = 128, 128, 1024, 4
    a, b = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half()
    c = torch.zeros(m, n, device=device)
    constants = {"SPLIT": split, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    launch = Launch(split_k_kernel, split * 4, (a, b, c, m, n, k), constants, {"num_warps": 8, "num_stages": 2})
    return Case(launch, c, a.double() @ b.double().mT, a.float() @ b.float().mT, sizes(a, b.mT))


@triton.jit
def dots_kernel(a_ptr, b_ptr, w_ptr, scale_ptr, x_ptr, out_ptr, KIND: tl.constexpr, SIZE: tl.constexpr):
    """One dot of each kind that keeps a kernel on the tensor cores, in a loop of two turns."""
    rows = tl.arange(0, SIZE)
    square = rows[:, None] * SIZE + rows[None, :]
    a = tl.load(a_ptr + square)
    acc = tl.zeros([SIZE, SIZE], tl.float32)
    for turn in range(2):
        b = tl.load(b_ptr + turn * SIZE * SIZE + square)
        if KIND == "fp16 accumulation":
            acc += tl.dot(a, b, out_dtype=tl.float16)
        elif KIND == "dequantised int8":
            w = tl.load(w_ptr + turn * SIZE * SIZE + square).to(tl.float16)
            acc = tl.dot(a, w * tl.load(scale_ptr + rows)[None, :], acc)
        elif KIND == "with an IEEE dot":
            acc = tl.dot(a, b, acc)
            x = tl.load(x_ptr + square)
            acc = tl.dot(x, x, acc, input_precision="ieee")
    tl.store(out_ptr + square, acc)


def dots(kind, device):
    size = 64
    a, b = torch.randn(size, size, device=device).half(), torch.randn(2, size, size, device=device).half()
    w = torch.randint(-128, 128, (2, size, size), device=device, dtype=torch.int8)
    scale = (torch.rand(size, device=device) / 64).half()
    x = torch.randn(size, size, device=device)
    out = torch.empty(size, size, device=device)
    args, constants = (a, b, w, scale, x, out), {"KIND": kind, "SIZE": size}
    launch = Launch(dots_kernel, 1, args, constants, {"num_warps": 4, "num_stages": 3})

    def result(dtype):
        left, right = a.to(dtype), b.to(dtype)
        if kind == "dequantised int8":
            right = (w.half() * scale).to(dtype)
        products = [left @ y for y in right] + [x.to(dtype) @ x.to(dtype)] * (2 if kind == "with an IEEE dot" else 0)
        return sum(products)

    return Case(launch, out, result(torch.float64), result(torch.float16), 2 * sizes(a, b))


@triton.jit
def batched_kernel(a_ptr, b_ptr, out_ptr, BATCH: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """A dot of two batches of matrices."""
    batch = tl.arange(0, BATCH)[:, None, None]
    offs_m, offs_k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + batch * M * K + offs_m[None, :, None] * K + offs_k[None, None, :])
    b = tl.load(b_ptr + batch * M * K + offs_k[None, :, None] * M + offs_m[None, None, :])
    out = out_ptr + batch * M * M + offs_m[None, :, None] * M + offs_m[None, None, :]
    tl.store(out, tl.dot(a, b))


def batched(device):
    batch, m, k = 4, 32, 64
    a, b = torch.randn(batch, m, k, device=device).half(), torch.randn(batch, k, m, device=device).half()
    out = torch.empty(batch, m, m, device=device)
    launch = Launch(batched_kernel, 1, (a, b, out), {"BATCH": batch, "M": m, "K": k}, {"num_warps": 4})
    return Case(launch, out, a.double() @ b.double(), a.float() @ b.float(), sizes(a, b))


@triton.jit
def persistent_kernel(a_ptr, b_ptr, c_ptr, K, TILES: tl.constexpr, SIZE: tl.constexpr):
    """A loop over tiles around the loop over K, flattened to one where Triton knows how."""
    rows = tl.arange(0, SIZE)
    for tile in tl.range(tl.program_id(0), TILES, 2, num_stages=2):
        acc = tl.zeros([SIZE, SIZE], tl.float32)
        for start in range(0, K, SIZE):
            a = tl.load(a_ptr + (tile * SIZE + rows)[:, None] * K + (start + rows)[None, :])
            b = tl.load(b_ptr + (start + rows)[:, None] * SIZE + rows[None, :])
            acc = tl.dot(a, b, acc)
        tl.store(c_ptr + (tile * SIZE + rows)[:, None] * SIZE + rows[None, :], acc)


def persistent(device):
    tiles, size, k = 5, 64, 256
    a, b = torch.randn(tiles * size, k, device=device).half(), torch.randn(k, size, device=device).half()
    c = torch.empty(tiles * size, size, device=device)
    constants = {"TILES": tiles, "SIZE": size}
    launch = Launch(persistent_kernel, 2, (a, b, c, k), constants, {"num_warps": 4, "num_stages": 3})
    return Case(launch, c, a.double() @ b.double(), a.float() @ b.float(), sizes(a, b))


@triton.jit
def talkative_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Says in strings what the compiler's own text says: "tt.dot", and a layout of sm_80."""
    rows = tl.arange(0, SIZE)
    x = tl.load(x_ptr + rows[:, None] * SIZE + rows[None, :])
    tl.device_print("%1 = tt.dot in versionMajor = 2, versionMinor = 0, tt.num_stages = 3 of cuda:80", rows)
    tl.store(out_ptr + rows[:, None] * SIZE + rows[None, :], tl.dot(x, x))


def talkative():
    """A launch to compile."""
    return Launch(talkative_kernel, 1, (torch.float16, torch.float32), {"SIZE": 32}, {"num_warps": 4})


CASES = {
    "matmul": matmul,
    "softmax_matmul": softmax_matmul,
    "split_k": split_k,
    "batched": batched,
    "persistent": persistent,
    **{kind: functools.partial(dots, kind) for kind in ("fp16 accumulation", "dequantised int8", "with an IEEE dot")},
}


# Dots for which Turing's tensor cores have no instruction, and one that is none of their business.
@triton.jit
def other_dot_kernel(x_ptr, out_ptr, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    x = tl.load(x_ptr + rows[:, None] * SIZE + rows[None, :])
    dot = tl.dot(x, x, input_precision=PRECISION)
    tl.store(out_ptr + rows[:, None] * SIZE + rows[None, :], dot.to(out_ptr.dtype.element_ty))


OTHER_DOTS = {"bf16": torch.bfloat16, "fp64": torch.float64, "i8": torch.int8, "f32 in TF32": torch.float32}


def other_dot(kind):
    """A launch to compile: a kind of OTHER_DOTS, or "ieee"."""
    dtype = OTHER_DOTS.get(kind, torch.float32)
    out = torch.int32 if kind == "i8" else dtype
    constants = {"PRECISION": "ieee" if kind == "ieee" else "tf32", "SIZE": 32}
    return Launch(other_dot_kernel, 1, (dtype, out), constants, {"num_warps": 4})

"""Predict PyTorch's SDPA on a T4 by the model of flashattn/sm75.py, from the machine code in the installed torch.

The kernels are those that the memory-efficient backend, SDPA's only fused one on Turing, takes there in fp16 without
mask or dropout. They have loops within loops, and branches that depend on arguments: which way a warp takes through
them was read from the code of torch 2.6.0 for CUDA 12.4, and another build's is refused. The columns are those of
scripts/predict_t4.py. Needs no GPU, and 0.5 GB for temporary files. Nothing here was measured; docs/t4_model.md says
how far to trust it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import predict_t4
import torch

from flashattn import sass, sm75

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"


class Kernel(NamedTuple):
    """A kernel, and the way of a warp through it for a block of scores.

    That is, of spans of instructions each from the first to the last, numbered from the kernel's start. A branch back
    is taken as often as trips says, then not; one ahead that has a predicate is taken if it is in taken.
    """

    name: str
    pass_: str
    head_dim: int
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    shared_bytes: int  # sizeof(SharedStorage) of CUTLASS 3.5.1's example 41; its parts' addresses are in the code
    checksum: int  # of the code
    spans: tuple[tuple[int, int], ...]
    trips: Mapping[int, int]
    taken: frozenset[int]

    @property
    def section(self) -> str:
        """How the name of its section in a cubin begins."""
        return f".text._Z{len(self.name)}{self.name}"


KERNELS = (
    # Taken, in this order: no bias, no causal mask, no window, four row maxima that are not negative, no dropout. Not
    # taken: the row maxima stay as they were, the accumulator is scaled nevertheless.
    Kernel(
        "fmha_cutlassF_f16_aligned_64x64_rf_sm75",
        *("forward", 64, 64, 64, 4, 18944, 0x807758EB),
        spans=((439, 2288),),
        trips={636: 1, 2265: 1, 2282: 1},
        taken=frozenset({686, 906, 1006, 1155, 1176, 1197, 1218, 1789}),
    ),
    Kernel(
        "fmha_cutlassF_f16_aligned_32x128_rf_sm75",
        *("forward", 128, 32, 128, 4, 26112, 0x94BC670D),
        spans=((441, 2311),),
        trips={651: 3, 2287: 3, 2305: 3},
        taken=frozenset({689, 910, 997, 1135, 1156, 1177, 1198, 1771}),
    ),
    # The first span is delta's loop: SDPA starts a program for each block of keys, which computes delta of all queries.
    # Taken: no bias, no causal mask, no window, no gradient of a bias; not the thread that takes dQ's lock, counts and
    # gives it back; no wrapping around to the first queries. Not taken: dQ is loaded, and stored again.
    Kernel(
        "fmha_cutlassB_f16_aligned_64x64_k64_sm75",
        *("backward", 64, 64, 64, 4, 27904, 0x1ABE0120),
        spans=((596, 740), (914, 3692)),
        trips={1154: 1, 2097: 1, 2114: 1, 2347: 1, 3125: 1, 3142: 1, 3561: 1, 3578: 1},
        taken=frozenset({1189, 1359, 1434, 2575, 2924, 3156, 3168, 3223, 3638}),
    ),
    # The same, but dQ is made in two halves of the head dim.
    Kernel(
        "fmha_cutlassB_f16_aligned_128x64_k128_sm75",
        *("backward", 128, 128, 64, 8, 54784, 0x206B5192),
        spans=((929, 1197), (1372, 3787), (3390, 3782), (3789, 4095)),
        trips={1605: 3, 2531: 3, 2550: 3, 2766: 3, 3612: 1, 3962: 3, 3981: 3},
        taken=frozenset({1640, 1810, 1885, 2993, 3402, 3620, 3660, 4041}),
    ),
)


def cubins(library: Path = LIBRARY) -> dict[str, bytes]:
    """The machine code for sm_75 in PyTorch's library that has each of the kernels. Raises ValueError without them."""
    if not library.is_file():
        raise ValueError(f"{library} is not there: torch {torch.__version__} was not built for CUDA")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sass.tool("cuobjdump"), "--extract-elf", "sm_75", library]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for file in Path(folder).iterdir():
            cubin = file.read_bytes()
            found |= {kernel.name: cubin for kernel in KERNELS if kernel.section.encode() in cubin}
    if missing := [kernel.name for kernel in KERNELS if kernel.name not in found]:
        raise ValueError(f"torch {torch.__version__} has no {missing[0]}")
    return found


def instructions(kernel: Kernel, cubin: bytes) -> list[sass.Instruction]:
    """A kernel's, all of them. Raises ValueError where they are not those that its way was read from."""
    sections = re.split(r"^\s*\.section\s+", sass.listing(cubin, bits=True), flags=re.MULTILINE)
    (code,) = (sass.parse(text) for text in sections if text.startswith(kernel.section))
    if zlib.crc32(b"".join(i.bits.to_bytes(16, "little") for i in code)) != kernel.checksum:
        raise ValueError(f"{kernel.name}: not the code of torch 2.6.0 for CUDA 12.4, but of {torch.__version__}")
    return code


def way(kernel: Kernel, code: list[sass.Instruction]) -> list[sass.Instruction]:
    """What a warp executes for a block of scores.

    The last trip through a loop has nothing to fetch for the next: its loads and stores with a predicate are left out.
    """
    executed = []
    for at, end in kernel.spans:
        left = dict(kernel.trips)
        while at <= end:
            instruction = code[at]
            last = any(code[n].target <= at <= n and not count for n, count in left.items())
            if not (last and instruction.predicate and sass.pipe_of(instruction.name) in ("shared", "global")):
                executed.append(instruction)
            jumps = at in kernel.taken or instruction.name == "BRA" and not instruction.predicate
            if left.get(at):
                left[at] -= 1
                jumps = True
            at = instruction.target if jumps else at + 1
    return executed


def row(kernel: Kernel, cubin: bytes) -> dict[str, object]:
    """The columns of predict_t4.row()."""
    registers, stack_bytes = sass.resource_usage(cubin, kernel.name)
    compiled = SimpleNamespace(
        name=kernel.name,
        registers=registers,
        stack_bytes=stack_bytes,
        num_warps=kernel.num_warps,
        blocks_per_sm=sass.blocks_per_sm(75, kernel.num_warps, registers, kernel.shared_bytes),
    )
    found = sm75.predict(compiled, way(kernel, instructions(kernel, cubin)))
    cost = sm75.turn_cost(found, kernel.block_m * kernel.block_n)
    return {
        "kernel": f"{kernel.pass_} d{kernel.head_dim} full",
        "tile": f"{kernel.block_m}x{kernel.block_n} w{kernel.num_warps}",
        "registers": registers,
        "stack_bytes": stack_bytes,
        **predict_t4.predicted(found, cost, products(kernel), kernel.head_dim),
    }


def products(kernel: Kernel) -> int:
    """Of all that a block of scores takes; the backward makes them in one kernel, and none twice."""
    return sm75.BACKWARD_PRODUCTS if kernel.pass_ == "backward" else sm75.PRODUCTS[kernel.pass_]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    try:
        found = cubins()
        predict_t4.print_rows([row(kernel, found[kernel.name]) for kernel in KERNELS])
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

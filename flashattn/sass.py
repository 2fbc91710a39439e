"""Machine code: what a cubin's hottest loop asks of each pipe, and how many programs fit a multiprocessor.

nvdisasm and cuobjdump come with Triton's wheel.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# Where an instruction goes, by its base name (the part before the first dot), as sm_75 has it; newer architectures
# name more. Sources: the CUDA programming guide's table of throughputs, the CUDA binary utilities' lists of SASS
# instructions, and for IMAD (on the FP32 pipe from Volta on) Jia et al., "Dissecting the NVIDIA Volta GPU".
_PIPES = {
    "tensor": "HMMA IMMA DMMA BMMA HGMMA IGMMA QGMMA BGMMA QMMA OMMA UTCHMMA UTCIMMA UTCQMMA",
    "fp16": "HADD2 HMUL2 HFMA2 HADD2_32I HMUL2_32I HFMA2_32I HSET2 HSETP2 HMNMX2",  # on sm_75 the tensor pipe, too
    "fp32": "FFMA FADD FMUL FFMA2 FADD2 FMUL2 FFMA32I FADD32I FMUL32I FSWZADD IMAD IMAD32I IMUL IDP",
    "special": "MUFU F2F F2I I2F FRND I2I POPC FLO BREV FCHK",
    "shared": "LDS STS LDSM STSM ATOMS SHFL MATCH",
    "global": "LDG STG LD ST LDL STL ATOM ATOMG RED REDG LDGSTS UBLKCP UTMALDG UTMASTG UTMAREDG",
    "constant": "LDC ULDC LDCU",
    "fp64": "DADD DMUL DFMA DSETP",
    "control": "BRA BRX JMP CALL RET EXIT BSSY BSYNC WARPSYNC BREAK YIELD BMOV KILL NANOSLEEP NOP DEPBAR BAR MEMBAR "
    "ERRBAR CCTL S2R B2R CS2R S2UR R2UR VOTE VOTEU LDGDEPBAR WARPGROUP SYNCS FENCE ELECT PLOP3 CGAERRBAR",
}
_PIPE = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}


def pipe_of(instruction: str) -> str:
    """A key of _PIPES, or "integer" (with logic, compares and moves); "special" has the conversions too."""
    return _PIPE.get(instruction.split(".")[0], "integer")


class Instruction(NamedTuple):
    """One instruction: its name with modifiers, and the index of the instruction that it may branch to.

    The predicate, as "!P0", is empty where there is none; the 128 bits are 0 where the listing did not have them.
    """

    name: str
    target: int | None = None
    predicate: str = ""
    operands: str = ""
    bits: int = 0


def tool(name: str) -> Path:
    """The path of nvdisasm or cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _tool(name: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([tool(name), *arguments, file], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def listing(cubin: bytes, bits: bool = False) -> str:
    """The machine code as nvdisasm prints it, with the instructions' bits if asked for."""
    return _tool("nvdisasm", "-c", *(["-hex"] if bits else []), cubin=cubin)


# An address, a predicate, a name, operands, and the lower 64 of the bits; the upper ones have a line of their own.
_CODE = re.compile(
    r"\s+(?:\{ )?/\*[0-9a-f]{4,}\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)([^;/]*);?(?:[\s}]*/\* 0x([0-9a-f]{16}) \*/)?"
)
_UPPER_BITS = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")


def parse(listing: str) -> list[Instruction]:
    """The instructions of a listing of one kernel, in order."""
    found, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\S+):", line):
            labels[label[1]] = len(found)
        elif code := _CODE.match(line):
            predicate, name, operands, bits = code.groups(default="")
            found.append(Instruction(name, None, predicate, operands.strip(), int(bits or "0", 16)))
        elif upper := _UPPER_BITS.match(line):
            found[-1] = found[-1]._replace(bits=found[-1].bits | int(upper[1], 16) << 64)

    def target(instruction: Instruction) -> int | None:
        label = re.search(r"`\((\.L_\S+)\)", instruction.operands)
        return labels.get(label[1]) if label and instruction.name.split(".")[0] == "BRA" else None

    return [instruction._replace(target=target(instruction)) for instruction in found]


def hottest_loop(instructions: list[Instruction]) -> list[Instruction]:
    """Of the loops that hold no other the one with most tensor-core instructions, then the shortest.

    Where no loop has such, the one with most of FP32. Empty where there is no loop. A loop is the span from a branch's
    target back to the branch. Of two that compute the same, with masks and without, it is the one without.
    """
    spans = [(i.target, n) for n, i in enumerate(instructions) if i.target is not None and i.target < n]
    innermost = [
        instructions[begin : end + 1]
        for begin, end in spans
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans)
    ]

    def heat(loop: list[Instruction]) -> tuple[int, int, int]:
        mix = pipe_mix(loop)
        tensor = mix.get("tensor", 0)
        return tensor, 0 if tensor else mix.get("fp32", 0), -len(loop)

    return max(innermost, key=heat, default=[])


def pipe_mix(loop: list[Instruction]) -> dict[str, int]:
    """Instructions a warp issues to each pipe in one turn of a loop, the busiest first."""
    return dict(Counter(pipe_of(instruction.name) for instruction in loop).most_common())


def resource_usage(cubin: bytes, kernel: str = "") -> tuple[int, int]:
    """Registers and stack bytes (spills) a thread; of the kernel with this in its name, where a cubin has several."""
    text = _tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    found = re.compile(r"REG:(\d+) STACK:(\d+)").search(text, max(text.find(kernel), 0))
    if not found:
        raise RuntimeError(f"cuobjdump told no resource usage: {text!r}")
    return int(found[1]), int(found[2])


class Multiprocessor(NamedTuple):
    """What an SM has for the programs that share it. CUDA programming guide, "compute capabilities"."""

    shared_bytes: int
    reserved_bytes: int  # of shared memory, which every program loses to the system
    warps: int
    blocks: int


REGISTERS = 65536  # 32-bit registers of an SM, handed to a warp 256 at a time: all architectures from sm_60 on
MULTIPROCESSORS = {
    75: Multiprocessor(65536, 0, 32, 16),
    80: Multiprocessor(167936, 1024, 64, 32),
    86: Multiprocessor(102400, 1024, 48, 16),
    87: Multiprocessor(167936, 1024, 48, 16),
    89: Multiprocessor(102400, 1024, 48, 24),
    90: Multiprocessor(233472, 1024, 64, 32),
    100: Multiprocessor(233472, 1024, 64, 32),
    120: Multiprocessor(102400, 1024, 48, 24),
}


def blocks_per_sm(capability: int, num_warps: int, registers: int, shared_bytes: int) -> int:
    """Programs that fit one SM at a time, each of num_warps warps: 0 if not even one does."""
    sm = MULTIPROCESSORS[capability]
    per_warp = -(-registers * 32 // 256) * 256
    # registers lie in four partitions, and a warp's in one of them
    warps = 4 * (REGISTERS // 4 // per_warp) if per_warp else sm.warps
    taken = -(-(shared_bytes + sm.reserved_bytes) // 256) * 256
    return min(sm.blocks, sm.warps // num_warps, warps // num_warps, sm.shared_bytes // taken if taken else sm.blocks)

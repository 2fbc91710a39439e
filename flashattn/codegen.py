"""A kernel launch as data: run it, or compile it for any NVIDIA architecture with no GPU at hand."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Row strides are handed over in units of 8 elements where all of them allow it: the compiler then knows that
# every row is 16-byte aligned, for head dims like 40 or 72 too, and no stride's value enters the cache key.
STRIDE_UNIT = 8


def pack_strides(*tensors: torch.Tensor) -> tuple[list[int], int]:
    """Strides of (batch, heads, length, head_dim) tensors, one after the other, and the unit of the first three."""
    all_strides = [t.stride() for t in tensors]
    low_bits = 0
    for b, h, m, _ in all_strides:
        low_bits |= b | h | m
    unit = 1 if low_bits % STRIDE_UNIT else STRIDE_UNIT
    return [x for b, h, m, d in all_strides for x in (b // unit, h // unit, m // unit, d)], unit


class Launch(NamedTuple):
    """One kernel launch: positional arguments, constexpr arguments and compiler options by name."""

    kernel: Any
    grid: int
    args: tuple
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Launch on the device and the current stream of the first tensor; an empty grid launches nothing."""
        if self.grid == 0:
            return
        device = self.args[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run()
        self.kernel[(self.grid,)](*self.args, **self.constants, **self.options)


class Compiled(NamedTuple):
    """What the compiler made of a launch: registers a thread, bytes of stack (spills) a thread and of shared memory."""

    ptx: str
    cubin: bytes
    registers: int
    stack_bytes: int
    shared_bytes: int


_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


def _signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], list[int]]:
    """Types, constants and 16-divisible positions of the arguments, as Triton's own launcher would find them."""
    types, constants, divisible = {}, dict(launch.constants), []
    for param, value in zip(launch.kernel.params, launch.args, strict=False):
        if isinstance(value, torch.Tensor):
            types[param.name] = _POINTERS[value.dtype]
            divisible.append(param.num)
        elif isinstance(value, float):
            types[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            constants[param.name] = 1
        else:
            types[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                divisible.append(param.num)
    return types, constants, divisible


def _source(launch: Launch):
    from triton.compiler import ASTSource

    types, constants, divisible = _signature(launch)
    try:
        from triton.backends.compiler import AttrsDescriptor  # Triton 3.2
    except ImportError:
        order = [p.name for p in launch.kernel.params]
        types = {name: types.get(name, "constexpr") for name in order}
        attrs = {(i,): [["tt.divisibility", 16]] for i in divisible}
    else:
        ones = [p.num for p in launch.kernel.params if p.name in constants and not p.is_constexpr]
        properties = {"tt.divisibility": divisible, "tt.equal_to": ones}
        attrs = AttrsDescriptor.from_dict({"arg_properties": properties, "cls": "AttrsDescriptor"})
    return ASTSource(launch.kernel, types, constants, attrs)


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compile a launch for compute capability 75, 80, 86, 89 or 90. Its tensors may be on the meta device."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(_source(launch), target=target, options=launch.options)
    registers, stack_bytes = _resource_usage(kernel.asm["cubin"])
    return Compiled(kernel.asm["ptx"], kernel.asm["cubin"], registers, stack_bytes, kernel.metadata.shared)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, by the cuobjdump in Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump told no resource usage: {text!r}")
    return int(found[1]), int(found[2])

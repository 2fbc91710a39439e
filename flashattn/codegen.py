"""A kernel launch as data: run it, or compile it for any NVIDIA architecture with no GPU at hand, and look at the code.

python -m flashattn.codegen --arch sm_75 forward head_dim=128 causal=True
python -m flashattn.codegen --arch sm_75 mine.py:matmul "*fp16, *fp16, *fp32, i32, i32" BLOCK=64 num_warps=8
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import operator
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards

from . import sass, turing

_empty_strided_cuda = getattr(guards, "_empty_strided_cuda", None)  # torch's own: another release may lack it

# Strides are handed over in units of 8 elements where all of them allow it: the compiler then knows that every row is
# 16-byte aligned, for head dims like 40 or 72 too, and of the strides' values only settled_rows enter the cache key.
# Such a unit also says that offsets within a tile, of 256 rows and columns at most, fit 32 bits.
STRIDE_UNIT = 8
LARGEST_STEP = 2**31 // 256 - 1  # of a row and a column together
SETTLED_ROWS = 32  # row strides at most that a process makes constants
_rows: set[int] = set()  # those so far


def pack_strides(*tensors: torch.Tensor) -> tuple[list[int], int]:
    """Strides of (batch, heads, length, head_dim) tensors, one after the other, and the unit of the first three."""
    all_strides = [t.stride() for t in tensors]
    low_bits = step = 0
    for b, h, m, d in all_strides:
        low_bits |= b | h | m
        step = max(step, m + d)
    unit = 1 if low_bits % STRIDE_UNIT or step > LARGEST_STEP else STRIDE_UNIT
    return [x for b, h, m, d in all_strides for x in (b // unit, h // unit, m // unit, d)], unit


def settled_rows(unit: int, **tensors: torch.Tensor) -> dict[str, int]:
    """Row strides, in units of pack_strides, as constants of the kernel: {"ROW_K": 8}; 0 is left to run time.

    With constants the addresses within a tile are one register and immediates: on sm_75 that ends most spills. A kernel
    is compiled for each, so they must be few. Where rows lie further apart than batches (length, batch, heads, head
    dim), the batch size is in the stride; whatever else may vary there ends at the SETTLED_ROWS-th value.
    """

    def settled(t: torch.Tensor) -> int:
        row = t.stride(2) // unit
        if unit == 1 or t.stride(2) > t.stride(0) or (row not in _rows and len(_rows) >= SETTLED_ROWS):
            return 0
        _rows.add(row)
        return row

    return {f"ROW_{name.upper()}": settled(t) for name, t in tensors.items()}


class Launch(NamedTuple):
    """One kernel launch: positional arguments (tensors, then numbers), constexpr arguments and options by name."""

    kernel: Any
    grid: int
    args: tuple
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> "Again | None":
        """Launch on the device and the current stream of the first tensor; an empty grid launches nothing.

        On Turing the kernel runs on the tensor cores under every Triton that turing.py knows. Returns how to launch
        the same on other tensors; None where nothing was compiled.
        """
        if self.grid == 0:
            return None
        if not self.args[0].is_cuda:
            self.kernel[(self.grid,)](*self.args, **self.constants, **self.options)
            return None
        device = self.args[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run()
        options = self.options | turing.launch_options(device)
        compiled = self.kernel[(self.grid,)](*self.args, **self.constants, **options)
        if compiled is None:  # interpreted, or a hook has kept Triton from it
            return None
        numbers = [x for x in self.args if not isinstance(x, torch.Tensor)]
        return Again(compiled, self.grid, device, (*numbers, *(self.constants.values() if _binds_constants() else ())))


class Again(NamedTuple):
    """A launch without its tensors. Triton's own launch looks at every argument anew, which costs more than launching.

    For tensors of the same types, shapes, strides and device, at addresses that are multiples of 16 as the first
    ones' were.
    """

    compiled: Any
    grid: int
    device: int
    rest: tuple

    def run(self, addresses: list[int]) -> None:
        if self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.run(addresses)
        compiled, stream = self.compiled, torch._C._cuda_getCurrentRawStream(self.device)
        if _is_watched():
            compiled[self.grid, 1, 1](*addresses, *self.rest, stream=stream)
        else:  # what that does, without the three calls for profilers that are not there
            code = compiled.function, compiled.packed_metadata
            compiled.run(self.grid, 1, 1, stream, *code, None, None, None, *addresses, *self.rest)


# What a caller may keep of a call for calls that differ in the values of their tensors only: launches, and the sizes of
# results. For the eager, on a GPU.
Memory = dict[str, Any]


def launch(make: Callable[[], list[Launch]], tensors: tuple, name: str, again: Memory | None) -> None:
    """Launch what make() gives on these tensors, or what `again` has of an earlier call by that name.

    Where an address is no multiple of 16, `again` has nothing, and keeps nothing.
    """
    # As numbers: of a tensor's address Triton asks the driver, each time, whether it is the GPU's.
    if again is None or functools.reduce(operator.or_, addresses := [x.data_ptr() for x in tensors]) % 16:
        for one in make():
            one.run()
    elif found := again.get(name):
        for one in found:
            one.run(addresses)
    else:
        made = [one.run() for one in make()]
        if all(made):
            again[name] = made


def empty(make: Callable[[], torch.Tensor], name: str, again: Memory | None) -> torch.Tensor:
    """make(), a tensor whose values do not matter, or one like that of an earlier call by that name.

    That comes by the way of torch.compile's code, past the dispatcher, which takes half the time.
    """
    if again is None:
        return make()
    if name not in again:
        x = make()
        again[name] = x.get_device(), (tuple(x.shape), x.stride(), x.dtype)
        return x
    device, like = again[name]
    return _empty_strided_cuda(*like) if _empty_strided_cuda and device == torch._C._cuda_getDevice() else make()


def _is_watched() -> bool:
    """Whether a profiler has hooked itself into Triton's launches."""
    owner = _hooks_owner()
    enter, leave = owner.launch_enter_hook, owner.launch_exit_hook
    # Since Triton 3.5 each is a chain of calls, before it was one or None.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _hooks_owner() -> Any:
    import triton

    return triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel


@functools.cache
def _binds_constants() -> bool:
    """Whether a compiled kernel is handed the constexpr arguments too, to be ignored: since Triton 3.3."""
    return turing.release(turing.triton_version()) >= (3, 3)


# Compiling -----------------------------------------------------------------------------------------------------------


class _Driver:
    """Stands for a GPU that is not there, as far as compiling asks for one."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_device(self) -> str:
        return f"sm_{self._capability}"  # the key of a kernel's cache in memory

    def get_current_stream(self, device) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self):  # the autotuner's decorator wants one
        return None

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def target(capability: int):
    """Have Triton compile for a compute capability: for a kernel's warmup(), not for launches."""
    from triton.runtime import driver

    before = dict(vars(driver))
    driver.set_active(_Driver(capability))
    try:
        yield
    finally:
        vars(driver).update(before)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel, and what can be read from it; print it for a report.

    registers and stack_bytes (spills) are a thread's, shared_bytes a program's.
    """

    name: str
    capability: int
    triton: str
    num_warps: int
    ptx: str = dataclasses.field(repr=False)
    cubin: bytes = dataclasses.field(repr=False)
    registers: int
    stack_bytes: int
    shared_bytes: int

    @functools.cached_property
    def mma(self) -> dict[str, int]:
        """Tensor-core instructions in the PTX by shape and types, as {"m16n8k8.f32.f16.f16.f32": 512}."""
        found = re.findall(
            r"(?:mma\.sync\.aligned|wgmma\.mma_async\.sync\.aligned)\.(m\d+n\d+k\d+)((?:\.[a-z][\w:]*)+)|(tcgen05\.mma)\b",
            self.ptx,
        )
        return dict(Counter(shape + types.replace(".row.col", "") + other for shape, types, other in found))

    def count(self, instruction: str) -> int:
        """How often an instruction that starts so is in the PTX: "fma.rn.f32", "ldmatrix", "cp.async.cg"."""
        return len(re.findall(rf"(?<![\w.]){re.escape(instruction)}\b", self.ptx))

    @property
    def blocks_per_sm(self) -> int:
        """Programs that fit one multiprocessor."""
        return sass.blocks_per_sm(self.capability, self.num_warps, self.registers, self.shared_bytes)

    @functools.cached_property
    def pipe_mix(self) -> dict[str, int]:
        """Instructions of the hottest loop by pipe; see sass.py. Empty where there is no loop."""
        return sass.pipe_mix(sass.hottest_loop(sass.parse(sass.listing(self.cubin))))

    def __str__(self) -> str:
        mma = ", ".join(f"{count} {shape}" for shape, count in self.mma.items()) or "none"
        copies = sum(self.count(f"cp.async.{kind}") for kind in ("ca", "cg", "bulk"))
        others = f"{self.count('fma.rn.f32')} fma.rn.f32, {self.count('ldmatrix')} ldmatrix, {copies} cp.async"
        total = sum(self.pipe_mix.values())
        mix = ", ".join(f"{pipe} {count}" for pipe, count in self.pipe_mix.items())
        lines = {
            "kernel": f"{self.name} for sm_{self.capability}, Triton {self.triton}",
            "tensor cores": mma,
            "other PTX": others,
            "registers": f"{self.registers} a thread, and {self.stack_bytes} bytes of stack, where spills go",
            "shared memory": f"{self.shared_bytes} bytes a program of {self.num_warps} warps",
            "fit an SM": f"{self.blocks_per_sm} programs, {self.blocks_per_sm * self.num_warps} warps",
            "hottest loop": f"{total} instructions: {mix}" if total else "none",
        }
        return "\n".join(f"{title:14} {text}" for title, text in lines.items())


def _plain(kernel) -> tuple[Any, dict[str, Any]]:
    """The kernel under its decorators, and the first configuration of an autotuner among them."""
    first: dict[str, Any] = {}
    while not hasattr(kernel, "params"):
        if configs := getattr(kernel, "configs", None):
            first |= configs[0].kwargs | {"num_warps": configs[0].num_warps, "num_stages": configs[0].num_stages}
        kernel = kernel.fn
    return kernel, first


@functools.cache
def _shorten_pointers() -> None:
    """Have LLVM address shared memory by 32 bits, which Triton 3.2 asks of it too late for a process's first kernel.

    Without, what becomes of a kernel depends on whether another was compiled before.
    """
    from triton._C.libtriton import llvm

    if turing.release(turing.triton_version()) < (3, 3):
        llvm.init_targets()
        llvm.translate_to_asm("", "nvptx64-nvidia-cuda", "sm_75", "+ptx63", ["nvptx-short-ptr"], True, False)


def compile_for(launch: Launch, capability: int, restored: bool = True) -> Compiled:
    """Compile a launch for a compute capability such as 75; tensors may be on the meta device, or just a torch.dtype.

    A kernel under triton.autotune compiles with its first configuration, for what the launch does not say; one under
    triton.heuristics needs its constants said. restored: whether dots get Turing's tensor cores under a Triton that
    lost them (turing.py). Raises what Triton raises where it cannot compile the kernel.
    """
    kernel, options = _plain(launch.kernel)
    options |= launch.constants | launch.options | turing.compile_options(capability, restored)
    _shorten_pointers()
    with target(capability):
        kernel = kernel.warmup(*launch.args, grid=(1,), **options)
    cubin = kernel.asm["cubin"]
    registers, stack_bytes = sass.resource_usage(cubin)
    return Compiled(
        kernel.metadata.name,
        capability,
        turing.triton_version(),
        kernel.metadata.num_warps,
        kernel.asm["ptx"],
        cubin,
        registers,
        stack_bytes,
        kernel.metadata.shared,
    )


# The command ---------------------------------------------------------------------------------------------------------

_SHIPPED = {name: f"flashattn.launches:{name}" for name in ("forward", "dkdv", "dq")}
_POINTERS = {
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i8": torch.int8,
    "*i16": torch.int16,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
_SCALARS = {"i32": 3, "i32:16": 16, "i64": 2**33 + 1, "i64:16": 2**33, "fp32": 0.5}  # a value of each kind
_LITERALS = {"True": True, "False": False, "None": None}


def _value(text: str) -> Any:
    """A number, True, False, None or a type of the signature; else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return (_POINTERS | _SCALARS | _LITERALS).get(text, text)


def _load(spec: str) -> Any:
    """The object that FILE.py:NAME or MODULE:NAME names."""
    source, colon, name = _SHIPPED.get(spec, spec).rpartition(":")
    if not colon:
        raise ValueError(f"accepted are {', '.join(_SHIPPED)}, FILE.py:NAME and MODULE:NAME")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    sys.path.insert(0, str(Path(source).resolve().parent))  # as if the file were run
    module_spec = importlib.util.spec_from_file_location(f"_codegen_{Path(source).stem}", source)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def _names(launches: list[Launch]) -> list[str]:
    """The kernels' names, with what one does and not all: dkdv_kernel, or dkdv_kernel_WITH_DK and _WITH_DV."""
    done = [{name for name, value in launch.constants.items() if value is True} for launch in launches]
    own = [sorted(names - set.intersection(*done)) for names in done]
    return ["_".join([_plain(launch.kernel)[0].__name__, *names]) for launch, names in zip(launches, own, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashattn.codegen",
        description="Compile a Triton kernel for an NVIDIA architecture, with no GPU, and show what became of it.",
        epilog="KERNEL is one of the library's (forward, dkdv, dq; VALUES are then head_dim, causal, dtype, "
        "block_m, block_n, num_warps, num_stages), or FILE.py:NAME or MODULE:NAME with the types of its arguments, as "
        '"*fp16, *fp32, i32, i32:16, fp32, 1": pointers, numbers (:16 divisible by 16), and values as they are.',
    )
    parser.add_argument("--arch", default="sm_75", help="sm_75 (the default), sm_80, sm_86, sm_89, sm_90, ...")
    parser.add_argument("--stock", action="store_true", help="on sm_75: as Triton does it, tensor cores or not")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write PTX, cubin and SASS there")
    parser.add_argument("kernel", metavar="KERNEL")
    parser.add_argument("signature", nargs="?", help="of FILE.py:NAME: the types of its arguments but the constants")
    parser.add_argument("values", nargs="*", default=[], metavar="NAME=VALUE", help="constants and compiler options")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET: got 1, accepted is no value: nothing compiles under the interpreter")
    capability = re.fullmatch(r"sm_?(\d+)a?", options.arch)
    if not capability or int(capability[1]) not in sass.MULTIPROCESSORS:
        known = ", ".join(f"sm_{number}" for number in sass.MULTIPROCESSORS)
        parser.error(f"--arch: got {options.arch}, accepted are {known}")
    if options.signature and "=" in options.signature:
        options.values.insert(0, options.signature)
        options.signature = None
    if wrong := [text for text in options.values if "=" not in text]:
        parser.error(f"{wrong[0]}: a value is given as NAME=VALUE")
    values = {name: _value(text) for name, _, text in (text.partition("=") for text in options.values)}
    capability = int(capability[1])
    if capability >= 100 and turing.release(turing.triton_version()) < (3, 3):  # it would end the process
        parser.error(f"--arch: got {options.arch}, which Triton {turing.triton_version()} does not compile for")
    try:
        with target(capability):  # a file may ask for the device as it is imported
            found = _load(options.kernel)
        if options.kernel in _SHIPPED:
            launches = found(capability=capability, **values)
        elif hasattr(found, "fn"):
            args = [_value(text.strip()) for text in (options.signature or "").split(",") if text.strip()]
            if wrong := [x for x in args if isinstance(x, str)]:
                parser.error(f"{wrong[0]}: accepted are {', '.join(_POINTERS | _SCALARS)} and values")
            launches = [Launch(found, 1, tuple(args), values, {})]
        else:
            parser.error(f"{options.kernel}: is {type(found).__name__}, accepted is a Triton kernel")
        compiled = [compile_for(launch, capability, restored=not options.stock) for launch in launches]
        compiled = [dataclasses.replace(one, name=name) for one, name in zip(compiled, _names(launches), strict=True)]
    except Exception as error:  # a file's own, a wrong argument, or the compiler's, which raises whatever it likes
        lines = str(error).strip().splitlines() or [""]
        parser.exit(1, f"{options.kernel}: {type(error).__name__}: {lines[-1]}\n")
    print(*compiled, sep="\n\n")
    for one in compiled if options.save else ():
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / f"{one.name}.ptx").write_text(one.ptx)
        (options.save / f"{one.name}.cubin").write_bytes(one.cubin)
        (options.save / f"{one.name}.sass").write_text(sass.listing(one.cubin))


if __name__ == "__main__":
    main()

"""Compile a kernel launch for any NVIDIA architecture, with no GPU at hand, and look at the code.

python -m flashattn.codegen --arch sm_75 forward head_dim=128 causal=True
python -m flashattn.codegen --arch sm_75 mine.py:matmul "*fp16, *fp16, *fp32, i32, i32" BLOCK=64 num_warps=8
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import sass, turing
from .launcher import Launch

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

    if turing.triton_release() < (3, 3):
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


def _value(text: str, types: dict[str, Any]) -> Any:
    """A number, True, False, None or one of the types; else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return (_LITERALS | types).get(text, text)


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
    values = {name: _value(text, {}) for name, _, text in (text.partition("=") for text in options.values)}
    capability = int(capability[1])
    if capability >= 100 and turing.triton_release() < (3, 3):  # it would end the process
        parser.error(f"--arch: got {options.arch}, which Triton {turing.triton_version()} does not compile for")
    try:
        with target(capability):  # a file may ask for the device as it is imported
            found = _load(options.kernel)
        if options.kernel in _SHIPPED:
            launches = found(capability=capability, **values)
        elif hasattr(found, "fn"):
            types = _POINTERS | _SCALARS
            args = [_value(text.strip(), types) for text in (options.signature or "").split(",") if text.strip()]
            if wrong := [x for x in args if isinstance(x, str)]:
                parser.error(f"{wrong[0]}: accepted are {', '.join(types)} and values")
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

"""Tensor cores on Turing (sm_75) for the Triton releases that dropped them.

Up to 3.2 Triton compiles a dot of fp16 for sm_75 to `mma.sync.m16n8k8`. From 3.3 on the pass that lays a dot out for
tensor cores leaves out everything below sm_80, and the dot becomes scalar FMAs, though the code that lowers
Turing's layout is still there. So a kernel is taken to TTGIR as for sm_80, with no pipeline; in that text the target
becomes sm_75 and the layout Turing's own, and from there on Triton compiles for sm_75 as before. docs/turing.md
tells it in full.

The library's own kernels take this way by themselves, `enable()` opens it to every other kernel. Both go by an option
of the compilation, so that Triton's caches, on disk and in memory, keep the two kinds of a kernel apart.
"""

import dataclasses
import functools
import importlib
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch

# The releases of which the restored code was counted (docs/turing.md).
RESTORED = ("3.3.0", "3.3.1", "3.4.0", "3.5.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
OPTION = "turing_mma"  # the name of the launch option, and of the field among the options of a compilation

_enabled = False


def triton_version() -> str:
    """Of the Triton that is imported: its distribution has other names on Windows and in nightly builds."""
    import triton

    return triton.__version__


def release(version: str) -> tuple[int, ...]:
    """(3, 6, 0) for "3.6.0", "3.6.0+git1234" and "3.6.0.post22"; () for what is no version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split(".")))[:3] if found else ()


def triton_release() -> tuple[int, ...]:
    """triton_version() as numbers, to compare."""
    return release(triton_version())


def code_path(capability: int) -> str:
    """How fp16 dots of the library's kernels compile for a compute capability under this Triton.

    "stock": as Triton does it, on tensor cores where the GPU has them. "restored": on Turing's tensor cores, by this
    module. "scalar": on the FMA units, since this Triton leaves the GPU's tensor cores out.
    """
    triton = triton_release()
    if capability >= 80 or triton < (3, 3):
        return "stock"
    return "restored" if capability == 75 and ".".join(map(str, triton)) in RESTORED else "scalar"


def compile_options(capability: int, restored: bool = True) -> dict[str, bool]:
    """The options with which a kernel compiles for a capability on the restored path, where there is one, or without.

    To be given to a launch or a warm-up beside the kernel's own; empty where Triton needs no help.
    """
    if code_path(capability) != "restored":
        return {}
    _install()
    return {OPTION: restored}


@functools.cache
def launch_options(device_index: int) -> dict[str, bool]:
    """compile_options() for the library's own kernels on a GPU, which is the current one."""
    arch = _target_arch()
    return compile_options(arch) if isinstance(arch, int) else {}


def _target_arch() -> int | str:
    """What Triton compiles for on the current device: a compute capability, or the name of an AMD architecture."""
    from triton.runtime import driver

    return driver.active.get_current_target().arch


# Installing ----------------------------------------------------------------------------------------------------------


@functools.cache
def _install() -> None:
    """Teach Triton's CUDA backend the option; a compilation without it goes as ever."""
    from triton.backends import backends

    backend = backends["nvidia"].compiler
    backend.parse_options = _with_option(backend.parse_options)
    backend.add_stages = _with_restored_stages(backend.add_stages)


def _with_option(stock_parse_options):
    @functools.wraps(stock_parse_options)
    def parse_options(self, opts):
        options = stock_parse_options(self, opts)
        on = opts.get(OPTION, _enabled) and self.target.arch == 75 and options.arch == "sm75"
        if on or OPTION in opts:
            object.__setattr__(options, OPTION, on)  # frozen; what its __dict__ holds enters the key on disk
        return options

    return parse_options


def _with_restored_stages(stock_add_stages):
    @functools.wraps(stock_add_stages)
    def add_stages(self, stages, options, *language):
        stock_add_stages(self, stages, options, *language)
        if getattr(options, OPTION, False) and "ttir" in stages:  # Gluon kernels say their layouts themselves
            _restore(self, stages, options)

    return add_stages


def _restore(backend, stages, options) -> None:
    """Have the stages from TTIR to LLVM IR compile fp16 dots for tensor cores; what fails so compiles as ever."""
    stock_ttgir, stock_llir = stages["ttgir"], stages["llir"]
    as_sm80 = dataclasses.replace(options, num_stages=1)  # more would pipeline with cp.async, which sm_75 lacks
    ttir = None

    def ttgir(module, metadata):
        nonlocal ttir
        text = str(module)
        if not _wants_tensor_cores(text):
            return stock_ttgir(module, metadata)
        try:
            made = backend.make_ttgir(_parsed(_unpipelined(text), module.context), metadata, as_sm80, 80)
            made = _parsed(_as_turing(str(made)), module.context)
        except RuntimeError as error:
            _warn_failed(_name(text), str(error))
            return stock_ttgir(module, metadata)
        ttir = text
        return made

    def llir(module, metadata):
        if ttir is None:
            return stock_llir(module, metadata)
        try:
            return stock_llir(module, metadata)
        except RuntimeError as error:
            _warn_failed(_name(ttir), str(error))
            return stock_llir(stock_ttgir(_parsed(ttir, module.context), metadata), metadata)

    stages["ttgir"], stages["llir"] = ttgir, llir


def _parsed(text: str, context):
    from triton._C.libtriton import ir

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "module.mlir")
        file.write_text(text)
        module = ir.parse_mlir_module(str(file), context)
    module.context = context  # which has to live as long as the module does
    return module


# Text of a module ----------------------------------------------------------------------------------------------------

# `%c = tt.dot %a, %b, %acc, inputPrecision = tf32 : tensor<128x64xf16> * tensor<64x64xf16> -> tensor<128x64xf32>`
_OPERATION = re.compile(r"\s*%\S+ = tt\.dot(_scaled)? ")  # at the start of a line: a string may say the same
_DOT = re.compile(r"tt\.dot (.*) : tensor<[\dx]*x(\w+)> \* tensor<[\dx]*x(\w+)> -> tensor<[\dx]*x(\w+)>")
_LOOP = re.compile(r"^\s*\} \{.*tt\..*$", re.MULTILINE)  # a loop's last line, with its attributes
_TARGET = re.compile(r'(?<=ttg\.target = )"cuda:80"')
_LAYOUT = re.compile(r"(?<=#ttg\.nvidia_mma<\{versionMajor = 2, versionMinor = )0")


def _name(text: str) -> str:
    found = re.search(r"tt\.func public @(\w+)", text)
    return found[1] if found else "a kernel"


def _wants_tensor_cores(ttir: str) -> bool:
    """Whether a kernel has a dot for Turing's tensor cores, and none that would be compiled for sm_80's."""
    wanted = False
    for line in ttir.splitlines():
        if not _OPERATION.match(line):
            continue
        found = _DOT.search(line)
        if found and found[2] == found[3] == "f16" and found[4] in ("f16", "f32"):
            wanted = True
        elif not (found and found[2] == found[3] == "f32" and "inputPrecision" not in found[1]):  # ieee is not printed
            _warn_no_instruction(_name(ttir), _kind(found))
            return False
    return wanted


def _kind(dot: re.Match | None) -> str:
    if dot is None:
        return "scaled operands"
    precision = re.search(r"inputPrecision = (\w+)", dot[1])
    operands = dot[2] if dot[2] == dot[3] else f"{dot[2]} and {dot[3]}"
    return f"{operands} in {precision[1].upper()}" if operands == "f32" and precision else operands


def _unpipelined(ttir: str) -> str:
    """Without the stages and warp specialisation that a loop may ask for by itself."""

    def plain(loop: re.Match) -> str:
        attributes = re.sub(r"(, )?tt\.warp_specialize\b( = true)?", "", loop[0])  # the last: they are in order
        return re.sub(r"tt\.num_stages = \d+ ", "tt.num_stages = 1 ", attributes)

    return _LOOP.sub(plain, ttir)


def _as_turing(ttgir: str) -> str:
    """A module for sm_80 made one for sm_75, with Turing's shape of the same MMA: m16n8k8."""
    for_sm75, targets = _TARGET.subn('"cuda:75"', ttgir)
    turing, layouts = _LAYOUT.subn("1", for_sm75)
    if not (targets and layouts):
        raise RuntimeError(f"no tensor-core layout to change ({targets} targets, {layouts} layouts)")
    return turing


# Warnings, each once a process, whatever the filters -----------------------------------------------------------------


@functools.cache
def _warn_no_instruction(name: str, operands: str) -> None:
    warnings.warn(
        f"flashattn.turing: {name} has a dot of {operands}, for which Turing's tensor cores have no instruction in "
        "Triton: the kernel is compiled as stock Triton compiles it. Dots of fp16, and of fp32 with "
        'input_precision="ieee", would not stand in the way',
        stacklevel=2,
    )


@functools.cache
def _warn_failed(name: str, error: str) -> None:
    warnings.warn(
        f"flashattn.turing: {name} does not compile for Turing's tensor cores under Triton {triton_version()} "
        f"({error}): it is compiled as stock Triton compiles it",
        stacklevel=2,
    )


@functools.cache
def warn_scalar(gpu: str) -> None:
    """Say, once a process, that a GPU's tensor cores are out of reach of this Triton, what it costs and what to do."""
    warnings.warn(
        f"flashattn: Triton {triton_version()} does not use the tensor cores of {gpu}, and how to restore them there "
        "is not known: 16-bit dots run some 17 times slower. On Turing, use Triton 3.2.0 or one of "
        f"{', '.join(RESTORED)}.",
        stacklevel=2,
    )


# Every kernel of the process -----------------------------------------------------------------------------------------


class _Enabled:
    """What enable() returns: on leaving, whatever was in force before is in force again."""

    def __init__(self, before: bool):
        self._before = before

    def __enter__(self) -> "_Enabled":
        return self

    def __exit__(self, *_) -> None:
        _set_enabled(self._before)


def enable() -> _Enabled:
    """Compile the fp16 dots of every Triton kernel in this process for Turing's tensor cores, from now on.

    Also a context manager: `with flashattn.turing.enable(): ...`. A kernel with a dot for which Turing has no
    instruction (bf16, TF32, fp64, int8) compiles as without it, and a warning says so once; IEEE fp32 dots stay on the
    FMA units. Functions under torch.compile are compiled anew, in this process and not in worker processes.
    It belongs to the process, not to a thread; it looks at the GPU, so call it in each process, after a fork. It does
    nothing with Triton 3.2, which needs no help, nor on another GPU. A Triton that this module does not know is left
    as it is, and a warning names it.
    """
    before = _enabled
    if _turing_at_hand():
        if code_path(75) == "restored":
            _set_enabled(True)
        elif code_path(75) == "scalar":
            warn_scalar("Turing GPUs")
    return _Enabled(before)


def disable() -> None:
    """Undo enable(): kernels other than the library's own compile as they do without it."""
    _set_enabled(False)


def _turing_at_hand() -> bool:
    try:
        if _target_arch() == 75:
            return True
    except Exception:  # no Triton, no GPU, a driver in disorder: each release raises something else
        return False
    return any(torch.cuda.get_device_capability(index) == (7, 5) for index in range(torch.cuda.device_count()))


def _set_enabled(on: bool) -> None:
    global _enabled
    if on == _enabled:
        return
    _install()
    _give_option()
    _enabled = on
    _isolate_inductor(on)


@functools.cache
def _give_option() -> None:
    """While enabled, launch as if the caller had written the option, and tune apart from what was tuned without it."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch, tune = JITFunction.run, Autotuner.run

    @functools.wraps(launch)
    def run(self, *args, **kwargs):
        if _enabled and _target_arch() == 75:
            kwargs.setdefault(OPTION, True)  # it enters the key under which a kernel is kept in memory
        return launch(self, *args, **kwargs)

    @functools.wraps(tune)
    def run_tuned(self, *args, **kwargs):
        if not _enabled or _target_arch() != 75:
            return tune(self, *args, **kwargs)
        stock = {name: vars(self)[name] for name in ("cache", "cache_results") if name in vars(self)}
        self.cache, self.cache_results = (
            vars(self).setdefault("turing_cache", {}),
            False,
        )  # none on disk: no key differs
        try:
            return tune(self, *args, **kwargs)
        finally:
            vars(self).update(stock)

    JITFunction.run, Autotuner.run = run, run_tuned


# torch.compile -------------------------------------------------------------------------------------------------------

_inductor_before: dict[str, object] = {}


def _isolate_inductor(on: bool) -> None:
    """Compile in this process, where the backend knows the option, under a cache key of its own; forget what there is.

    cache_key_tag enters the keys of Inductor's caches of graphs; its kernels are in Triton's, which see the option.
    """
    from torch._inductor import config as inductor
    from torch.compiler import config as compiler

    if on:
        _inductor_before.update(threads=inductor.compile_threads, tag=compiler.cache_key_tag)
        inductor.compile_threads = 1
        compiler.cache_key_tag = f"{compiler.cache_key_tag}+{OPTION}"
    else:
        inductor.compile_threads = _inductor_before["threads"]
        compiler.cache_key_tag = _inductor_before["tag"]
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if "torch._inductor.utils" in sys.modules:
        sys.modules["torch._inductor.utils"].clear_inductor_caches()


# Status --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Status:
    """What status() found; a field that does not apply is None. Print it for the same in words."""

    gpu: str | None  # the current CUDA device
    capability: int | None  # 75 on Turing
    triton: str | None
    path: str | None  # of the library's kernels: "stock", "restored" or "scalar", see code_path()
    mma: int | None  # tensor-core instructions, the least of forward, dK/dV and dQ for float16, compiled for this GPU
    enabled: bool  # whether other kernels get Turing's tensor cores too

    def __str__(self) -> str:
        if self.gpu is None:
            return "no CUDA GPU: nothing to restore"
        gpu = f"{self.gpu} (sm_{self.capability})"
        if self.triton is None:
            return f"{gpu}, no Triton: attention runs on the PyTorch reference"
        if self.path is None:
            return f"{gpu} is older than Turing: attention runs on the PyTorch reference"
        path = {
            "stock": "as Triton compiles them",
            "restored": "on the tensor cores, restored by flashattn",
            "scalar": "on the FMA units, since this Triton does not use the tensor cores of this GPU",
        }[self.path]
        count = f"{self.mma} tensor-core instructions in each kernel, or more"
        if self.mma is None:
            count = "the kernels are not compiled here"
        others = "; other kernels restored too" if self.enabled else ""
        return f"{gpu}, Triton {self.triton}: fp16 dots {path}; {count}{others}"


def status() -> Status:
    """GPU, Triton, the path that the library's kernels take, and how many tensor-core instructions are in their code.

    Compiles the kernels unless Triton's cache has them: some seconds.
    """
    gpu = capability = triton = path = mma = None
    if torch.cuda.is_available():
        gpu, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        capability = 10 * major + minor
    try:
        triton = triton_version()
    except ImportError:
        pass
    if gpu and triton and capability >= 75:  # for less Triton 3.2 ends the process as it compiles
        path = code_path(capability)
        mma = _count_mma(capability)
    return Status(gpu, capability, triton, path, mma, _enabled)


def _count_mma(capability: int) -> int | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    codegen, launches = (importlib.import_module(f"flashattn.{name}") for name in ("codegen", "launches"))  # above this
    made = [one for pass_ in ("forward", "dkdv", "dq") for one in launches.launches(pass_, capability=capability)]
    try:
        return min(sum(codegen.compile_for(launch, capability).mma.values()) for launch in made)
    except Exception:  # a Triton that is not known may not compile them, and raise whatever it likes
        return None

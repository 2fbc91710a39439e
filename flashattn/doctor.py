"""What this machine has, which path attention takes on it, and what to do about each thing that is wrong.

`python -m flashattn.doctor` prints it. It exits with 1 where something stops the library or slows it down, else with
0; so on a machine with no sign of an NVIDIA GPU, where attention runs in PyTorch, or interpreted, as it should.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch" or __name__ != "__main__":
        raise
    print("torch        not installed\n\n1. Wrong: torch is not installed, and all of flashattn needs it")
    print("   To do: pip install 'torch>=2.6', which pip install -e . in a checkout does too")
    sys.exit(1)

from . import configs, interface, measure, turing
from .turing import release

NOTEBOOKS = {"Kaggle": "KAGGLE_KERNEL_RUN_TYPE", "Colab": "COLAB_RELEASE_TAG"}  # by a variable that is set there
ANOTHER_GPU = {
    "Kaggle": 'choose the accelerator "GPU T4 x2"; for a kernel that is pushed, "machine_shape": "NvidiaTeslaT4" in '
    "kernel-metadata.json",
    "Colab": 'choose "T4 GPU" under Runtime, Change runtime type',
    "": "use a GPU of Turing (sm_75) or later",
}
# What Triton builds its launchers with, and how to come by it.
LAUNCHER = {
    "libcuda.so.1": "sudo ldconfig FOLDER, or export LD_LIBRARY_PATH=FOLDER TRITON_LIBCUDA_PATH=FOLDER, with the "
    "folder where it lies (on Colab /usr/lib64-nvidia)",
    "libcuda.so": "sudo ln -s libcuda.so.1 FOLDER/libcuda.so, where libcuda.so.1 lies",
    "a C compiler": "sudo apt-get install gcc, or export CC=COMPILER",
    "Python.h": "sudo apt-get install python3-dev, for this release of Python",
}
CACHES = {"TRITON_CACHE_DIR": "Triton's compiled kernels", "FLASHATTN_CACHE_DIR": "tuned tiles"}  # by what moves them
TRUE = ("1", "true", "yes", "on", "y")  # as Triton reads a variable


@dataclass(frozen=True)
class Gpu:
    """One GPU; shared_bytes is what a program may ask for, tuned the file of its tuned tiles, "" if there is none."""

    name: str
    capability: int
    shared_bytes: int
    built_for: bool  # whether torch has kernels for it
    code_path: str  # of 16-bit dots, by turing.code_path()
    tuned: str = ""

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability})"


@dataclass(frozen=True)
class Facts:
    """What gather() found. "" is what is not there; "unknown: ..." what could not be found out, and why."""

    flashattn: str
    system: str  # "Linux", "Darwin", "Windows"
    notebook: str  # a key of NOTEBOOKS
    python: str
    numpy: str
    torch: str
    torch_cuda: str  # the CUDA that torch is built for: "12.8"
    triton: str
    triton_wanted: str  # by torch's own metadata
    nvidia_device: bool  # as the system has it, whatever torch sees
    driver: str  # "550.54"
    driver_cuda: str  # the newest CUDA that the driver knows; "" where its library is not found
    gpus: tuple[Gpu, ...]
    cuda_error: str  # why torch sees no GPU
    interpreter: bool
    missing: tuple[str, ...]  # keys of LAUNCHER
    unwritable: tuple[tuple[str, str], ...]  # a key of CACHES, the folder
    cpu_backend: str
    status: turing.Status | str
    failures: tuple[str, ...]  # of a small attention: the device, and what happened


@dataclass(frozen=True)
class Finding:
    """Something that stops the library or slows it down, and what to do about it."""

    problem: str
    remedy: str


# From facts to what is wrong -----------------------------------------------------------------------------------------


def _no_gpu(f: Facts) -> Iterator[Finding]:
    if f.gpus:
        return
    if not (f.nvidia_device or f.driver_cuda):
        if f.notebook:  # elsewhere it is a machine without a GPU, with which nothing is wrong
            yield Finding(f"this {f.notebook} session has no GPU", ANOTHER_GPU[f.notebook])
    elif not f.torch_cuda:
        remedy = "install a torch that is built for CUDA; on Linux pip install --force-reinstall torch does"
        yield Finding(f"there is an NVIDIA GPU or driver, but torch {f.torch} is built without CUDA", remedy)
    elif not f.driver_cuda:
        remedy = "install the NVIDIA driver, or start the container with --gpus all; if libcuda.so.1 is there: "
        yield Finding("the driver library, libcuda.so.1, is not found", remedy + LAUNCHER["libcuda.so.1"])
    elif release(f.driver_cuda)[0] < release(f.torch_cuda)[0]:
        problem = f"the driver is too old: it knows CUDA {f.driver_cuda}, and torch {f.torch} needs {f.torch_cuda}"
        yield Finding(problem, f"update the driver, or install a torch built for CUDA {release(f.driver_cuda)[0]}")
    else:
        remedy = "unset CUDA_VISIBLE_DEVICES, and see that nvidia-smi lists the GPU"
        yield Finding(f"torch sees no GPU ({f.cuda_error})", remedy)


def _versions(f: Facts) -> Iterator[Finding]:
    package = "triton-windows" if f.system == "Windows" else "triton"
    wanted = ".".join(map(str, release(f.triton_wanted)))
    install = f"pip install '{package}=={wanted}.*'" if wanted else f"pip install {package}"
    if release(f.torch) < (2, 6):
        yield Finding(f"torch {f.torch} is too old, flashattn needs 2.6 or later", "pip install 'torch>=2.6'")
    if not f.triton and f.gpus:
        yield Finding("Triton is not installed: attention on the GPU runs on the slow PyTorch reference", install)
    elif f.triton and not release(f.triton):
        yield Finding(f"Triton cannot be imported ({f.triton})", f"{install} --force-reinstall --no-deps")
    elif f.triton and wanted and release(f.triton)[: len(release(wanted))] != release(wanted):
        problem = f"torch {f.torch} goes with Triton {wanted}, but Triton {f.triton} is installed"
        yield Finding(f"{problem}: torch.compile may break", install)
    if f.interpreter and f.gpus:
        problem = "TRITON_INTERPRET is set: the kernels are interpreted, on the CPU, and the GPU does nothing"
        yield Finding(problem, "unset TRITON_INTERPRET, before Python starts")
    if f.interpreter and (3, 2) <= release(f.triton)[:2] <= (3, 6) and release(f.numpy) >= (2, 4):
        problem = f"the interpreter of Triton {f.triton} fails with NumPy {f.numpy}, as with any from 2.4 on"
        yield Finding(problem, "pip install 'numpy<2.4'")


def _gpus(f: Facts) -> Iterator[Finding]:
    for gpu in dict.fromkeys(f.gpus):
        another = ANOTHER_GPU[f.notebook]
        if not gpu.built_for:
            problem = f"torch {f.torch} has no kernels for {gpu}: nothing runs there, the reference neither"
            yield Finding(problem, another if gpu.capability < 75 else "pip install --upgrade torch")
        elif gpu.capability < 75:
            problem = f"{gpu} is older than Turing, which the kernels need"
            yield Finding(f"{problem}: attention runs on the slow PyTorch reference", another)
        elif gpu.code_path == "scalar":
            problem = f"Triton {f.triton} does not use the tensor cores of {gpu}, and how to restore them is not known"
            known = ", ".join(("3.2.0", *turing.RESTORED))
            remedy = f"pip install torch==2.10.0 triton==3.6.0, or another torch whose Triton is one of {known}"
            yield Finding(f"{problem}: 16-bit attention runs some 17 times slower", remedy)
        elif isinstance(f.status, turing.Status) and f.status.mma == 0 and f.status.gpu == gpu.name:
            problem = f"the kernels for {gpu} came out without tensor-core instructions, so they are slow"
            yield Finding(problem, "use the torch and Triton of environment.yml, and report it with this output")


def _surroundings(f: Facts) -> Iterator[Finding]:
    launches = f.gpus and f.torch_cuda and f.system == "Linux" and release(f.triton) and not f.interpreter
    for name in f.missing if launches else ():
        yield Finding(f"Triton lacks {name}, to build what launches a kernel", LAUNCHER[name])
    for variable, folder in f.unwritable if f.gpus else ():
        yield Finding(f"{folder}, the folder of {CACHES[variable]}, cannot be written", f"export {variable}=FOLDER")
    for failure in f.failures:
        remedy = "mend first what else is found here; if this stays, please report it with the whole output"
        yield Finding(f"a small attention fails on {failure}", remedy)


def findings(facts: Facts) -> list[Finding]:
    """All that is wrong by these facts, in the order in which to mend it."""
    return [finding for check in (_no_gpu, _versions, _gpus, _surroundings) for finding in check(facts)]


def report(facts: Facts) -> str:
    """The facts, a line each, then what is wrong and what to do about it."""
    f, found = facts, findings(facts)
    rows = {
        "flashattn": f.flashattn,
        "Python": ", ".join(filter(None, (f.python, f.system, f.notebook))),
        "torch": f"{f.torch}, built {f'for CUDA {f.torch_cuda}' if f.torch_cuda else 'without CUDA'}",
        "Triton": f"{f.triton or 'not installed'}; torch asks for {f.triton_wanted or 'none'}",
        "NumPy": f.numpy,
        "driver": f"{f.driver or 'of unknown release'}, CUDA {f.driver_cuda}" if f.driver_cuda else "not found",
    }
    for index, gpu in enumerate(f.gpus):
        bf16 = "bfloat16 is computed in float16; " if gpu.capability < 80 else ""
        tuned = gpu.tuned or "none, so the shipped ones (scripts/tune.py measures them)"
        rows[f"cuda:{index}"] = f"{gpu}, {gpu.shared_bytes} bytes of shared memory; {bf16}tuned tiles: {tuned}"
    if not f.gpus:
        rows["GPU"] = f"none ({f.cuda_error})"
    rows |= {"CPU tensors": f"run on {f.cpu_backend}", "status": str(f.status)}
    lines = [f"{title:12} {text}" for title, text in rows.items()]
    for number, finding in enumerate(found, 1):
        lines += ["", f"{number}. Wrong: {finding.problem}", f"   To do: {finding.remedy}"]
    return "\n".join(lines if found else [*lines, "", "Nothing is wrong."])


# Probes: any may fail, and none may stop the others ------------------------------------------------------------------


def _probe(function, *args, otherwise=None):
    try:
        return function(*args)
    except Exception as error:  # whatever a machine in disorder raises
        return f"unknown: {_line(error)}" if otherwise is None else otherwise


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _own_version() -> str:
    try:
        return importlib.metadata.version("flashattn")
    except importlib.metadata.PackageNotFoundError:
        return "not installed, but run from its folder"


def _triton_wanted() -> str:
    """The 3.2.0 of `triton (==3.2.0) ; platform_system == "Linux"`, and the 3.8 of `triton~=3.8.0`."""
    pattern = r"(?:pytorch[-_])?triton\b[^;]*(?:==\s*([\w.+]+)|~=\s*(\d+\.\d+))"
    wanted = (re.match(pattern, x) for x in importlib.metadata.requires("torch"))
    return next((found[1] or found[2] for found in wanted if found), "")


def _nvidia_device(root: Path = Path("/")) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return (root / "dev/nvidiactl").exists() or any(vendor.read_text().strip() == "0x10de" for vendor in vendors)


def _driver_cuda() -> str:
    version = ctypes.c_int()
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuDriverGetVersion(ctypes.byref(version))  # 12040
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _visible_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that torch sees, or why it sees none."""
    try:
        torch.cuda.init()
        return tuple(map(_gpu, range(torch.cuda.device_count()))), ""
    except Exception as error:
        return (), f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}, {_line(error)}"


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    device = configs.Device(found.name, 10 * found.major + found.minor, found.shared_memory_per_block_optin)
    built_for = runs(device.capability, torch.cuda.get_arch_list())
    tuned = _probe(configs.tuned_file, device, otherwise=Path())
    path = _probe(turing.code_path, device.capability)
    return Gpu(*astuple(device), built_for, path, str(tuned) if tuned.is_file() else "")


def runs(capability: int, architectures: list[str]) -> bool:
    """Whether a GPU runs what is built for these: machine code of its major version, or PTX up to its capability."""
    built = [(kind, int(number)) for kind, number in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures))]
    fits = (n <= capability and (kind == "compute" or n // 10 == capability // 10) for kind, n in built)
    return not built or any(fits)  # AMD's have other names


def _missing() -> Iterator[str]:
    from triton.backends.nvidia import driver

    try:
        folders = driver.libcuda_dirs()  # by ldconfig, else LD_LIBRARY_PATH: not always what the loader finds
        if "cuda" in driver.libraries:  # -lcuda, as 3.2 has it
            folders = [*folders, *os.environ.get("LIBRARY_PATH", "").split(":")]
            if not any(Path(folder, "libcuda.so").exists() for folder in folders):
                yield "libcuda.so"
    except (AssertionError, OSError):  # it is not listed, or there is no ldconfig
        yield "libcuda.so.1"
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        yield "a C compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    if not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        yield "Python.h"


def _unwritable() -> Iterator[tuple[str, str]]:
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    triton = Path(os.environ.get("TRITON_CACHE_DIR", "").strip() or home / ".triton" / "cache")
    for variable, folder in zip(CACHES, (triton, configs.cache_dir()), strict=True):
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
            yield variable, str(folder)


def _trial(device: str) -> str:
    """What is wrong with a small attention on a device, forward or backward; "" where nothing is."""
    inputs = torch.randn(3, 1, 2, 80, 64).half()

    def results(backend, device):
        leaves = [x.to(device).requires_grad_() for x in inputs]
        o = interface.attention(*leaves, causal=True, backend=backend)
        return torch.cat([x.cpu() for x in (o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o)))])

    try:
        error = (results("reference", "cpu") - results("auto", device)).abs().max().item()
    except Exception as error:
        return f"{device}: {_line(error)}"
    return "" if error < 1e-2 else f"{device}: off by {error}"  # NaN is


def gather() -> Facts:
    """Look at this machine; runs a small attention on each GPU. Never raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they would say is among the facts
        return _gather()


def _gather() -> Facts:
    gpus, cuda_error = _visible_gpus()
    tried = [f"cuda:{index}" for index, gpu in enumerate(gpus) if gpu.built_for] if gpus else ["cpu"]
    interpreter = interface.HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in TRUE
    backends = {"triton": "Triton's interpreter", "reference": "the PyTorch reference"}
    commit = _probe(lambda: "commit {commit}, changed since: {dirty}".format_map(measure.commit()))
    return Facts(
        flashattn=f"{_probe(_own_version)}, {commit}",
        system=platform.system(),
        notebook=next((name for name, variable in NOTEBOOKS.items() if variable in os.environ), ""),
        python=platform.python_version(),
        numpy=_probe(importlib.metadata.version, "numpy"),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        triton=_probe(turing.triton_version) if interface.HAS_TRITON else "",
        triton_wanted=_probe(_triton_wanted, otherwise=""),
        nvidia_device=_probe(_nvidia_device, otherwise=False),
        driver=_probe(lambda: measure.gpu_state()["driver"], otherwise=""),
        driver_cuda=_probe(_driver_cuda, otherwise=""),
        gpus=gpus,
        cuda_error=cuda_error,
        interpreter=interpreter,
        missing=_probe(lambda: tuple(_missing()), otherwise=()),
        unwritable=_probe(lambda: tuple(_unwritable()), otherwise=()),
        cpu_backend=backends[interface.backend_for(torch.empty(0))],
        status=_probe(turing.status),
        failures=tuple(filter(None, map(_trial, tried))),
    )


def main() -> int:
    """Print the report; 1 where something is wrong, else 0."""
    facts = gather()
    print(report(facts))
    return int(bool(findings(facts)))


if __name__ == "__main__":
    sys.exit(main())

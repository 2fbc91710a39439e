"""What the doctor finds in made-up facts, what it finds out by itself, and the command."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import children
import pytest
import torch

from flashattn import doctor, turing
from flashattn.doctor import Facts, Gpu, findings, report

T4 = Gpu("Tesla T4", 75, 65536, built_for=True, code_path="restored")
P100 = Gpu("Tesla P100-PCIE-16GB", 60, 49152, built_for=True, code_path="scalar")
KAGGLE = Facts(  # two T4s, as Kaggle has them
    flashattn="0.1.0, commit abc123, changed since: no",
    system="Linux",
    notebook="Kaggle",
    python="3.12.12",
    numpy="2.0.2",
    torch="2.10.0+cu128",
    torch_cuda="12.8",
    triton="3.6.0",
    triton_wanted="3.6.0",
    nvidia_device=True,
    driver="580.105.08",
    driver_cuda="13.0",
    gpus=(T4, T4),
    cuda_error="",
    interpreter=False,
    missing=(),
    unwritable=(),
    cpu_backend="the PyTorch reference",
    status=turing.Status("Tesla T4", 75, "3.6.0", "restored", 512, False),
    failures=(),
)
PINNED = replace(
    KAGGLE,
    notebook="",
    numpy="2.3.5",
    torch="2.6.0+cu124",
    torch_cuda="12.4",
    triton="3.2.0",
    triton_wanted="3.2.0",
    driver_cuda="12.4",
    gpus=(replace(T4, code_path="stock"),),
    status=turing.Status("Tesla T4", 75, "3.2.0", "stock", 512, False),
)
BLIND = replace(PINNED, gpus=(), cuda_error="RuntimeError: no CUDA GPUs are available", status="no CUDA GPU")
LAPTOP = replace(BLIND, system="Darwin", torch_cuda="", triton="", nvidia_device=False, driver="", driver_cuda="")
ALL_MISSING = tuple(doctor.LAUNCHER)
IN_THE_WAY = {"missing": ALL_MISSING, "unwritable": tuple((variable, "/frozen") for variable in doctor.CACHES)}


def only_finding(facts):
    (finding,) = findings(facts)
    return finding


@pytest.mark.parametrize(
    "facts",
    [
        KAGGLE,
        PINNED,
        LAPTOP,
        replace(PINNED, triton="3.2.0+git1234"),
        replace(PINNED, triton="3.2.0.post22", system="Windows"),
        replace(PINNED, torch="2.6.0", triton_wanted=""),
        replace(KAGGLE, torch_cuda="13.0"),
        replace(KAGGLE, numpy="2.4.1"),
        replace(LAPTOP, interpreter=True, triton="3.2.0", numpy="2.3.5"),
        replace(LAPTOP, interpreter=True, triton="3.7.1", triton_wanted="3.7.1", numpy="2.4.6"),
        replace(KAGGLE, gpus=(replace(P100, name="NVIDIA L4", capability=89, code_path="stock"),), status="unknown"),
        replace(KAGGLE, status=replace(KAGGLE.status, mma=None)),
        # What would be in a GPU's way, where there is none, or nothing is launched on it
        replace(LAPTOP, system="Linux", torch_cuda="12.4", triton="3.2.0", **IN_THE_WAY),
        replace(KAGGLE, system="Windows", missing=ALL_MISSING),
        replace(KAGGLE, torch_cuda="", missing=ALL_MISSING),
    ],
)
def test_a_healthy_machine(facts):
    assert findings(facts) == []
    assert report(facts).endswith("\n\nNothing is wrong.")


CASES = {
    "accelerator off, Kaggle": (
        replace(LAPTOP, notebook="Kaggle"),
        "this Kaggle session has no GPU",
        ['"GPU T4 x2"', '"machine_shape": "NvidiaTeslaT4"'],
    ),
    "accelerator off, Colab": (replace(LAPTOP, notebook="Colab"), "this Colab session has no GPU", ['"T4 GPU"']),
    "torch without CUDA": (
        replace(BLIND, torch="2.6.0+cpu", torch_cuda="", driver_cuda=""),
        "torch 2.6.0+cpu is built without CUDA",
        ["pip install --force-reinstall torch"],
    ),
    "no driver library": (
        replace(BLIND, driver_cuda=""),
        "libcuda.so.1, is not found",
        ["install the NVIDIA driver", "sudo ldconfig FOLDER", "export LD_LIBRARY_PATH=FOLDER", "--gpus all"],
    ),
    "driver too old": (
        replace(BLIND, driver_cuda="11.4"),
        "the driver is too old: it knows CUDA 11.4, and torch 2.6.0+cu124 needs 12.4",
        ["update the driver", "built for CUDA 11"],
    ),
    "hidden": (
        replace(BLIND, nvidia_device=False, cuda_error="CUDA_VISIBLE_DEVICES=, RuntimeError: none"),
        "torch sees no GPU (CUDA_VISIBLE_DEVICES=, RuntimeError: none)",
        ["unset CUDA_VISIBLE_DEVICES", "nvidia-smi"],
    ),
    "torch too old": (replace(PINNED, torch="2.5.1"), "torch 2.5.1 is too old", ["pip install 'torch>=2.6'"]),
    "no Triton": (
        replace(KAGGLE, triton="", missing=ALL_MISSING),
        "Triton is not installed: attention on the GPU runs on the slow PyTorch reference",
        ["pip install 'triton==3.6.0.*'"],
    ),
    "no Triton, none asked for": (replace(PINNED, triton="", triton_wanted=""), "not installed", ["install triton"]),
    "no Triton on Windows": (
        replace(KAGGLE, system="Windows", triton=""),
        "Triton is not installed",
        ["pip install 'triton-windows==3.6.0.*'"],
    ),
    "broken Triton": (
        replace(KAGGLE, triton="unknown: ImportError: libtriton.so 3"),
        "Triton cannot be imported (unknown: ImportError: libtriton.so 3)",
        ["pip install 'triton==3.6.0.*' --force-reinstall"],
    ),
    "wrong pair": (
        replace(KAGGLE, triton="3.2.0"),
        "torch 2.10.0+cu128 goes with Triton 3.6.0, but Triton 3.2.0 is installed",
        ["pip install 'triton==3.6.0.*'"],
    ),
    "wrong pair, a nightly build": (
        replace(KAGGLE, triton_wanted="3.7.0+git1234"),
        "goes with Triton 3.7.0, but",
        ["pip install 'triton==3.7.0.*'"],
    ),
    "wrong pair with no GPU": (replace(LAPTOP, triton="3.6.0"), "goes with Triton 3.2.0", ["'triton==3.2.0.*'"]),
    "interpreter on a GPU": (
        replace(KAGGLE, interpreter=True, missing=ALL_MISSING),
        "TRITON_INTERPRET is set",
        ["unset TRITON_INTERPRET"],
    ),
    "interpreter and NumPy, 3.2": (
        replace(LAPTOP, interpreter=True, triton="3.2.0", numpy="2.4.0"),
        "the interpreter of Triton 3.2.0 fails with NumPy 2.4.0",
        ["pip install 'numpy<2.4'"],
    ),
    "interpreter and NumPy, 3.6": (
        replace(LAPTOP, interpreter=True, triton="3.6.1", triton_wanted="3.6.1", numpy="2.10.0"),
        "the interpreter of Triton 3.6.1 fails with NumPy 2.10.0",
        ["pip install 'numpy<2.4'"],
    ),
    "P100 that torch has left": (
        replace(KAGGLE, gpus=(replace(P100, built_for=False),)),
        "torch 2.10.0+cu128 has no kernels for Tesla P100-PCIE-16GB (sm_60): nothing runs there",
        ['"GPU T4 x2"', '"machine_shape": "NvidiaTeslaT4"'],
    ),
    "P100 on Kaggle": (
        replace(KAGGLE, gpus=(P100,)),
        "Tesla P100-PCIE-16GB (sm_60) is older than Turing",
        ['"GPU T4 x2"'],
    ),
    "V100": (
        replace(PINNED, gpus=(Gpu("Tesla V100", 70, 98304, True, "stock"),)),
        "Tesla V100 (sm_70) is older than Turing, which the kernels need: attention runs on the slow PyTorch reference",
        ["use a GPU of Turing (sm_75) or later"],
    ),
    "GPU that torch does not know yet": (
        replace(PINNED, gpus=(Gpu("NVIDIA B200", 100, 232448, False, "stock"),)),
        "no kernels for NVIDIA B200 (sm_100)",
        ["pip install --upgrade torch"],
    ),
    "Triton unknown": (
        replace(KAGGLE, triton="3.10.0", triton_wanted="3.10.0", gpus=(replace(T4, code_path="scalar"),) * 2),
        "Triton 3.10.0 does not use the tensor cores of Tesla T4 (sm_75), and how to restore them is not known: "
        "16-bit attention runs some 17 times slower",
        ["pip install torch==2.10.0 triton==3.6.0", "3.2.0, 3.3.0", turing.RESTORED[-1]],
    ),
    "tensor cores lost all the same": (
        replace(KAGGLE, status=replace(KAGGLE.status, mma=0)),
        "the kernels for Tesla T4 (sm_75) came out without tensor-core instructions",
        ["environment.yml", "report it"],
    ),
    "Triton finds no driver library": (
        replace(KAGGLE, missing=("libcuda.so.1",)),
        "Triton lacks libcuda.so.1",
        ["sudo ldconfig FOLDER", "export LD_LIBRARY_PATH=FOLDER", "/usr/lib64-nvidia"],
    ),
    "Triton finds it by another name": (
        replace(PINNED, missing=("libcuda.so",)),
        "Triton lacks libcuda.so,",
        ["sudo ln -s libcuda.so.1 FOLDER/libcuda.so"],
    ),
    "no compiler": (
        replace(KAGGLE, missing=("a C compiler",)),
        "Triton lacks a C compiler",
        ["apt-get install gcc", "export CC="],
    ),
    "no header": (replace(KAGGLE, missing=("Python.h",)), "Triton lacks Python.h", ["apt-get install python3-dev"]),
    "Triton's cache": (
        replace(KAGGLE, unwritable=(("TRITON_CACHE_DIR", "/frozen/cache"),)),
        "/frozen/cache, the folder of Triton's compiled kernels, cannot be written",
        ["export TRITON_CACHE_DIR=FOLDER"],
    ),
    "the library's cache": (
        replace(KAGGLE, unwritable=(("FLASHATTN_CACHE_DIR", "/frozen"),)),
        "/frozen, the folder of tuned tiles, cannot be written",
        ["export FLASHATTN_CACHE_DIR=FOLDER"],
    ),
    "something else": (
        replace(KAGGLE, failures=("cuda:1: RuntimeError: odd",)),
        "a small attention fails on cuda:1: RuntimeError: odd",
        ["report it"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_finding(name):
    facts, problem, remedies = CASES[name]
    finding = only_finding(facts)
    assert problem in finding.problem
    for remedy in remedies:
        assert remedy in finding.remedy
    assert report(facts).endswith(f"\n\n1. Wrong: {finding.problem}\n   To do: {finding.remedy}")


def test_all_that_is_wrong_is_found():
    facts = replace(KAGGLE, triton="3.2.0", interpreter=True, numpy="2.4.0", gpus=(T4, P100), failures=("cpu: odd",))
    found = findings(facts)
    starts = ["torch 2.10.0+cu128 goes", "TRITON_INTERPRET", "the interpreter", "Tesla P100", "a small attention"]
    assert all(finding.problem.startswith(start) for finding, start in zip(found, starts, strict=True))
    assert f"\n5. Wrong: {found[4].problem}\n" in report(facts)


def test_report_of_a_t4():
    tuned = replace(T4, tuned="/cache/Tesla_T4.json")
    lines = dict(line.split(maxsplit=1) for line in report(replace(KAGGLE, gpus=(T4, tuned))).splitlines() if line)
    assert lines["torch"] == "2.10.0+cu128, built for CUDA 12.8"
    assert lines["Triton"] == "3.6.0; torch asks for 3.6.0"
    assert lines["driver"] == "580.105.08, CUDA 13.0"
    assert lines["cuda:0"].startswith("Tesla T4 (sm_75), 65536 bytes of shared memory; bfloat16 is computed in float16")
    assert "tuned tiles: none" in lines["cuda:0"] and "scripts/tune.py" in lines["cuda:0"]
    assert lines["cuda:1"].endswith("tuned tiles: /cache/Tesla_T4.json")
    assert lines["status"] == str(KAGGLE.status)
    assert "GPU" not in lines


def test_report_without_a_gpu():
    text = report(LAPTOP)
    for part in (
        "driver       not found",
        "built without CUDA",
        "not installed; torch asks for 3.2.0\n",
        LAPTOP.cuda_error,
        LAPTOP.status,
    ):
        assert part in text
    assert "bfloat16" not in text
    assert "torch asks for none" in report(replace(LAPTOP, triton_wanted=""))


def test_bfloat16_is_told_only_of_gpus_without_it():
    assert "bfloat16" not in report(replace(KAGGLE, gpus=(replace(T4, capability=80),)))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.6.0", (3, 6, 0)),
        ("2.10.0+cu128", (2, 10, 0)),
        ("3.5.1.post22", (3, 5, 1)),
        ("3.5.1.22", (3, 5, 1)),
        ("3.7.0a0+git1", (3, 7, 0)),
        ("", ()),
        ("unknown: PackageNotFoundError: 3", ()),
    ],
)
def test_release(version, expected):
    assert doctor.release(version) == expected


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        (75, ["sm_75"], True),
        (75, ["sm_70", "sm_80"], True),  # machine code of the same major version
        (70, ["sm_75", "sm_80"], False),
        (60, ["sm_70", "sm_75", "compute_90"], False),
        (100, ["sm_80", "sm_90a"], False),
        (100, ["sm_80", "compute_90"], True),
        (121, ["sm_90", "sm_120"], True),
        (75, [], True),
        (94, ["gfx942"], True),
    ],
)
def test_what_torch_is_built_for(capability, architectures, expected):
    assert doctor.runs(capability, architectures) == expected


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        (["sympy", 'triton (==3.2.0) ; platform_system == "Linux" and platform_machine == "x86_64"'], "3.2.0"),
        (["triton==3.6.0; platform_system == 'Linux'"], "3.6.0"),
        (["pytorch-triton==3.7.0+git1234; platform_system == 'Linux'"], "3.7.0+git1234"),
        (["triton~=3.8.0; platform_system == 'Linux'"], "3.8"),
        (["tritonclient==1.0", "sympy==1.13.1; extra == 'triton'"], ""),
        (["triton"], ""),
    ],
)
def test_triton_wanted(monkeypatch, requires, expected):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda package: requires)
    assert doctor._triton_wanted() == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/bus/pci/devices/0/vendor": "0x8086\n", "sys/bus/pci/devices/1/vendor": "0x10de\n"}, True),
        ({"sys/bus/pci/devices/0/vendor": "0x8086\n"}, False),
        ({"dev/nvidiactl": ""}, True),
        ({}, False),
    ],
)
def test_signs_of_an_nvidia_gpu(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert doctor._nvidia_device(tmp_path) == expected


def test_gpus_that_torch_sees(monkeypatch, tmp_path):
    found = SimpleNamespace(name="Tesla T4", major=7, minor=5, shared_memory_per_block_optin=65536)
    cuda = {
        "init": lambda: None,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: found,
        "get_arch_list": lambda: ["sm_70", "sm_80"],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(doctor.torch.cuda, name, function)
    monkeypatch.setattr(turing, "triton_version", lambda: "3.6.0")
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    assert doctor._visible_gpus() == ((T4, T4), "")
    file = tmp_path / "Tesla_T4_triton3.6.0_restored.json"
    file.write_text("{}")
    assert doctor._visible_gpus()[0][1] == replace(T4, tuned=str(file))
    monkeypatch.setattr(doctor.torch.cuda, "get_arch_list", lambda: ["sm_80"])
    assert not doctor._visible_gpus()[0][0].built_for
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(doctor.torch.cuda, "init", Mock(side_effect=RuntimeError("No CUDA GPUs\nare available")))
    assert doctor._visible_gpus() == ((), "CUDA_VISIBLE_DEVICES=7, RuntimeError: No CUDA GPUs")


@pytest.mark.parametrize(("number", "expected"), [(12000, "12.0"), (12080, "12.8"), (13010, "13.1")])
@pytest.mark.parametrize(("system", "library"), [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_the_cuda_of_a_driver(monkeypatch, number, expected, system, library):
    def version(pointer):
        pointer._obj.value = number

    libraries = {library: SimpleNamespace(cuDriverGetVersion=version)}
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(doctor.ctypes, "CDLL", libraries.__getitem__)
    assert doctor._driver_cuda() == expected


@pytest.mark.parametrize("factor", [1.0, 1.1, float("nan")])
def test_a_wrong_result_is_found(monkeypatch, factor):
    attention = doctor.interface.attention

    def wrong(*args, backend="auto", **options):
        result = attention(*args, backend="reference", **options)
        return result if backend == "reference" else result * factor

    monkeypatch.setattr(doctor.interface, "attention", wrong)
    assert doctor._trial("cpu").startswith("cpu: off by ") == (factor != 1.0)


def test_folders_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "triton"))
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path))
    assert list(doctor._unwritable()) == []
    (tmp_path / "file").write_text("")  # a folder without permissions would not stop root
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path / "file" / "flashattn"))
    assert list(doctor._unwritable()) == [("FLASHATTN_CACHE_DIR", str(tmp_path / "file" / "flashattn"))]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
    assert ("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton")) in doctor._unwritable()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    assert ("TRITON_CACHE_DIR", str(tmp_path / "file" / ".triton" / "cache")) in doctor._unwritable()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setenv("FLASHATTN_CACHE_DIR", str(tmp_path / "new"))
    assert ("FLASHATTN_CACHE_DIR", str(tmp_path / "new")) in doctor._unwritable()


def test_what_a_launcher_is_built_with(monkeypatch, tmp_path):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "libcuda_dirs", lambda: [str(tmp_path)])
    monkeypatch.setattr(driver, "libraries", ["cuda"])
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    assert list(doctor._missing()) == ["libcuda.so", "Python.h"]
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setattr(driver, "libraries", ["libcuda.so.1"])
    assert list(doctor._missing()) == []
    monkeypatch.setattr(driver, "libraries", ["cuda"])
    (tmp_path / "libcuda.so").write_text("")
    assert list(doctor._missing()) == []
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert list(doctor._missing()) == ["a C compiler"]
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(doctor._missing()) == ["a C compiler"]
    (tmp_path / "clang").touch(mode=0o755)
    assert list(doctor._missing()) == []

    for error in (AssertionError("libcuda.so cannot found!"), FileNotFoundError("/sbin/ldconfig")):
        monkeypatch.setattr(driver, "libcuda_dirs", Mock(side_effect=error))
        assert list(doctor._missing()) == ["libcuda.so.1"]


@pytest.mark.parametrize(("facts", "code"), [(KAGGLE, 0), (LAPTOP, 0), (replace(KAGGLE, triton=""), 1)])
def test_exit_code(monkeypatch, capsys, facts, code):
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert doctor.main() == code
    assert capsys.readouterr().out == report(facts) + "\n"


# The real thing, in a process of its own, for it uses up warnings that come once --------------------------------------

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails, as where it is not installed
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "triton" else find_spec(name, *args)
"""
RUN = "import runpy\nrunpy.run_module('flashattn.doctor', run_name='__main__')"
BROKEN = """
from flashattn import doctor, interface, measure, turing
def fail(*args, **options):
    raise OSError("in disorder")
for module, name in [(doctor.importlib.metadata, "version"), (doctor.importlib.metadata, "requires"),
                     (doctor.ctypes, "CDLL"), (doctor.os, "access"), (measure, "gpu_state"), (measure, "commit"),
                     (turing, "status"), (turing, "triton_version"), (doctor, "_nvidia_device"),
                     (interface, "attend")]:
    setattr(module, name, fail)
gpus = tuple(doctor.Gpu("made up", 75, 65536, built_for, "restored") for built_for in BUILT_FOR)
doctor._visible_gpus = lambda: (gpus, "")
print(doctor.report(doctor.gather()))
"""


def run(*arguments, **changes):
    environment = children.environment(interpreted=False, CUDA_VISIBLE_DEVICES="", **changes)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("arguments", [["-m", "flashattn.doctor"], ["-c", WITHOUT_TRITON + RUN]])
def test_command_with_no_gpu(arguments):
    done = run(*arguments)
    assert "Traceback" not in done.stderr
    assert done.returncode == ("1. Wrong: " in done.stdout) == (not done.stdout.endswith("\n\nNothing is wrong.\n"))
    titles = [line[:12].rstrip() for line in done.stdout.split("\n\n")[0].splitlines()]
    assert titles == "flashattn,Python,torch,Triton,NumPy,driver,GPU,CPU tensors,status".split(",")
    assert "fails on" not in done.stdout and "unknown:" not in done.stdout
    assert (", Kaggle\n" in done.stdout) == ("KAGGLE_KERNEL_RUN_TYPE" in os.environ)
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    assert f"\ntorch        {torch.__version__}, built {cuda}\n" in done.stdout
    assert ("not installed" in done.stdout) == (arguments[0] == "-c" or not doctor.interface.HAS_TRITON)


def test_command_with_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('as where it is not installed', name='torch')")
    path = os.pathsep.join([str(tmp_path), children.environment()["PYTHONPATH"]])
    done = run("-m", "flashattn.doctor", PYTHONPATH=path)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.startswith("torch        not installed\n\n1. Wrong: torch is not installed")
    assert "\n   To do: pip install 'torch>=2.6'" in done.stdout
    done = run("-c", "import flashattn", PYTHONPATH=path)
    assert done.returncode == 1 and done.stderr.endswith("ModuleNotFoundError: as where it is not installed\n")


def test_command_under_the_interpreter_on_kaggle():
    pytest.importorskip("triton")
    done = run("-m", "flashattn.doctor", TRITON_INTERPRET="1", KAGGLE_KERNEL_RUN_TYPE="Batch")
    assert ", Kaggle\n" in done.stdout
    assert "\nCPU tensors  run on Triton's interpreter\n" in done.stdout
    assert "fails on" not in done.stdout


@pytest.mark.parametrize(
    ("built_for", "tried"), [([], ["cpu"]), ([True, True], ["cuda:0", "cuda:1"]), ([False, True], ["cuda:1"])]
)
def test_no_probe_that_fails_stops_the_others(built_for, tried):
    done = run("-c", BROKEN.replace("BUILT_FOR", str(built_for)))
    assert done.returncode == 0, done.stderr
    assert "\nNumPy        unknown: OSError: in disorder\n" in done.stdout
    assert "\nstatus       unknown: OSError: in disorder\n" in done.stdout
    assert re.findall(r"fails on (\S+): OSError: in disorder", done.stdout) == tried


@pytest.mark.parametrize(("value", "interpreted"), [("1", True), ("TRUE", True), ("0", False)])
def test_interpreter_on_by_mistake(value, interpreted):
    pytest.importorskip("triton")
    done = run("-c", BROKEN.replace("BUILT_FOR", "[True]"), TRITON_INTERPRET=value)
    assert ("Wrong: TRITON_INTERPRET is set" in done.stdout) == interpreted

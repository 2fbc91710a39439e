"""What turing.py does under the Triton at hand, with no GPU; a line of JSON {check: what came of it} for each check.

A process of its own, since the Triton of the test suite's may be another one, or interpret. Each check is a function
with a kernel cache that nothing else wrote to.
"""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import warnings

import torch
import triton
from foreign_kernels import CASES, OTHER_DOTS, dots_kernel, other_dot, talkative

from flashattn import codegen, turing

ANYWHERE = "fp16 accumulation"  # the one case that stock Triton 3.3 compiles too
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def warm(launch, **options):
    """The compiled kernel, as a launch on the current target would have it."""
    return launch.kernel.warmup(*launch.args, grid=(1,), **launch.constants, **launch.options, **options)


def mma(kernel):
    return kernel.asm["ptx"].count("mma.sync.aligned.m16n8k8")


@contextlib.contextmanager
def said():
    """The messages of flashattn's warnings."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if "flashattn" in str(w.message)]


@check
def foreign_kernels():
    made = {name: codegen.compile_for(case("meta").launch, 75) for name, case in CASES.items()}
    return {name: {"mma": kernel.mma, "cp.async": kernel.count("cp.async")} for name, kernel in made.items()}


@check
def other_dots():
    """Stock code for each, whether it compiles or not, and what is said when it is compiled twice."""
    found = {}
    for kind in (*OTHER_DOTS, "ieee"):
        results = []
        with said() as messages:
            for restored, warps in ((True, 4), (True, 8), (False, 4)):
                launch = other_dot(kind)
                launch.options["num_warps"] = warps
                try:
                    results.append(codegen.compile_for(launch, 75, restored).ptx)
                except Exception as error:  # whatever Triton raises, it has to be the same
                    results.append(type(error).__name__)
        found[kind] = {"as stock": results[0] == results[2], "said": messages}
    return found


@check
def switching():
    """One kernel in one process: stock, enabled, stock, enabled again, and with the launch's own word."""
    launch = CASES[ANYWHERE]("meta").launch
    kernels = {}
    with codegen.target(75):
        kernels["before"] = warm(launch)
        turing.enable()
        kernels["enabled"] = warm(launch)
        kernels["told not to"] = warm(launch, **{turing.OPTION: False})
        turing.disable()
        kernels["disabled"] = warm(launch)
        with turing.enable(), turing.enable():
            kernels["nested"] = warm(launch)
        with turing.enable():
            with turing.enable():
                pass
            kernels["outer"] = warm(launch)
        kernels["left"] = warm(launch)
    return {name: {"mma": mma(kernel), "hash": kernel.hash} for name, kernel in kernels.items()}


@check
def strings():
    """What the PTX of a kernel has, and is not to lose, beside its dot."""
    kernel = codegen.compile_for(talkative(), 75)
    text = bytes(int(code) for code in re.findall(r"\d+", "".join(re.findall(r"\.b8 [^{;]*\{([^}]*)\}", kernel.ptx))))
    return {"mma": sum(kernel.mma.values()), "kept": b"versionMinor = 0, tt.num_stages = 3 of cuda:80" in text}


@check
def tuning():
    """How many configurations were measured after each of three launches: stock, enabled, stock again."""
    configs = [triton.Config({}, num_warps=warps) for warps in (4, 8)]
    with codegen.target(75):
        tuner = triton.autotune(configs, key=["SIZE"])(dots_kernel)
        measured = []
        tuner._bench = lambda *args, config, **kwargs: measured.append(config) or [config.num_warps] * 3
        launch = CASES[ANYWHERE]("meta").launch
        counts = []
        for on in (False, True, False):
            with turing.enable() if on else contextlib.nullcontext():
                kernel = tuner.run(*launch.args, grid=(1,), warmup=True, **launch.constants)
            counts.append([len(measured), mma(kernel) > 0])
    return counts


@check
def on_another_gpu():
    launch = CASES[ANYWHERE]("meta").launch
    launch.options["num_stages"] = 2
    hashes = []
    for on in (False, True):
        with codegen.target(80), turing.enable() if on else contextlib.nullcontext():
            hashes.append(warm(launch).hash)
    with codegen.target(75):
        turing.enable()
    with codegen.target(80):  # a process with both
        hashes.append(warm(launch, num_ctas=1).hash)
    with codegen.target(75):
        turing.disable()
    return hashes


@check
def inductor():
    """The settings of torch.compile before, within and after."""
    from torch._inductor import config as inductor_config
    from torch.compiler import config as compiler_config

    def settings():
        return [inductor_config.compile_threads, compiler_config.cache_key_tag]

    inductor_config.compile_threads, compiler_config.cache_key_tag = 3, "mine"
    seen = [settings()]
    with codegen.target(75), turing.enable():
        seen.append(settings())
    return [*seen, settings()]


@check
def a_failure_falls_back():
    """In either stage: stock code, and a word about it."""
    from triton.backends import backends

    backend = backends["nvidia"].compiler
    found = []
    for owner, name in ((turing, "_as_turing"), (backend, "make_llir")):
        whole = getattr(owner, name)

        def fails_once(*args, owner=owner, name=name, whole=whole):
            setattr(owner, name, whole)
            raise RuntimeError(f"{name} failed")

        launch = CASES[ANYWHERE]("meta").launch
        launch.options["num_warps"] = 8 if owner is turing else 2  # compiled nowhere else here
        stock = codegen.compile_for(launch, 75, restored=False)
        setattr(owner, name, fails_once)
        with said() as messages:
            fallen = codegen.compile_for(launch, 75)
        found.append({"as stock": fallen.ptx == stock.ptx, "said": messages})
    return found


@check
def status():
    """On made-up GPUs: what is compiled is compiled for them."""
    found = {}
    torch.cuda.is_available = lambda: True
    for name, capability in (("Tesla T4", (7, 5)), ("Tesla P100", (6, 0))):
        torch.cuda.get_device_name = lambda name=name: name
        torch.cuda.get_device_capability = lambda capability=capability: capability
        seen = turing.status()
        found[name] = dataclasses.asdict(seen) | {"words": str(seen)}
    torch.cuda.get_device_capability = lambda: (7, 5)
    codegen.compile_for = None  # as under a Triton that cannot
    found["a Triton that fails"] = dataclasses.asdict(turing.status())
    torch.cuda.is_available = lambda: False
    return found


@check
def an_unknown_triton():
    """Last, since Triton's version is what it is for the rest of the process."""
    launch = CASES[ANYWHERE]("meta").launch
    triton.__version__ = "3.99.1"
    with said() as messages, codegen.target(75):
        turing.enable()
        turing.enable()
        found = {"mma": mma(warm(launch, maxnreg=255)), "path": turing.code_path(75)}
        turing.disable()
    return found | {"said": messages, "own options": turing.compile_options(75)}


def main():
    torch.manual_seed(0)
    for function in CHECKS:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            print(json.dumps({function.__name__: function()}), flush=True)


if __name__ == "__main__":
    main()

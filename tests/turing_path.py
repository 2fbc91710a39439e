"""A newer NVIDIA GPU in the place of a T4: Triton compiles for sm_75, and only its last stage, ptxas, for the GPU.

So what runs is the PTX that a T4 would run. The library takes a T4's tiles and its rule for bf16, too.
"""

import inspect

import torch

from flashattn import autograd, configs


def install():
    """For the rest of the process; before a kernel is launched."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    major, minor = torch.cuda.get_device_capability()
    backend = backends["nvidia"].compiler  # not the class that an import would give: 3.2 loads it twice
    make_cubin = backend.make_cubin
    takes_self = "self" in inspect.signature(make_cubin).parameters  # not where it is a static method

    def assemble(self, ptx, metadata, options, capability):
        return make_cubin(*([self] if takes_self else []), ptx, metadata, options, 10 * major + minor)

    backend.make_cubin = assemble
    backend.hash = lambda self: f"turing-path-{self.target.arch}"  # a cache of its own
    backends["nvidia"].driver.get_current_target = lambda self: GPUTarget("cuda", 75, 32)
    configs.device_of = lambda device: configs.Device("Turing path", 75, 65536)
    autograd._lacks_bf16 = lambda device: True

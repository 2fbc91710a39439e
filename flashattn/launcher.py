"""A kernel launch as data, and the short cut for launches like an earlier one."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards

from . import turing

_empty_strided_cuda = getattr(guards, "_empty_strided_cuda", None)  # torch's own: another release may lack it

# Strides are handed over in units of 8 elements where all of them allow it: the compiler then knows that every row is
# 16-byte aligned, for head dims like 40 or 72 too, and of the strides' values only constant_rows enter the cache key.
# Such a unit also says that offsets within a tile, of 256 rows and columns at most, fit 32 bits.
STRIDE_UNIT = 8
LARGEST_STEP = 2**31 // 256 - 1  # of a row and a column together
CONSTANT_ROWS = 32  # row strides at most that a process makes constants
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


def constant_rows(unit: int, **tensors: torch.Tensor) -> dict[str, int]:
    """Row strides, in units of pack_strides, as constants of the kernel: {"ROW_K": 8}; 0 is left to run time.

    With constants the addresses within a tile are one register and immediates: on sm_75 that ends most spills. A kernel
    is compiled for each, so they must be few. Where rows lie further apart than batches (length, batch, heads, head
    dim), the batch size is in the stride; whatever else may vary there ends at the CONSTANT_ROWS-th value.
    """

    def constant(t: torch.Tensor) -> int:
        row = t.stride(2) // unit
        if unit == 1 or t.stride(2) > t.stride(0) or (row not in _rows and len(_rows) >= CONSTANT_ROWS):
            return 0
        _rows.add(row)
        return row

    return {f"ROW_{name.upper()}": constant(t) for name, t in tensors.items()}


class Launch(NamedTuple):
    """One kernel launch: positional arguments (tensors, then numbers), constexpr arguments and options by name."""

    kernel: Any
    grid: int
    args: tuple
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> "CachedLaunch | None":
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
        constants = self.constants.values() if _binds_constants() else ()
        return CachedLaunch(compiled, self.grid, device, (*numbers, *constants))


class CachedLaunch(NamedTuple):
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
LaunchCache = dict[str, Any]


def launch(make: Callable[[], list[Launch]], tensors: tuple, name: str, cache: LaunchCache | None) -> None:
    """Launch what make() gives on these tensors, or what `cache` has of an earlier call by that name.

    Where an address is no multiple of 16, `cache` has nothing, and keeps nothing.
    """
    addresses, low_bits = [], 0  # as numbers: of a tensor's Triton asks the driver, each time, whether it is the GPU's
    for x in tensors if cache is not None else ():
        addresses.append(address := x.data_ptr())
        low_bits |= address
    if cache is None or low_bits % 16:
        for one in make():
            one.run()
    elif found := cache.get(name):
        for one in found:
            one.run(addresses)
    else:
        made = [one.run() for one in make()]
        if all(made):
            cache[name] = made


def empty(make: Callable[[], torch.Tensor], name: str, cache: LaunchCache | None) -> torch.Tensor:
    """make(), a tensor whose values do not matter, or one like that of an earlier call by that name.

    That comes by the way of torch.compile's code, past the dispatcher, which takes half the time.
    """
    if cache is None:
        return make()
    if found := cache.get(name):
        device, like = found
        return _empty_strided_cuda(*like) if _empty_strided_cuda and device == torch._C._cuda_getDevice() else make()
    x = make()
    cache[name] = x.get_device(), (tuple(x.shape), x.stride(), x.dtype)
    return x


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
    return turing.triton_release() >= (3, 3)

"""The measurement that benchmark_attention.py, benchmark_memory.py and notebooks/02_benchmark.ipynb share.

For each case and mode every provider's result is checked against fp64 before it is measured. A provider
that is wrong, refuses, or runs out of memory keeps its row, which says so, and is not measured.
"""

import argparse
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashattn import attention, measure, testing
from flashattn.reference import dense_attention

# Shapes hold the work of a batch: batch = tokens / length, heads = width / head_dim.
SHAPES = {
    "cuda": {"dtype": "float16", "tokens": 16384, "width": 2048},
    "cpu": {"dtype": "float32", "tokens": 2048, "width": 256},
}
CAUSAL = {"no": [False], "yes": [True], "both": [False, True]}
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
MEMORY_MODES = ("forward", "forward+backward")  # what a call of backward alone needs was allocated before it

ORACLE_SCORES = 1 << 26  # fp64 scores that the oracle holds at a time: 512 MiB a matrix

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One shape: q, k and v are all (batch, heads, seqlen, head_dim)."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str

    def flops(self, mode: str) -> float:
        shape = (self.batch, self.heads, self.seqlen, self.seqlen, self.head_dim)
        return measure.flops(*shape, self.causal, mode)

    def bytes_moved(self, mode: str) -> int:
        itemsize = getattr(torch, self.dtype).itemsize
        shape = (self.batch, self.heads, self.heads, self.seqlen, self.seqlen, self.head_dim)
        return measure.bytes_moved(*shape, itemsize, mode)

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.dtype} {kind} ({self.batch}, {self.heads}, {self.seqlen}, {self.head_dim})"


@dataclass(frozen=True)
class Provider:
    """An attention (q, k, v, causal) -> o, called inside `context`; an untimed one is only checked."""

    name: str
    fn: Callable[..., torch.Tensor]
    context: Callable[[], AbstractContextManager] = nullcontext
    timed: bool = True


def make_cases(
    seq_lens: Iterable[int],
    head_dims: Iterable[int],
    causal: Iterable[bool],
    dtype: str,
    tokens: int,
    width: int,
    batch: int | None = None,
    heads: int | None = None,
) -> list[Case]:
    """All combinations; a given `batch` or `heads` goes before what `tokens` or `width` makes of it."""
    seq_lens = list(seq_lens)
    return [
        Case(batch or max(1, tokens // n), heads or max(1, width // d), n, d, c, dtype)
        for d in head_dims
        for c in causal
        for n in seq_lens
    ]


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention as the formula reads: matmul, softmax, matmul, with the scores in memory."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


def make_providers(device: torch.device) -> list[Provider]:
    """flashattn, naive attention, and every backend of PyTorch's SDPA.

    SDPA's causal mask is top-left and flashattn's bottom-right: the same where the lengths are equal.
    """

    def triton_attention(q, k, v, causal):
        return attention(q, k, v, causal=causal, backend="triton")

    def sdpa(q, k, v, causal):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return [
        Provider("flashattn", triton_attention, timed=device.type == "cuda"),
        Provider("naive", naive_attention),
        *(Provider(name, sdpa, partial(sdpa_kernel, backend)) for name, backend in SDPA.items()),
    ]


def sweep(
    cases: Iterable[Case],
    modes: Iterable[str],
    device: torch.device,
    *,
    budget_ms: float = 60.0,
    time: bool = True,
    memory: bool = True,
) -> list[dict]:
    """A row for each case, provider and mode; extra memory only on a GPU, whose allocator knows the peak.

    Each row carries the run's metadata, with clocks and power read once a case, right after its last timing.
    Prints each case as it goes, a line for each provider with its figures in the order of `modes`.
    """
    cases, modes, metadata, rows = list(cases), list(modes), measure.run_metadata(device), []
    for index, case in enumerate(cases, 1):
        print(f"[{index}/{len(cases)}] {case}", flush=True)
        tensors = random_tensors(case, device)
        truth = Truth(tensors, case.causal)
        measured = []
        for provider in make_providers(device):
            values = [
                _attempt(provider, case, mode, tensors, truth, budget_ms=budget_ms, time=time, memory=memory)
                for mode in modes
            ]
            print(f"    {provider.name:16}" + "".join(f"{_brief(v):>18}" for v in values), flush=True)
            measured += [
                {"provider": provider.name, "mode": mode, **asdict(case), **v}
                for mode, v in zip(modes, values, strict=True)
            ]
        state = measure.gpu_state(device)
        rows += [{**row, **metadata, **state} for row in measured]
    return rows


def _brief(row: dict) -> str:
    if row["tflops"] is not None:
        return f"{row['tflops']:.3g} TFLOP/s"
    return row["status"] if row["extra_mib"] is None else f"{row['extra_mib']:.4g} MiB"


def random_tensors(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v and the output's gradient, the same on every run."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.heads, case.seqlen, case.head_dim)
    dtype = getattr(torch, case.dtype)
    return tuple(torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(4))


class Truth:
    """What a provider is checked against: all rows of the first and the last batch-head.

    These two lie farthest apart in memory, and checking every head of a long sequence in fp64 would take
    longer than the benchmark.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], causal: bool):
        batch, heads = tensors[0].shape[:2]
        self._picked = sorted({0, batch * heads - 1})
        part = tuple(self._pick(t) for t in tensors)
        self._exact = exact_results(*part, causal)
        self._baseline = results(naive_attention, part, causal, gradients=True)

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(0, 1)[self._picked][None]  # [1, picked, seqlen, head_dim]

    def check(self, actual: dict[str, torch.Tensor]) -> testing.Report:
        """The report on the tensor nearest its bound. Raises AssertionError where one is beyond."""
        reports = [
            testing.check(name, self._pick(tensor), self._exact[name], self._baseline[name])
            for name, tensor in actual.items()
        ]
        return max(reports, key=lambda report: report.error / report.bound)


def exact_results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> dict[str, torch.Tensor]:
    """o, dq, dk and dv in fp64, by blocks of query rows: all of a long sequence at once does not fit."""
    q, k, v, do = (t.double() for t in (q, k, v, do))
    seqlen = q.shape[2]
    step = max(1, ORACLE_SCORES // (q.shape[0] * q.shape[1] * seqlen))
    o, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    for start in range(0, seqlen, step):
        rows = slice(start, min(start + step, seqlen))
        keys = slice(0, rows.stop if causal else seqlen)  # so that bottom-right is these rows' own mask
        leaves = [t[:, :, part].detach().requires_grad_() for t, part in ((q, rows), (k, keys), (v, keys))]
        o_rows, _ = dense_attention(*leaves, causal=causal)
        dq[:, :, rows], dk_part, dv_part = torch.autograd.grad(o_rows, leaves, do[:, :, rows])
        o[:, :, rows] = o_rows.detach()
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def results(
    fn: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], causal: bool, gradients: bool
) -> dict[str, torch.Tensor]:
    """o of `fn` on q, k, v, and dq, dk, dv for the given dO where asked for."""
    *qkv, do = tensors
    qkv = [t.detach().requires_grad_(gradients) for t in qkv]
    o = fn(*qkv, causal)
    grads = torch.autograd.grad(o, qkv, do) if gradients else ()
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=False))


def _attempt(
    provider: Provider,
    case: Case,
    mode: str,
    tensors: tuple[torch.Tensor, ...],
    truth: Truth,
    *,
    budget_ms: float,
    time: bool,
    memory: bool,
) -> dict:
    """The columns that a provider's run of one case and mode fills: check first, then measure."""
    columns = ("median_ms", "p20_ms", "p80_ms", "samples", "tflops", "extra_mib", "worst", "error", "bound")
    row = dict.fromkeys((*columns, "status", "note"))
    device = tensors[0].device
    with warnings.catch_warnings(record=True) as caught, provider.context():
        warnings.simplefilter("always")
        try:
            report = truth.check(results(provider.fn, tensors, case.causal, mode != "forward"))
            row |= {"worst": report.what, "error": report.error, "bound": report.bound, "status": "measured"}
            if not provider.timed:
                return row | {"status": "checked", "note": "interpreted kernels are not timed"}
            call = _call(provider.fn, tensors, case.causal, mode)
            if memory and device.type == "cuda" and mode in MEMORY_MODES:
                row["extra_mib"] = measure.peak_memory(call, device) / MIB
            if time:
                timing = measure.time(call, budget_ms, device=device)
                row |= asdict(timing) | {"tflops": case.flops(mode) / timing.median_ms / 1e9}
        except AssertionError as error:
            row |= {"status": "wrong", "note": _first_line(error)}
        except torch.OutOfMemoryError:
            row |= {"status": "out of memory"}
        except Exception as error:  # a backend refuses in many ways, and one row must not end the sweep
            reasons = [_first_line(w.message) for w in caught if w.category is UserWarning]  # SDPA's
            reasons.append(f"{type(error).__name__}: {_first_line(error)}")
            row |= {"status": "refused", "note": "; ".join(dict.fromkeys(reasons))}
    if row["status"] == "out of memory":
        torch.cuda.empty_cache()
    return row


def _call(
    fn: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], causal: bool, mode: str
) -> Callable[[], object]:
    """The call that a mode measures; backward alone runs again and again on one prepared graph."""
    *qkv, do = tensors
    qkv = [t.detach().requires_grad_(mode != "forward") for t in qkv]
    if mode == "forward":
        return lambda: fn(*qkv, causal)
    if mode == "forward+backward":
        return lambda: torch.autograd.grad(fn(*qkv, causal), qkv, do)
    o = fn(*qkv, causal)
    return lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)


def _first_line(error: object) -> str:
    """Of an error or a warning, without the place in PyTorch's sources that its warnings end with."""
    line = str(error).strip().partition("\n")[0].partition(" (Triggered internally")[0]
    return line or type(error).__name__


def flags(description: str, device: torch.device) -> argparse.ArgumentParser:
    """The flags of both command lines; `device` decides the defaults of the shape."""
    shape = SHAPES[device.type]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seq-lens", type=int, nargs="+", default=[512, 1024, 2048, 4096], metavar="N", help="lengths")
    add("--head-dims", type=int, nargs="+", default=[64], metavar="D", help="head dims")
    add("--causal", nargs="?", choices=CAUSAL, const="yes", default="no", help="with no value it means yes")
    add("--dtype", choices=["float16", "bfloat16", "float32"], default=shape["dtype"], help="of all inputs")
    add("--tokens", type=int, default=shape["tokens"], help="batch is this / length, unless --batch is given")
    add("--width", type=int, default=shape["width"], help="heads is this / head dim, unless --heads is given")
    add("--batch", type=int, help="batch for every length")
    add("--heads", type=int, help="heads for every head dim")
    add("--output", type=Path, default=Path("results/local"), help="folder for the CSV and the PNG")
    return parser


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The cases that the flags ask for."""
    shape = (args.tokens, args.width, args.batch, args.heads)
    return make_cases(args.seq_lens, args.head_dims, CAUSAL[args.causal], args.dtype, *shape)


def exit_code(rows: Iterable[dict]) -> int:
    """1 where a result was wrong, or where flashattn has no figure although there is a GPU."""

    def bad(row: dict) -> bool:
        kernels = row["provider"] == "flashattn" and row["device"] == "cuda"
        return row["status"] == "wrong" or (kernels and row["status"] != "measured")

    return int(any(bad(row) for row in rows))

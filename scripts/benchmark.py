"""The measurement that benchmark_attention.py, benchmark_memory.py and notebooks/02_benchmark.ipynb share.

For each case and mode every provider's result is checked against fp64 before it is measured. A provider
that is wrong, refuses, or runs out of memory keeps its row, which says so, and is not measured. Those that are
right are timed in turns, and a large matrix product with them: what this GPU gives at its clocks of that minute.
"""

import argparse
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.config as functorch
from arguments import positive
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
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
PACKAGES = {"flash_attn_triton": "flash-attn-triton", "flash_attention_triton": "flash-attention-triton"}
PEERS = ("flex", *PACKAGES)  # whose faults are theirs
RELEASED = "forward+backward, released"  # where only the graph holds the output, as in a model
# Mode, column, what is called; none of backward alone, since what that needs was allocated before.
MEMORY = (
    ("forward", "extra_mib", "forward"),
    ("forward+backward", "extra_mib", "forward+backward"),
    ("forward+backward", "released_mib", RELEASED),
)
EAGER_MODES = ("forward", "forward+backward")  # what a model calls
PARTS = LENGTHS, GROUPED, HOST = ("lengths", "grouped heads", "host cost")  # the column `part`

ORACLE_SCORES = 1 << 26  # fp64 scores that the oracle holds at a time: 512 MiB a matrix
BASELINE_SCORES = 1 << 29  # the same of the baseline, which so is whole up to length 16,384: 1 GiB in fp16

REST_S = 10.0  # before each run of sustained()
MIB = 1 << 20

# What a run of one case and mode fills; None where there is no figure.
COLUMNS = ("median_ms", "p20_ms", "p80_ms", "samples", "tflops", "matmul_tflops", "matmul_share", "wall_us")
COLUMNS += ("extra_mib", "released_mib", "worst", "error", "bound", "status", "note")


@dataclass(frozen=True)
class Case:
    """One shape: q is (batch, heads, seqlen, head_dim), k and v have heads_k heads (0: as many as q)."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str
    heads_k: int = 0
    part: str = LENGTHS

    def __post_init__(self):
        object.__setattr__(self, "heads_k", self.heads_k or self.heads)

    def flops(self, mode: str) -> float:
        shape = (self.batch, self.heads, self.seqlen, self.seqlen, self.head_dim)
        return measure.flops(*shape, self.causal, mode)

    def bytes_moved(self, mode: str) -> int:
        itemsize = getattr(torch, self.dtype).itemsize
        shape = (self.batch, self.heads, self.heads_k, self.seqlen, self.seqlen, self.head_dim)
        return measure.bytes_moved(*shape, itemsize, mode)

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        heads = self.heads if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        return f"{self.dtype} {kind} ({self.batch}, {heads}, {self.seqlen}, {self.head_dim})"


@dataclass(frozen=True)
class Provider:
    """An attention (q, k, v, causal) -> o, called inside `context`; an untimed one is only checked.

    quadratic: holds two matrices of scores at a time, or more. token_major: takes tensors that lie in memory as
    (batch, seqlen, heads, head_dim) and copies others, so it is given such. asked_once: to find out that it refuses
    takes a compilation, so that a refusal counts for the other lengths, too.
    """

    name: str
    fn: Callable[..., torch.Tensor]
    context: Callable[[], AbstractContextManager] = nullcontext
    timed: bool = True
    quadratic: bool = False
    token_major: bool = False
    asked_once: bool = False


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


def grouped_cases(seq_lens: Iterable[int], dtype: str, tokens: int, width: int, head_dim: int = 64) -> list[Case]:
    """Causal, with a key head for every query head, and with one for four of them (for all, where 4 is no divisor)."""
    equal = make_cases(seq_lens, [head_dim], [True], dtype, tokens, width)
    return [
        replace(case, heads_k=heads_k, part=GROUPED)
        for case in equal
        for heads_k in dict.fromkeys((case.heads, case.heads // 4 if case.heads % 4 == 0 else 1))
    ]


def host_cases(seq_lens: Iterable[int], dtype: str, heads: int = 8, head_dim: int = 64) -> list[Case]:
    """Causal, batch 1: so little work for the GPU that a call costs what Python and the launches do."""
    return [Case(1, heads, n, head_dim, True, dtype, part=HOST) for n in seq_lens]


def sustained_case(dtype: str, tokens: int, width: int) -> Case:
    """What sustained() runs: causal, long, head dim 64."""
    return make_cases([8192], [64], [True], dtype, tokens, width)[0]


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention as the formula reads: matmul, softmax, matmul, with the scores in memory."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        seqlen_q, seqlen_k = scores.shape[-2:]
        later = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(1 + seqlen_k - seqlen_q)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


class FlexAttention:
    """PyTorch's FlexAttention as its documentation has it: compiled, for each shape, and causal by a block mask.

    Both are made at a shape's first call, which is never timed. Of the shapes only the last stays compiled: Dynamo
    keeps eight, and then would run the uncompiled function instead.
    """

    def __init__(self):
        self._shape = self._compiled = self._mask = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        shape = (q.shape, k.shape, q.dtype, causal)
        if shape != self._shape:
            self._shape = shape
            torch._dynamo.reset()
            functorch.donated_buffer = False  # or no graph runs backward twice, as the mode backward does
            self._compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
            self._mask = self._causal_mask(q, k) if causal else None
        return self._compiled(q, k, v, block_mask=self._mask, enable_gqa=q.shape[1] != k.shape[1])

    @staticmethod
    def _causal_mask(q, k):
        def seen(batch, head, row, col):
            return row >= col

        return flex_attention.create_block_mask(seen, None, None, q.shape[2], k.shape[2], device=str(q.device))


def flash_attn_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyPI's flash-attn-triton, whose layout is (batch, seqlen, heads, head_dim)."""
    from flash_attn_triton import flash_attn_func

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flash_attn_func(q, k, v, causal=causal).transpose(1, 2)


def flash_attention_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyPI's flash-attention-triton: (batch, heads, seqlen, head_dim), always causal, computes in float16."""
    from flash_attention_triton import flash_attention_v2

    if not causal:
        raise NotImplementedError("causal: got False, the package is causal always")
    return flash_attention_v2(q, k, v)


def missing_packages() -> list[str]:
    """Those of PACKAGES, by their names at PyPI, that are not installed."""
    return [package for module, package in PACKAGES.items() if find_spec(module) is None]


def _quiet() -> AbstractContextManager:
    """For flash-attn-triton, which prints at every call with grouped heads."""
    return redirect_stdout(io.StringIO())


def make_providers(device: torch.device) -> list[Provider]:
    """flashattn, naive attention, every backend of PyTorch's SDPA; on a GPU FlexAttention and the PACKAGES there are.

    SDPA's causal mask is top-left and flashattn's bottom-right: the same where the lengths are equal.
    """

    def triton_attention(q, k, v, causal):
        return attention(q, k, v, causal=causal, backend="triton")

    def sdpa(q, k, v, causal):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    providers = [
        Provider("flashattn", triton_attention, timed=device.type == "cuda"),
        Provider("naive", naive_attention, quadratic=True),
        *(
            Provider(name, sdpa, partial(sdpa_kernel, backend), quadratic=backend == SDPBackend.MATH)
            for name, backend in SDPA.items()
        ),
    ]
    if device.type == "cuda":
        providers.append(Provider("flex", FlexAttention(), asked_once=True))
        packages = (
            Provider("flash_attn_triton", flash_attn_triton, _quiet, token_major=True),
            Provider("flash_attention_triton", flash_attention_triton),
        )
        providers += [package for package in packages if find_spec(package.name) is not None]
    return providers


def sweep(
    cases: Iterable[Case],
    modes: Iterable[str],
    device: torch.device,
    *,
    budget_ms: float = 60.0,
    time: bool = True,
    memory: bool = True,
    wall: bool = False,
    peer_seq_lens: Iterable[int] | None = None,
    call_limit_s: float = 15.0,
) -> list[dict]:
    """A row for each case, provider and mode; extra memory only on a GPU, whose allocator knows the peak.

    Each row carries the run's metadata, with the clocks, the power and the throttling of its own timing, and the
    rate of a large matrix product that was timed in turns with it. PEERS, which compile or tune for each shape, are
    there at peer_seq_lens only (None: everywhere). A provider is not tried where, at its rate at the case before,
    forward with backward would take longer than call_limit_s. `wall` adds the wall time of a call, Python included.
    Prints each case as it goes, a line for each provider with its figures in the order of `modes`.
    """
    cases, modes, metadata, rows = list(cases), list(modes), measure.run_metadata(device), []
    providers, rates, refusals = make_providers(device), {}, {}
    for index, case in enumerate(cases, 1):
        print(f"[{index}/{len(cases)}] {case}", flush=True)
        tensors = random_tensors(case, device)
        truth = Truth(tensors, case.causal)
        chosen = [p for p in providers if p.name not in PEERS or peer_seq_lens is None or case.seqlen in peer_seq_lens]
        found = {(p.name, mode): dict.fromkeys(COLUMNS) for p in chosen for mode in modes}
        for provider in chosen:
            slowest = rates.get(provider.name, float("inf"))
            if case.flops("forward+backward") > call_limit_s * slowest * 1e12:
                note = f"not tried: at its rate at the case before a call would take more than {call_limit_s:g} s"
                outcomes = dict.fromkeys(modes, {"status": "too slow", "note": note})
            else:
                outcomes = _check(provider, case, modes, tensors, truth, refusals, memory)
            for mode in modes:
                found[provider.name, mode] |= outcomes[mode]
        if time:
            product = _time(case, modes, chosen, tensors, found, budget_ms=budget_ms, wall=wall)
            print(f"    {'matrix product':22}" + "".join(f"{_brief(product[mode]):>18}" for mode in modes))
        for provider in chosen:
            values = [found[provider.name, mode] for mode in modes]
            if reached := [value["tflops"] for value in values if value["tflops"]]:
                rates[provider.name] = min(reached)
            print(f"    {provider.name:22}" + "".join(f"{_brief(value):>18}" for value in values), flush=True)
        states = {key: row.pop("state", {}) for key, row in found.items()}
        _tell_throttling(states.values())
        rows += [
            {"provider": provider, "mode": mode, **asdict(case), **row, **metadata, **states[provider, mode]}
            for (provider, mode), row in found.items()
        ]
    return rows


def _brief(row: dict) -> str:
    if row["tflops"] is not None:
        return f"{row['tflops']:.3g} TFLOP/s"
    return row["status"] if row["extra_mib"] is None else f"{row['extra_mib']:.4g} MiB"


def _tell_throttling(states: Iterable[dict]) -> None:
    """A line that says why clocks were held down, and where they were, if any was."""
    held = [state for state in states if state.get("throttle") not in (None, "", "no")]
    if held:
        clocks = [state["sm_clock_mhz"] for state in held if state["sm_clock_mhz"] != ""] or [float("nan")]
        reasons = ", ".join(sorted({state["throttle"] for state in held}))
        print(f"    throttled by {reasons}: SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz", flush=True)


def random_tensors(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v and the output's gradient, the same on every run."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    return tuple(
        torch.randn(case.batch, heads, case.seqlen, case.head_dim, device=device, generator=generator).to(dtype)
        for heads in (case.heads, case.heads_k, case.heads_k, case.heads)
    )


class Truth:
    """What a provider is checked against: all rows of the first and the last key head, and of their query heads.

    These two lie farthest apart in memory, and checking every head of a long sequence in fp64 would take
    longer than the benchmark.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], causal: bool):
        batch, heads_k = tensors[1].shape[:2]
        self._key_heads = batch * heads_k
        self._picked = sorted({0, self._key_heads - 1})
        part = tuple(self._pick(t) for t in tensors)
        self._condition = testing.score_condition(part[0], part[1])
        self._exact = exact_results(*part, causal)
        self._baseline = _by_blocks(naive_attention, part, causal, BASELINE_SCORES)

    def _pick(self, tensor: torch.Tensor) -> torch.Tensor:
        groups = tensor.flatten(0, 1).unflatten(0, (self._key_heads, -1))
        return groups[self._picked].flatten(0, 1)[None]  # [1, picked, seqlen, head_dim]

    def check(self, actual: dict[str, torch.Tensor]) -> testing.Report:
        """The report on the tensor nearest its bound. Raises AssertionError where one is beyond."""
        reports = [
            testing.check(name, self._pick(tensor), self._exact[name], self._baseline[name], condition=self._condition)
            for name, tensor in actual.items()
        ]
        return max(reports, key=lambda report: report.error / report.bound)


def exact_results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> dict[str, torch.Tensor]:
    """o, dq, dk and dv in fp64."""

    def oracle(q, k, v, causal):
        return dense_attention(q, k, v, causal=causal)[0]

    return _by_blocks(oracle, tuple(t.double() for t in (q, k, v, do)), causal, ORACLE_SCORES)


def _by_blocks(
    fn: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], causal: bool, scores: int
) -> dict[str, torch.Tensor]:
    """o, dq, dk and dv of `fn`, which holds at most `scores` at a time: all of a long sequence do not fit.

    By blocks of query rows, whose parts of dk and dv are added up in fp32 at least. `fn` is causal as attention() is.
    """
    q, k, v, do = tensors
    seqlen = q.shape[2]
    step = max(1, scores // (q.shape[0] * q.shape[1] * seqlen))
    wide = torch.promote_types(q.dtype, torch.float32)
    o, dq = torch.zeros_like(q), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for start in range(0, seqlen, step):
        rows = slice(start, min(start + step, seqlen))
        keys = slice(0, rows.stop if causal else seqlen)  # so that bottom-right is these rows' own mask
        leaves = [t[:, :, part].detach().requires_grad_() for t, part in ((q, rows), (k, keys), (v, keys))]
        o_rows = fn(*leaves, causal)
        dq[:, :, rows], dk_part, dv_part = torch.autograd.grad(o_rows, leaves, do[:, :, rows])
        o[:, :, rows] = o_rows.detach()
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return {"o": o, "dq": dq, "dk": dk.to(k.dtype), "dv": dv.to(v.dtype)}


def results(
    fn: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], causal: bool, gradients: bool
) -> dict[str, torch.Tensor]:
    """o of `fn` on q, k, v, and dq, dk, dv for the given dO where asked for."""
    *qkv, do = tensors
    qkv = [t.detach().requires_grad_(gradients) for t in qkv]
    o = fn(*qkv, causal)
    grads = torch.autograd.grad(o, qkv, do) if gradients else ()
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=False))


def _check(
    provider: Provider,
    case: Case,
    modes: list[str],
    tensors: tuple[torch.Tensor, ...],
    truth: Truth,
    refusals: dict[tuple, dict],
    memory: bool,
) -> dict[str, dict]:
    """For each mode the columns of a provider's check, with the extra memory of a right one where it can be read.

    refusals remembers what providers that are asked once said.
    """
    device, rows = tensors[0].device, {}
    for gradients in {mode != "forward": None for mode in modes}:
        kind = (provider.name, case.head_dim, case.causal, case.heads == case.heads_k, gradients)
        row = refusals.get(kind) or _outcome(provider, tensors, case.causal, truth, gradients)
        if provider.asked_once and row["status"] == "refused":
            refusals[kind] = row
        rows |= {mode: row for mode in modes if gradients == (mode != "forward")}
    if not memory or device.type != "cuda":
        return rows

    def extra_mib(mode: str) -> float:
        with _ready(provider, tensors, case.causal, mode) as call:
            return measure.peak_memory(call, device) / MIB

    for mode, column, called in MEMORY:
        if mode in rows and rows[mode]["status"] == "measured":
            try:
                rows[mode] = rows[mode] | {column: extra_mib(called)}
            except Exception as error:
                rows[mode] = rows[mode] | _failure(error)
    return rows


def _outcome(
    provider: Provider, tensors: tuple[torch.Tensor, ...], causal: bool, truth: Truth, gradients: bool
) -> dict:
    """The columns worst, error, bound, status and note of one check."""
    if provider.quadratic and not _two_matrices_fit(tensors[0]):
        return {"status": "out of memory", "note": "not tried: its scores alone are more than the free memory"}
    with warnings.catch_warnings(record=True) as caught, provider.context():
        warnings.simplefilter("always")
        try:
            actual = results(provider.fn, _laid_out(provider, tensors), causal, gradients)
        except Exception as error:  # a backend refuses in many ways, and one row must not end the sweep
            return _failure(error, caught)
    try:
        report = truth.check(actual)
    except AssertionError as error:
        return {"status": "wrong", "note": _first_line(error)}
    row = {"worst": report.what, "error": report.error, "bound": report.bound, "status": "measured"}
    return row if provider.timed else row | {"status": "checked", "note": "interpreted kernels are not timed"}


def _failure(error: Exception, caught: Iterable[warnings.WarningMessage] = ()) -> dict:
    """The columns of a call that failed, with SDPA's warnings, which say why it has no kernel."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return {"status": "out of memory"}
    reasons = [_first_line(w.message) for w in caught if w.category is UserWarning]
    reasons.append(f"{type(error).__name__}: {_first_line(error)}")
    return {"status": "refused", "note": "; ".join(dict.fromkeys(reasons))}


def _two_matrices_fit(q: torch.Tensor) -> bool:
    """Whether two matrices of scores, each in q's dtype, fit a GPU's memory; True where there is none to ask."""
    if q.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(q.device)
    free += torch.cuda.memory_reserved(q.device) - torch.cuda.memory_allocated(q.device)
    batch, heads, seqlen, _ = q.shape
    return 2 * batch * heads * seqlen**2 * q.itemsize <= free


def _time(
    case: Case,
    modes: list[str],
    providers: list[Provider],
    tensors: tuple[torch.Tensor, ...],
    found: dict[tuple[str, str], dict],
    *,
    budget_ms: float,
    wall: bool,
) -> dict[str, dict]:
    """Add to `found` the times of those that are measured, mode by mode in turns; return the matrix product's rows."""
    device = tensors[0].device
    product, product_flops = measure.matmul(tensors[0].dtype, device)
    products = {}
    for mode in modes:
        calls = {
            provider.name: partial(_ready, provider, tensors, case.causal, mode)
            for provider in providers
            if found[provider.name, mode]["status"] == "measured"
        }
        large = [provider.name for provider in providers if provider.quadratic]
        everything = calls | {"": partial(nullcontext, product)}
        timings = measure.time_in_turns(everything, budget_ms, device=device, warm_up=large)
        reached = timings.pop("")
        if isinstance(reached, Exception):
            raise reached
        products[mode] = {"tflops": product_flops / reached[0].median_ms / 1e9}
        walls = measure.time_in_turns(calls, budget_ms, device=device, wall=True) if wall else {}
        for name, timed in timings.items():
            row = found[name, mode]
            if isinstance(timed, Exception):
                row |= _failure(timed)
                continue
            timing, state = timed
            tflops = case.flops(mode) / timing.median_ms / 1e9
            row |= asdict(timing) | {"tflops": tflops, "state": state}
            row |= {"matmul_tflops": products[mode]["tflops"], "matmul_share": tflops / products[mode]["tflops"]}
            if name in walls and not isinstance(walls[name], Exception):
                row["wall_us"] = walls[name][0].median_ms * 1e3
    return products


@contextmanager
def _ready(
    provider: Provider, tensors: tuple[torch.Tensor, ...], causal: bool, mode: str
) -> Iterator[Callable[[], object]]:
    """The call that a mode measures; backward alone runs again and again on one prepared graph."""
    with warnings.catch_warnings(), provider.context():
        warnings.simplefilter("ignore")
        *qkv, do = _laid_out(provider, tensors)
        qkv = [t.detach().requires_grad_(mode != "forward") for t in qkv]
        call = partial(provider.fn, *qkv, causal)
        if mode == "forward+backward":
            call = partial(_backward, call, qkv, do, retain_graph=False)
        elif mode == RELEASED:
            call = partial(_step, call, qkv, do)
        elif mode == "backward":
            o = call()
            call = partial(_backward, lambda: o, qkv, do, retain_graph=True)
        yield call


def _backward(forward: Callable[[], torch.Tensor], qkv: list[torch.Tensor], do: torch.Tensor, retain_graph: bool):
    return torch.autograd.grad(forward(), qkv, do, retain_graph=retain_graph)


def _step(forward: Callable[[], torch.Tensor], qkv: list[torch.Tensor], do: torch.Tensor):
    """_backward() with no hold on the output: its gradient is put in place of that of a sum, which needs no memory."""
    o = forward()
    o.register_hook(lambda _: do)
    total = o.sum()
    del o
    return torch.autograd.grad(total, qkv)


def _laid_out(provider: Provider, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors as the provider would have them in memory."""
    if not provider.token_major:
        return tensors
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)


def sustained(case: Case, seconds: float, device: torch.device) -> list[dict]:
    """flashattn, and the matrix product, without a pause for `seconds` each, from rest: a row for each window.

    The windows are the first second, the whole time and the last second: a card with too little power or cooling
    slows down in between. Checked first; no rows for `seconds` 0, for interpreted kernels, and for a wrong result.
    """
    ours = make_providers(device)[0]
    if not seconds or not ours.timed:
        return []
    unknown = dict.fromkeys((*measure.NVML_QUERY, "throttle"), "")  # and not that of the run's start
    metadata, rows, rest_s = measure.run_metadata(device) | unknown, [], min(seconds, REST_S)
    tensors = random_tensors(case, device)
    try:
        Truth(tensors, case.causal).check(results(ours.fn, tensors, case.causal, gradients=True))
    except AssertionError as error:
        print(f"not run, since wrong: {_first_line(error)}")
        return []
    product, product_flops = measure.matmul(tensors[0].dtype, device)
    runs = [(ours.name, mode, partial(_ready, ours, tensors, case.causal, mode)) for mode in EAGER_MODES]
    for name, mode, ready in [*runs, ("matrix product", "", partial(nullcontext, product))]:
        print(f"{name} {mode}: {seconds:g} s after {rest_s:g} s of rest", flush=True)
        with ready() as call:
            windows = measure.sustained(call, seconds, device, rest_s)
        flops = case.flops(mode) if mode else product_flops
        shape = asdict(case) if mode else {}
        for window in windows:
            figures = {**window, "tflops": flops / window["ms_per_call"] / 1e9}
            rows.append({"provider": name, "mode": mode, **shape, **metadata, **figures})
            state = ", ".join(f"{name} {figures[name]}" for name in unknown if figures.get(name, "") != "")
            print(f"    {window['window']:14}{figures['tflops']:.3g} TFLOP/s  {state}", flush=True)
    return rows


def _first_line(error: object) -> str:
    """Of an error or a warning, without the place in PyTorch's sources that its warnings end with."""
    line = str(error).strip().partition("\n")[0].partition(" (Triggered internally")[0]
    return line or type(error).__name__


def flags(description: str, device: torch.device) -> argparse.ArgumentParser:
    """The flags of both command lines; `device` decides the defaults of the shape."""
    shape = SHAPES[device.type]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seq-lens", type=positive, nargs="+", default=[512, 1024, 2048, 4096], metavar="N", help="lengths")
    add("--head-dims", type=positive, nargs="+", default=[64], metavar="D", help="head dims")
    add("--causal", nargs="?", choices=CAUSAL, const="yes", default="no", help="with no value it means yes")
    add("--dtype", choices=["float16", "bfloat16", "float32"], default=shape["dtype"], help="of all inputs")
    add("--tokens", type=positive, default=shape["tokens"], help="batch is this / length, unless --batch is given")
    add("--width", type=positive, default=shape["width"], help="heads is this / head dim, unless --heads is given")
    add("--batch", type=positive, help="batch for every length")
    add("--heads", type=positive, help="heads for every head dim")
    add("--output", type=Path, default=Path("results/local"), help="folder for the CSV and the PNG")
    return parser


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The cases that the flags ask for."""
    shape = (args.tokens, args.width, args.batch, args.heads)
    return make_cases(args.seq_lens, args.head_dims, CAUSAL[args.causal], args.dtype, *shape)


def exit_code(rows: Iterable[dict]) -> int:
    """1 where a result was wrong, one of PEERS apart, or where flashattn has no figure on a GPU that was tried."""

    def bad(row: dict) -> bool:
        missing = row["device"] == "cuda" and row["status"] not in ("measured", "too slow")
        wrong = row["status"] == "wrong" and row["provider"] not in PEERS
        return wrong or (row["provider"] == "flashattn" and missing)

    return int(any(bad(row) for row in rows))

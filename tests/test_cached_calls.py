"""A call like an earlier one takes a short cut (interface._calls, launcher.CachedLaunch): it must compute the same."""

import ctypes
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from oracle import DEVICE, assert_equal, inputs

from flashattn import attention, autograd, configs, interface, launcher


def gradients(q, k, v, do, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = attention(q, k, v, return_lse=True, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad((o, lse), (q, k, v), (do, lse.detach()))


def afresh(*tensors, **options):
    interface._calls.clear()
    return gradients(*tensors, **options)


@pytest.fixture
def launches(monkeypatch):
    """The launches that Triton has looked at, since the test began."""
    seen, run = [], launcher.Launch.run

    def counted(launch):
        seen.append(launch.kernel)
        return run(launch)

    monkeypatch.setattr(launcher.Launch, "run", counted)
    return seen


def misaligned(x):
    room = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)
    return room[1:].view(x.shape).copy_(x)


VIEWS = {
    "new values": lambda x: x + 1,
    "rows first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:1].expand_as(x),
    "not at a multiple of 16 bytes": misaligned,
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_second_call_computes_the_same(view, causal):
    first = inputs(2, 4, 200, 300, 64, heads_k=2)
    do = torch.randn_like(first[0])
    second, do_2 = [view(x) for x in first], view(do)
    expected = afresh(*second, do_2, causal=causal)
    interface._calls.clear()
    gradients(*first, do, causal=causal)
    for _ in range(2):
        assert_equal(gradients(*second, do_2, causal=causal), expected)


@pytest.mark.gpu
def test_a_second_call_of_wide_heads_computes_the_same():
    """On a T4 dK and dV are two launches there, which are remembered together."""
    first = inputs(1, 2, 200, 300, 192)
    do = torch.randn_like(first[0])
    expected = afresh(*first, do)
    gradients(*[x + 1 for x in first], do)
    assert_equal(gradients(*first, do), expected)


@pytest.mark.gpu
def test_a_second_call_asks_triton_nothing(launches):
    tensors = inputs(1, 2, 100, 100, 64)
    afresh(*tensors, torch.randn_like(tensors[0]))
    assert len(launches) == 4  # forward, delta, dkdv, dq
    gradients(*tensors, torch.randn_like(tensors[0]))
    assert len(launches) == 4
    gradients(*tensors, torch.randn_like(tensors[0]), scale=0.5)
    assert len(launches) == 8


@pytest.mark.gpu
def test_a_second_call_runs_on_the_current_stream(launches):
    """Its inputs are late there: on any other stream it would compute with zeros."""
    tensors = inputs(1, 2, 200, 200, 64)
    do = torch.randn_like(tensors[0])
    expected = afresh(*tensors, do)
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    seen = len(launches)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)  # cycles, some 50 ms
        for x, value in zip(late, tensors, strict=True):
            x.copy_(value)
        actual = gradients(*late, do)
    torch.cuda.synchronize()
    assert len(launches) == seen
    assert_equal(actual, expected)


@pytest.mark.gpu
def test_a_second_call_in_a_cuda_graph(launches):
    """The graph computes with what its inputs hold when it is replayed."""
    tensors = inputs(1, 2, 200, 200, 64)
    do = torch.randn_like(tensors[0])
    afresh(*tensors, do)
    seen, graph = len(launches), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = gradients(*tensors, do)
    assert len(launches) == seen
    for x in tensors:
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert_equal(actual, afresh(*tensors, do))


@pytest.mark.gpu
def test_threads_remember_together(launches, monkeypatch):
    """Also where one forgets all calls while others take theirs."""
    cases = [inputs(1, 2, length, 100, 64) for length in range(90, 100)]
    grads = [torch.randn_like(q) for q, _, _ in cases]
    expected = [afresh(*tensors, do) for tensors, do in zip(cases, grads, strict=True)]
    torch.cuda.synchronize()
    monkeypatch.setattr(interface, "MAX_CALLS", 6)
    seen, interval = len(launches), sys.getswitchinterval()

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in random.Random(seed).choices(range(len(cases)), k=50):
                actual = gradients(*cases[number], grads[number])
                torch.cuda.current_stream().synchronize()
                assert_equal(actual, expected[number])

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert 0 < len(launches) - seen < 4 * 4 * 50  # of as many: some were remembered, and some forgotten


@pytest.mark.gpu
def test_a_tile_is_chosen_anew_after_tuning(launches, monkeypatch):
    tensors = inputs(1, 2, 100, 100, 64)
    attention(*tensors)
    seen = len(launches)
    monkeypatch.setattr(configs, "tunings", configs.tunings + 1)
    attention(*tensors)
    attention(*tensors)
    assert len(launches) == seen + 1


@pytest.mark.gpu
def test_a_profiler_sees_a_second_call():
    """Triton's own, Proton, counts on these hooks."""
    owner, seen = launcher._hooks_owner(), []
    q, k, v = inputs(1, 2, 100, 100, 64)
    attention(q, k, v)
    assert not launcher._is_watched()
    chain = owner.launch_enter_hook
    if hasattr(chain, "add"):
        chain.add(seen.append)
    else:
        owner.launch_enter_hook = seen.append
    try:
        attention(q, k, v)
    finally:
        chain.remove(seen.append) if hasattr(chain, "remove") else setattr(owner, "launch_enter_hook", chain)
    assert [metadata.get()["name"] for metadata in seen] == ["forward_kernel"]
    attention(q, k, v)
    assert len(seen) == 1


class Emulated:
    """A CachedLaunch where there is no GPU: the interpreted kernel on tensors at these addresses."""

    def __init__(self, launch, run):
        self.launch, self.launch_run = launch, run

    def run(self, addresses):
        left = iter(addresses)
        args = (self.at(next(left), x) if isinstance(x, torch.Tensor) else x for x in self.launch.args)
        self.launch_run(self.launch._replace(args=tuple(args)))

    @staticmethod
    def at(address, like):
        elements = sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True)) + 1
        memory = (ctypes.c_char * (elements * like.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@pytest.fixture
def remembering(monkeypatch):
    """A function like attention() that remembers calls with one layout of q, k and v, on a CPU too."""
    if DEVICE == "cpu":
        run = launcher.Launch.run
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)  # not the CPU's -1: a result is asked for
        monkeypatch.setattr(launcher.Launch, "run", lambda launch: run(launch) or Emulated(launch, run))
    cache = {}
    return lambda q, k, v: autograd.attend(q, k, v, False, 0.25, "triton", cache)[0]


def test_only_what_is_needed_is_computed_again(remembering):
    tensors = inputs(1, 2, 100, 100, 64)
    before = [x.clone() for x in tensors]
    do = torch.randn_like(tensors[0])
    leaves = [x.detach().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(autograd.attend(*leaves, False, 0.25, "triton")[0], leaves, do)
    for needs in 2 * [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]:
        leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        remembering(*leaves).backward(do)
        for x, leaf, need, grad in zip(before, leaves, needs, expected, strict=True):
            assert torch.equal(leaf, x)
            assert torch.equal(leaf.grad, grad) if need else leaf.grad is None


def test_what_a_backward_pass_is_remembered_by():
    """All that hooks on saved tensors, and whoever gives the gradients, may change."""
    q, k, v = inputs(1, 2, 60, 60, 16)
    tensors, needs = [q, k, v, q, q], [True, True, True]
    keys = {autograd._backward_key(tensors, None, needs), autograd._backward_key(tensors, q, needs)}
    keys |= {autograd._backward_key(tensors, None, [*needs[:i], False, *needs[i + 1 :]]) for i in range(3)}
    for i in range(5):
        for changed in (tensors[i].float(), tensors[i].mT, tensors[i].to("cpu" if DEVICE == "cuda" else "meta").mT):
            keys.add(autograd._backward_key([*tensors[:i], changed, *tensors[i + 1 :]], None, needs))
    assert len(keys) == 2 + 3 + 5 * (3 if DEVICE == "cuda" else 2)  # a CPU and "meta" have the same number


def test_the_output_is_let_go_of_before_there_are_gradients(monkeypatch):
    q, k, v = inputs(1, 1, 40, 40, 16, requires_grad=True)
    alive, passes = [], autograd._BACKENDS["reference"]  # some interpreters of Triton hold on

    def backward(*args, **options):
        alive.append(not torch.UntypedStorage._expired(memory))
        return passes.backward(*args, **options)

    monkeypatch.setitem(autograd._BACKENDS, "reference", passes._replace(backward=backward))
    for kept in (False, True):
        o = attention(q, k, v, backend="reference")
        memory = o.untyped_storage()._weak_ref()
        loss = o.sum()
        if not kept:
            del o
        loss.backward()
        torch.UntypedStorage._free_weak_ref(memory)
    assert alive == [False, True]


@pytest.mark.gpu
def test_saved_tensors_that_hooks_laid_out_anew():
    """As offloading to the CPU does, for some layers and not for others."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(1, 4, 200, 200, 64))
    do = torch.randn_like(q)
    expected = afresh(q, k, v, do)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
        actual = gradients(q, k, v, do)
    torch.testing.assert_close(actual, expected)


@pytest.mark.gpu
def test_what_is_refused_stays_refused():
    q, k, v = inputs(1, 2, 20, 20, 16)
    attention(q, k, v, causal=True, scale=1.0)
    for other in (lambda x: x.float(), lambda x: x.cpu(), lambda x: x[:, :, :5], lambda x: x[..., :8]):
        for tensors in ((other(q), k, v), (q, other(k), v), (q, k, other(v))):
            if tensors[0].shape[2] == 20 or tensors[0].shape[3] == 8:  # another length of q alone is as good
                with pytest.raises((TypeError, ValueError)):
                    attention(*tensors, causal=True, scale=1.0)
    for wrong in (
        {"causal": 1},
        {"causal": True, "scale": True},
        {"causal": True, "scale": "1.0"},
        {"backend": ["auto"]},
    ):
        with pytest.raises((TypeError, ValueError)):
            attention(q, k, v, **wrong)


@pytest.mark.gpu
def test_autocast_is_seen():
    q, k, v = inputs(1, 2, 20, 20, 16)
    assert attention(q, k, v).dtype == torch.float16
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            assert attention(q, k, v).dtype == dtype


@pytest.mark.gpu
def test_few_kinds_are_remembered(monkeypatch):
    monkeypatch.setattr(interface, "MAX_CALLS", 3)
    interface._calls.clear()
    q, k, v = inputs(1, 1, 9, 9, 16)
    for length in range(1, 10):
        attention(q[:, :, :length], k, v)
    assert 1 <= len(interface._calls) <= 3


@pytest.mark.skipif(DEVICE == "cuda", reason="for a CPU, where nothing is remembered")
def test_a_cpu_remembers_nothing():
    interface._calls.clear()
    attention(*inputs(1, 1, 9, 9, 16))
    assert not interface._calls


def test_a_backward_pass_that_is_watched_takes_the_operator(monkeypatch):
    """Compiled autograd, or a FLOP counter, may come after an eager forward pass that was remembered."""

    def _delta(*args, **options):
        raise AssertionError("not by the operator")

    def _backward(*args, **options):
        raise AssertionError("not by the operator")

    q, k, v = inputs(1, 1, 5, 7, 8, dtype=torch.float32, requires_grad=True)
    o, _ = autograd.attend(q, k, v, False, 0.5, "reference", {})
    monkeypatch.setattr(autograd, "_delta", _delta)
    monkeypatch.setattr(autograd, "_backward", _backward)
    monkeypatch.setattr(autograd, "eager", lambda *tensors: False)
    for x, grad in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape


class Made:
    """A launch, and what is remembered of it."""

    def __init__(self, number, ran):
        self.number, self.ran = number, ran

    def run(self, *addresses):
        self.ran.append((self.number, *addresses))
        return Made(-self.number, self.ran)


def test_launch_remembers_by_name():
    ran, cache, q = [], {}, torch.zeros(5)

    def launch(number, name, x):
        launcher.launch(lambda: [Made(number, ran), Made(number + 1, ran)], (q, x), name, cache)

    launch(1, "a", q)
    launch(3, "a", q)
    launch(5, "b", q)
    launch(7, "a", q[4:])
    launch(9, "a", q[1:])  # whose address is no multiple of 16
    first, second = [(1,), (2,)], [(-1, [q.data_ptr(), q.data_ptr()]), (-2, [q.data_ptr(), q.data_ptr()])]
    third = [(-1, [q.data_ptr(), q.data_ptr() + 16]), (-2, [q.data_ptr(), q.data_ptr() + 16])]
    assert ran == [*first, *second, (5,), (6,), *third, (9,), (10,)]
    launcher.launch(lambda: [Made(11, ran)], (q,), "a", None)
    assert ran[-1] == (11,)


def test_a_misaligned_launch_is_not_remembered():
    ran, cache, q = [], {}, torch.zeros(5)
    for x in (q[1:], q):
        launcher.launch(lambda: [Made(1, ran)], (x,), "a", cache)
    assert ran == [(1,), (1,)] and cache


def test_empty_remembers_by_name(monkeypatch):
    from torch._C._dynamo.guards import _empty_strided_cpu

    monkeypatch.setattr(launcher, "_empty_strided_cuda", _empty_strided_cpu)
    asked = []

    def make():
        asked.append(None)
        return torch.empty(2, 3, 5, dtype=torch.float16).transpose(0, 1)

    cache = {}
    for device, times in ((-1, 1), (-1, 1), (1, 2)):  # -1 is a CPU's number; a GPU that is not the current one is asked
        monkeypatch.setattr(torch._C, "_cuda_getDevice", partial(int, device))
        x = launcher.empty(make, "x", cache)
        assert (x.shape, x.stride(), x.dtype) == ((3, 2, 5), (5, 15, 1), torch.float16) and len(asked) == times
    launcher.empty(make, "x", None)
    assert len(asked) == 3

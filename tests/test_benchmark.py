"""The benchmark times nothing that is wrong and says why a cell is empty; the README shows its figures."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from children import ROOT, environment

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark
import benchmark_attention
import benchmark_report
import readme_tables

from flashattn import measure
from flashattn.reference import dense_attention

CPU = torch.device("cpu")
CASE = benchmark.Case(batch=1, heads=3, seqlen=40, head_dim=16, causal=True, dtype="float32")


def run_script(name, *args):
    """Run a command without the interpreter and return it, finished."""
    command = [sys.executable, ROOT / "scripts" / name, *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment(interpreted=False), timeout=300)


def test_cases_hold_tokens_and_width():
    cases = benchmark.make_cases([512, 2048], [64, 128], [False, True], "float16", tokens=4096, width=256)
    shapes = {(c.batch, c.heads, c.seqlen, c.head_dim) for c in cases}
    assert shapes == {(8, 4, 512, 64), (8, 2, 512, 128), (2, 4, 2048, 64), (2, 2, 2048, 128)}
    assert len(cases) == 8
    given = benchmark.make_cases([512], [64], [False], "float16", tokens=4096, width=256, batch=3, heads=5)
    assert (given[0].batch, given[0].heads) == (3, 5)


@pytest.mark.parametrize("flag", ["--seq-lens", "--head-dims", "--tokens", "--width", "--batch", "--heads"])
@pytest.mark.parametrize("text", ["0", "-4", "64.5", "many"])
def test_shapes_that_are_refused(flag, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.flags("", CPU).parse_args([flag, text])
    assert f"argument {flag}: got {text!r}, accepted are whole numbers from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--peer-seq-lens", "--grouped-seq-lens", "--host-seq-lens"])
def test_lengths_that_are_refused(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark_attention.py", flag, "0"])
    with pytest.raises(SystemExit, match="2"):
        benchmark_attention.main()
    assert f"argument {flag}: got '0', accepted are whole numbers from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_by_blocks_is_the_dense_one(causal, monkeypatch):
    tensors = benchmark.random_tensors(CASE, CPU)
    monkeypatch.setattr(benchmark, "ORACLE_SCORES", 3 * 40 * 7)  # blocks of 7 rows: the last one is short
    blocks = benchmark.exact_results(*tensors, causal)
    leaves = [t.double().requires_grad_() for t in tensors[:3]]
    o, _ = dense_attention(*leaves, causal=causal)
    whole = [o.detach(), *torch.autograd.grad(o, leaves, tensors[3].double())]
    for ours, dense in zip(blocks.values(), whole, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-13)


def naive_with_wrong_dv(q, k, v, causal):
    return benchmark.naive_attention(q, k, v + 0.5 * (v - v.detach()), causal)


def wrong_in_the_last_head(q, k, v, causal):
    o = benchmark.naive_attention(q, k, v, causal)
    return o + torch.eye(3)[2, :, None, None] * 1e-3


def refusing(q, k, v, causal):
    raise NotImplementedError("head_dim: got 16, accepted are others\nand a second line")


def asserting(q, k, v, causal):
    assert q.is_cuda, "All tensors must reside on CUDA device"


def too_large(q, k, v, causal):
    raise torch.OutOfMemoryError("no room")


def made_up_providers(monkeypatch, *providers):
    monkeypatch.setattr(benchmark, "make_providers", lambda device: list(providers))


def test_sweep_measures_only_what_is_right(monkeypatch, capsys):
    fns = (naive_with_wrong_dv, wrong_in_the_last_head, refusing, asserting, too_large)
    providers = [benchmark.Provider(fn.__name__, fn) for fn in (benchmark.naive_attention, *fns)]
    providers.append(benchmark.Provider("untimed", benchmark.naive_attention, timed=False))
    made_up_providers(monkeypatch, *providers)
    rows = benchmark.sweep([CASE], list(measure.WORK), CPU, budget_ms=1)
    by_name = {(row["provider"], row["mode"]): row for row in rows}
    statuses = {name: [by_name[name, mode]["status"] for mode in measure.WORK] for name, _ in by_name}
    assert statuses == {
        "naive_attention": ["measured"] * 3,
        "naive_with_wrong_dv": ["measured", "wrong", "wrong"],
        "wrong_in_the_last_head": ["wrong"] * 3,
        "refusing": ["refused"] * 3,
        "asserting": ["refused"] * 3,
        "too_large": ["out of memory"] * 3,
        "untimed": ["checked"] * 3,
    }
    for row in rows:
        assert (row["median_ms"] is not None) == (row["status"] == "measured")
        assert set(measure.run_metadata(CPU)) < set(row)
    forward = by_name["naive_attention", "forward"]
    assert forward["tflops"] == pytest.approx(CASE.flops("forward") / forward["median_ms"] / 1e9)
    assert forward["p20_ms"] <= forward["median_ms"] <= forward["p80_ms"] and forward["samples"] >= 5
    assert forward["matmul_share"] == pytest.approx(forward["tflops"] / forward["matmul_tflops"])
    assert (forward["heads_k"], forward["part"], forward["wall_us"]) == (3, "lengths", None)
    assert 0 < forward["error"] <= forward["bound"]
    assert by_name["naive_with_wrong_dv", "backward"]["note"].startswith("dv ")
    assert by_name["refusing", "forward"]["note"] == "NotImplementedError: head_dim: got 16, accepted are others"
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(providers)  # the case, and the matrix product
    assert benchmark.exit_code(rows) == 1

    why = benchmark_report.not_measured(pd.DataFrame(rows)).set_index("provider")
    assert why.loc["naive_with_wrong_dv", "modes"] == "backward, forward+backward"
    assert "naive_attention" not in why.index


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_against_the_dense_oracle(causal, monkeypatch):
    """Truth's whole groups: a wrong last key head is seen in dk, and by its last query head in o."""
    case = benchmark.Case(2, 6, 40, 16, causal, "float32", heads_k=2)
    tensors = benchmark.random_tensors(case, CPU)
    assert [t.shape[1] for t in tensors] == [6, 2, 2, 6]
    monkeypatch.setattr(benchmark, "BASELINE_SCORES", 6 * 40 * 7)  # of the two groups in blocks of 7 rows
    truth = benchmark.Truth(tensors, causal)
    naive = benchmark.results(benchmark.naive_attention, tensors, causal, gradients=True)
    truth.check(naive)
    for name, head in (("o", 5), ("dk", 1)):
        changed = naive[name].clone()
        changed[1, head, 39] += 1e-2
        with pytest.raises(AssertionError, match=f"^{name} "):
            truth.check({name: changed})


def test_grouped_and_host_cases():
    grouped = benchmark.grouped_cases([4096], "float16", tokens=8192, width=2048)
    assert [(c.batch, c.heads, c.heads_k, c.causal, c.part) for c in grouped] == [
        (2, 32, 32, True, "grouped heads"),
        (2, 32, 8, True, "grouped heads"),
    ]
    assert grouped[0].flops("forward") == grouped[1].flops("forward")
    assert grouped[0].bytes_moved("forward") > grouped[1].bytes_moved("forward")
    assert [c.heads_k for c in benchmark.grouped_cases([64], "float16", 64, 128)] == [2, 1]
    assert [c.heads_k for c in benchmark.grouped_cases([64], "float16", 64, 32)] == [1]
    assert [(c.batch, c.seqlen, c.part) for c in benchmark.host_cases([128, 512], "float16")] == [
        (1, 128, "host cost"),
        (1, 512, "host cost"),
    ]


@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_is_called_as_it_is_meant(causal, heads_k, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiled.append(options) or fn)
    flex = benchmark.FlexAttention()
    for seqlen in (128, 200):
        tensors = benchmark.random_tensors(benchmark.Case(1, 4, seqlen, 16, causal, "float32", heads_k=heads_k), CPU)
        exact = benchmark.exact_results(*tensors, causal)
        for gradients in (False, True):
            for name, actual in benchmark.results(flex, tensors, causal, gradients).items():
                torch.testing.assert_close(actual.double(), exact[name], rtol=0, atol=1e-5)
    ours = [options for options in compiled if "backend" not in options]  # uncompiled it compiles for itself
    assert ours == [{"dynamic": False}] * 2  # once a shape


def test_packages_are_given_their_layout(monkeypatch):
    """The two packages' signatures, as of 0.1.1 both."""
    seen = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        seen.append([t.is_contiguous() for t in (q, k, v)])
        print("Warning: at every call")
        return benchmark.naive_attention(*(t.transpose(1, 2) for t in (q, k, v)), causal).transpose(1, 2)

    def flash_attention_v2(q, k, v, softmax_scale=None, deterministic=False):
        return benchmark.naive_attention(q, k, v, True)

    monkeypatch.setitem(sys.modules, "flash_attn_triton", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setitem(sys.modules, "flash_attention_triton", SimpleNamespace(flash_attention_v2=flash_attention_v2))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    assert benchmark.missing_packages() == ["flash-attn-triton", "flash-attention-triton"]
    assert [p.name for p in benchmark.make_providers(gpu)][-1] == "flex"
    monkeypatch.setattr(benchmark, "find_spec", lambda name: name)
    assert benchmark.missing_packages() == []
    providers = {p.name: p for p in benchmark.make_providers(gpu)}
    assert list(providers)[-3:] == list(benchmark.PEERS)
    made_up_providers(monkeypatch, *(providers[name] for name in benchmark.PACKAGES))
    rows = [
        row
        for causal in (False, True)
        for row in benchmark.sweep([replace(CASE, causal=causal)], ["forward", "forward+backward"], CPU, budget_ms=1)
    ]
    assert [(row["provider"], row["status"]) for row in rows[::2]] == [
        ("flash_attn_triton", "measured"),
        ("flash_attention_triton", "refused"),
        ("flash_attn_triton", "measured"),
        ("flash_attention_triton", "measured"),
    ]
    assert all(all(contiguous) for contiguous in seen)


def test_a_wrong_peer_is_told_and_is_no_fault_of_ours(monkeypatch):
    peer = benchmark.Provider("flex", wrong_in_the_last_head)
    made_up_providers(monkeypatch, peer)
    rows = benchmark.sweep([CASE], ["forward"], CPU)
    assert rows[0]["status"] == "wrong" and benchmark.exit_code(rows) == 0
    rows[0]["provider"] = "sdpa_math"
    assert benchmark.exit_code(rows) == 1


def test_peers_are_asked_at_their_lengths_and_once_where_that_takes_a_compilation(monkeypatch):
    asked = []

    def flex(q, k, v, causal):
        asked.append((q.shape[2], q.requires_grad))
        raise RuntimeError("no valid configuration")

    made_up_providers(
        monkeypatch,
        benchmark.Provider("naive", benchmark.naive_attention),
        benchmark.Provider("flex", flex, asked_once=True),
    )
    cases = benchmark.make_cases([32, 48, 64], [16], [True], "float32", tokens=64, width=16)
    rows = benchmark.sweep(cases, list(measure.WORK), CPU, budget_ms=1, peer_seq_lens=[32, 64])
    assert asked == [(32, False), (32, True)]
    refused = [row for row in rows if row["provider"] == "flex"]
    assert [row["seqlen"] for row in refused] == [32] * 3 + [64] * 3
    assert {row["note"] for row in refused} == {"RuntimeError: no valid configuration"}
    assert sum(row["status"] == "measured" for row in rows) == 9


def test_what_cannot_fit_is_not_tried(monkeypatch):
    tried = []

    def naive(q, k, v, causal):
        tried.append(q.shape)
        return benchmark.naive_attention(q, k, v, causal)

    monkeypatch.setattr(benchmark, "_two_matrices_fit", lambda q: q.shape[2] < 40)
    made_up_providers(monkeypatch, benchmark.Provider("naive", naive, quadratic=True))
    (row,) = benchmark.sweep([CASE], ["forward"], CPU)
    assert row["status"] == "out of memory" and row["note"].startswith("not tried: its scores") and not tried


def test_free_memory_counts_what_the_allocator_keeps(monkeypatch):
    q = SimpleNamespace(device=torch.device("cuda", 0), shape=(2, 3, 100, 16), itemsize=2)  # 240,000 bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200_000, 1 << 34))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000)
    assert benchmark._two_matrices_fit(q)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_001)
    assert not benchmark._two_matrices_fit(q)


def test_what_would_take_too_long_is_not_tried(monkeypatch):
    made_up_providers(monkeypatch, benchmark.Provider("naive", benchmark.naive_attention))
    cases = benchmark.make_cases([32, 256], [16], [False], "float32", tokens=32, width=16)
    rows = benchmark.sweep(cases, ["forward"], CPU, budget_ms=1, call_limit_s=1e-9)
    assert [row["status"] for row in rows] == ["measured", "too slow"]
    ours = {**rows[1], "provider": "flashattn", "device": "cuda"}
    assert benchmark.exit_code([ours]) == 0 and benchmark.exit_code([{**ours, "status": "refused"}]) == 1
    assert rows[1]["note"].startswith("not tried: at its rate")


def test_rows_tell_the_clock_and_the_throttling_of_their_own_timing(monkeypatch, capsys):
    live = {"sm_clock_mhz": 960.0, "memory_clock_mhz": 5000.0, "power_draw_w": 70.1, "temperature_c": 71.0}
    monkeypatch.setattr(measure, "live_state", lambda device: live | {"throttle": "power cap"})
    made_up_providers(
        monkeypatch, benchmark.Provider("naive", benchmark.naive_attention), benchmark.Provider("none", refusing)
    )
    naive, none = benchmark.sweep([CASE], ["forward"], CPU, budget_ms=1)
    assert (naive["sm_clock_mhz"], naive["power_draw_w"], naive["throttle"]) == (960.0, 70.1, "power cap")
    assert none["sm_clock_mhz"] == ""
    assert capsys.readouterr().out.splitlines()[-1] == "    throttled by power cap: SM clock 960 to 960 MHz"


def test_wall_time_is_a_column_of_its_own(monkeypatch):
    made_up_providers(monkeypatch, benchmark.Provider("naive", benchmark.naive_attention))
    rows = benchmark.sweep(benchmark.host_cases([16], "float32"), benchmark.EAGER_MODES, CPU, budget_ms=5, wall=True)
    assert [row["part"] for row in rows] == ["host cost"] * 2
    assert all(row["wall_us"] > 10 and row["median_ms"] > 0 for row in rows)


def test_sustained(monkeypatch):
    made_up_providers(monkeypatch, benchmark.Provider("flashattn", benchmark.naive_attention))
    rests = []
    monkeypatch.setattr(measure, "sleep", rests.append)
    rows = benchmark.sustained(CASE, 0.05, CPU)
    assert [(row["provider"], row["mode"], row["window"]) for row in rows] == [
        (name, mode, window)
        for name, mode in (("flashattn", "forward"), ("flashattn", "forward+backward"), ("matrix product", ""))
        for window in ("first second", "whole", "last second")
    ]
    assert rests == [0.05] * 3 and all(row["tflops"] > 0 and row["commit"] for row in rows)
    assert rows[1]["tflops"] == pytest.approx(CASE.flops("forward") / rows[1]["ms_per_call"] / 1e9)
    assert benchmark.sustained(CASE, 0, CPU) == []
    made_up_providers(monkeypatch, benchmark.Provider("flashattn", wrong_in_the_last_head))
    assert benchmark.sustained(CASE, 0.05, CPU) == [] and rests == [0.05] * 3


@pytest.mark.parametrize("mode", ["forward+backward", benchmark.RELEASED])
def test_both_ways_to_measure_memory_compute_the_gradients(mode):
    tensors = benchmark.random_tensors(CASE, CPU)
    expected = benchmark.results(benchmark.naive_attention, tensors, CASE.causal, gradients=True)
    provider = benchmark.Provider("naive", benchmark.naive_attention)
    with benchmark._ready(provider, tensors, CASE.causal, mode) as call:
        for grad, name in zip(call(), ("dq", "dk", "dv"), strict=True):
            assert torch.equal(grad, expected[name])


def test_memory_reduction():
    shape = {"head_dim": 64, "causal": False}
    rows = [
        {"provider": p, "mode": m, "seqlen": n, "extra_mib": x, "released_mib": x and x - 1, **shape}
        for p, m, n, x in (
            ("naive", "forward", 512, 30.0),
            ("flashattn", "forward", 512, 2.0),
            ("naive", "forward", 1024, None),
            ("flashattn", "forward", 1024, 4.0),
            ("naive", "backward", 512, 7.0),
        )
    ]
    reduction = benchmark_report.memory_reduction(pd.DataFrame(rows))
    assert reduction.loc[("forward", 64, False, 512), "reduction"] == 15
    assert reduction.loc[("forward", 64, False, 512), "released"] == 1
    assert reduction["reduction"].isna().tolist() == [False, True]


def test_figures_show_every_point():
    """Panels of a row share an axis: the last one may hold the largest value, or the first."""
    rows = [
        {"mode": "forward", "head_dim": d, "causal": c, "seqlen": n, "provider": "flashattn", "value": value}
        for d, c, value in ((64, False, 900.0), (64, True, 10.0), (128, False, 2000.0))
        for n in (128, 256)
    ]
    machine = {"gpu": "A GPU", "dtype": "float16", "torch": "2", "triton": "3", "commit": "0" * 40, "dirty": "no"}
    figure = benchmark_report._draw(pd.DataFrame(rows).assign(**machine), "value", "TFLOP/s", log=False)
    for axis in figure.axes:
        bottom, top = axis.get_ylim()
        assert all(bottom <= y <= top for line in axis.get_lines() for y in line.get_ydata())


def test_attention_command_line(tmp_path):
    flags = ["--seq-lens", "64", "128", "--causal", "--tokens", "128", "--width", "64", "--budget-ms", "5"]
    done = run_script("benchmark_attention.py", *flags, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "attention.csv")
    ours = rows[rows["provider"] == "flashattn"]
    assert len(ours) == 6 and rows["causal"].all()
    assert set(ours["status"]) == {"measured" if torch.cuda.is_available() else "refused"}
    assert ours["tflops"].notna().all() == torch.cuda.is_available()
    assert (rows.loc[rows["provider"] == "naive", "tflops"] > 0).all()
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    assert "forward+backward" in done.stdout


def test_attention_command_line_with_all_parts(tmp_path):
    flags = ["--seq-lens", "64", "--tokens", "64", "--width", "256", "--budget-ms", "2", "--modes", "forward"]
    parts = ["--grouped-seq-lens", "64", "--host-seq-lens", "32", "--sustained-s", "0.1", "--peer-seq-lens"]
    done = run_script("benchmark_attention.py", *flags, *parts, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "attention.csv")
    assert set(rows["part"]) == set(benchmark.PARTS)
    assert set(rows.loc[rows["part"] == "grouped heads", "heads_k"]) == {1, 4}
    naive = rows[rows["provider"] == "naive"]
    assert (naive["wall_us"].notna() == (naive["part"] == "host cost")).all() and (naive["matmul_share"] > 0).all()
    assert not set(rows["provider"]) & set(benchmark.PEERS)
    assert (tmp_path / "sustained.csv").is_file() == torch.cuda.is_available()
    for told in ("grouped heads, TFLOP/s", "heads_k", "host cost, microseconds"):
        assert told in done.stdout
    assert ("not installed, and so not measured" in done.stdout) == bool(benchmark.missing_packages())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_memory_command_line_needs_a_gpu(tmp_path):
    done = run_script("benchmark_memory.py", "--seq-lens", "64", "--output", str(tmp_path))
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr.count("\n") == 1 and "needs a CUDA device" in done.stderr


@pytest.mark.gpu
def test_memory_command_line(tmp_path):
    flags = ["--seq-lens", "1024", "2048", "--head-dims", "64", "--output", str(tmp_path)]
    done = run_script("benchmark_memory.py", *flags)
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "memory.csv")
    extra = rows[rows["mode"] == "forward"].pivot(index="seqlen", columns="provider", values="extra_mib")
    assert (extra["naive"] > 5 * extra["flashattn"]).all()
    assert (tmp_path / "memory.png").is_file()


def made_up_rows(date, ours):
    run = {"batch": 2, "heads": 4, "seqlen": 8192, "head_dim": 64, "causal": True, "dtype": "float16"}
    run |= {"gpu": "NVIDIA H200", "torch": "2.6.0", "triton": "3.2.0", "driver": "550.1", "dirty": "no"}
    run |= {"commit": "0123456789", "date": date, "mode": "forward"}
    return [
        {**run, "provider": "flashattn", "tflops": ours},
        {**run, "provider": "sdpa_flash", "tflops": 200.0},
        {**run, "provider": "sdpa_cudnn", "tflops": None},
        {**run, "provider": "naive", "tflops": 9.0},
    ]


@pytest.fixture
def readme(tmp_path):
    """A README with one table marked, and the results of two runs. Returns (README, arguments for main)."""
    results = tmp_path / "results"
    measure.write_csv(results / "2026-01-02_h200_bbb" / "attention.csv", made_up_rows("2026-01-02T00:00", 250.0))
    measure.write_csv(results / "2026-01-01_h200_aaa" / "attention.csv", made_up_rows("2026-01-01T00:00", 100.0))
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- table:h200_forward -->\nold\n<!-- /table:h200_forward -->\nafter\n")
    return path, ["--readme", str(path), "--results", str(results)]


def test_readme_table_is_from_the_newest_run(readme):
    path, arguments = readme
    assert readme_tables.main([*arguments, "--check"]) == 1
    assert "old" in path.read_text()
    assert readme_tables.main(arguments) == 0
    assert readme_tables.main([*arguments, "--check"]) == 0
    text = path.read_text()
    assert text.startswith("before\n<!-- table:h200_forward -->\n| head dim | causal | length | flashattn |")
    assert "| 64 | yes | 8,192 | 250 | 200 | - | 1.25 |\n" in text
    assert text.endswith("<!-- /table:h200_forward -->\nafter\n")
    for fact in (
        "NVIDIA H200",
        "torch 2.6.0",
        "Triton 3.2.0",
        "commit 0123456,",
        "2026-01-02",
        "16,384",
        "256",
    ):
        assert fact in text
    assert "uncommitted" not in text and "aaa" not in text


def test_readme_table_is_of_lengths_alone(readme):
    path, arguments = readme
    rows = [{**row, "part": "lengths", "heads_k": 4} for row in made_up_rows("2026-01-03T00:00", 300.0)]
    rows += [{**row, "part": "grouped heads", "heads_k": 1} for row in made_up_rows("2026-01-03T00:00", 290.0)]
    rows.append({**rows[0], "provider": "flex", "tflops": 150.0})
    measure.write_csv(path.parent / "results" / "2026-01-03_h200_ccc" / "attention.csv", rows)
    assert readme_tables.main(arguments) == 0
    text = path.read_text()
    assert "SDPA EFFICIENT" not in text and "| SDPA cuDNN | FlexAttention | ratio to FLASH |" in text
    assert "| 64 | yes | 8,192 | 300 | 200 | - | 150 | 1.50 |\n" in text and "290" not in text


@pytest.mark.parametrize(("name", "lacking"), [("t4_forward", "got GPU 't4'"), ("h200_backward", "'backward'")])
def test_readme_table_without_figures_is_an_error(readme, name, lacking, capsys):
    path, arguments = readme
    path.write_text(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n")
    with pytest.raises(SystemExit):
        readme_tables.main(arguments)
    assert lacking in capsys.readouterr().err


@pytest.mark.skipif(not [*ROOT.glob("results/*_*_*/")], reason="no results, as where the tree was pushed to Kaggle")
def test_the_readme_is_in_step_with_results():
    assert readme_tables.main(["--check"]) == 0

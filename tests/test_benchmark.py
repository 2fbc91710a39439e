"""The benchmark times nothing that is wrong and says why a cell is empty; the README shows its figures."""

import subprocess
import sys

import pandas as pd
import pytest
import torch
from children import ROOT, environment

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark
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


def too_large(q, k, v, causal):
    raise torch.OutOfMemoryError("no room")


def test_sweep_measures_only_what_is_right(monkeypatch, capsys):
    fns = (naive_with_wrong_dv, wrong_in_the_last_head, refusing, too_large)
    providers = [benchmark.Provider(fn.__name__, fn) for fn in (benchmark.naive_attention, *fns)]
    providers.append(benchmark.Provider("untimed", benchmark.naive_attention, timed=False))
    monkeypatch.setattr(benchmark, "make_providers", lambda device: providers)
    rows = benchmark.sweep([CASE], list(measure.WORK), CPU, budget_ms=1)
    by_name = {(row["provider"], row["mode"]): row for row in rows}
    statuses = {name: [by_name[name, mode]["status"] for mode in measure.WORK] for name, _ in by_name}
    assert statuses == {
        "naive_attention": ["measured"] * 3,
        "naive_with_wrong_dv": ["measured", "wrong", "wrong"],
        "wrong_in_the_last_head": ["wrong"] * 3,
        "refusing": ["refused"] * 3,
        "too_large": ["out of memory"] * 3,
        "untimed": ["checked"] * 3,
    }
    for row in rows:
        assert (row["median_ms"] is not None) == (row["status"] == "measured")
        assert set(measure.run_metadata(CPU)) < set(row)
    forward = by_name["naive_attention", "forward"]
    assert forward["tflops"] == pytest.approx(CASE.flops("forward") / forward["median_ms"] / 1e9)
    assert 0 < forward["error"] <= forward["bound"]
    assert by_name["naive_with_wrong_dv", "backward"]["note"].startswith("dv ")
    assert by_name["refusing", "forward"]["note"] == "NotImplementedError: head_dim: got 16, accepted are others"
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(providers)
    assert benchmark.exit_code(rows) == 1

    why = benchmark_report.not_measured(pd.DataFrame(rows)).set_index("provider")
    assert why.loc["naive_with_wrong_dv", "modes"] == "backward, forward+backward"
    assert "naive_attention" not in why.index


def test_memory_reduction():
    shape = {"head_dim": 64, "causal": False}
    rows = [
        {"provider": p, "mode": m, "seqlen": n, "extra_mib": x, **shape}
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

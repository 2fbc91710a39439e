"""The sweep over Triton releases: what fails, crashes, hangs or cannot be had is a row, and the rest goes on."""

import functools
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import pandas as pd
import pytest
import sweep_triton
import torch
import triton_releases
from children import ROOT, environment

from flashattn import measure

ROW = """
import json, os, sys
code = dict(mma=64, fma=0, registers=99, stack_bytes=0, shared_bytes=4096, compile_s=0.5)
def row(kernel, path, result="ok"):
    columns = dict(kernel=kernel, path=path, result=result) | (code if result == "ok" else {})
    print(json.dumps(columns | dict(stderr_bytes=os.fstat(2).st_size)), flush=True)
"""

run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=300)


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """An empty folder for releases."""
    folder = tmp_path / "releases"
    monkeypatch.setenv("FLASHATTN_TRITON_RELEASES", str(folder))
    return folder


@pytest.fixture
def installed(releases):
    """The version of the installed Triton, which lies in the folder for releases."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    release = releases / triton.__version__
    release.mkdir(parents=True)
    (release / "triton").symlink_to(os.path.dirname(triton.__file__))
    return triton.__version__


@pytest.fixture
def child(releases, tmp_path, monkeypatch):
    """Sets the code, after ROW, that the process of the one release there is, 1.2.3, runs."""
    (releases / "1.2.3" / "triton").mkdir(parents=True)
    (releases / "1.2.3" / "triton" / "__init__.py").touch()
    monkeypatch.setattr(sweep_triton, "CHILD", tmp_path / "child.py")
    return lambda code: (tmp_path / "child.py").write_text(ROW + code)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """pip with no index but a folder, in which 1.2.3 is the only Triton."""
    record = "triton-1.2.3.dist-info"
    with zipfile.ZipFile(tmp_path / "triton-1.2.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("triton/__init__.py", "__version__ = '1.2.3'\n")
        wheel.writestr(f"{record}/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 1.2.3\n")
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


# Releases ------------------------------------------------------------------------------------------------------------


def test_fetches_a_release_once_and_whole(releases, offline):
    assert triton_releases.path("1.2.3") is None
    with ThreadPoolExecutor() as threads:
        both = list(threads.map(triton_releases.fetch, ["1.2.3"] * 2))
    assert both == [releases / "1.2.3"] * 2 and triton_releases.path("1.2.3") == releases / "1.2.3"
    assert [path.name for path in releases.iterdir()] == ["1.2.3"]
    code = "import triton; print(triton.__version__)"
    done = run([sys.executable, "-c", code], env=environment(PYTHONPATH=str(releases / "1.2.3")))
    assert done.stdout == "1.2.3\n", done.stderr


def test_a_release_that_cannot_be_had(releases, offline):
    done = run([sys.executable, ROOT / "scripts" / "triton_releases.py", "9.9.9", "1.2.3"], env=environment())
    assert done.returncode == 1 and done.stdout == f"{releases / '1.2.3'}\n"
    assert done.stderr == "Triton 9.9.9 cannot be fetched: No matching distribution found for triton==9.9.9\n"
    assert [path.name for path in releases.iterdir()] == ["1.2.3"]


# A release's process -------------------------------------------------------------------------------------------------


def results(rows):
    return [(row["kernel"], row["path"], row["result"]) for row in rows]


def test_a_release_that_cannot_be_had_is_a_row(child, monkeypatch, capsys):
    def fetch(version):
        if version == "9.9.9":
            raise RuntimeError("No matching distribution found for triton==9.9.9")
        return triton_releases.path(version)

    monkeypatch.setattr(triton_releases, "fetch", fetch)
    child("row('matmul', 'stock')\nrow('matmul', 'restored', 'not needed')")
    rows = sweep_triton.sweep(["9.9.9", "1.2.3"], ["matmul"])
    why = "cannot be fetched: No matching distribution found for triton==9.9.9"
    assert results(rows) == [
        ("matmul", "stock", why),
        ("matmul", "restored", why),
        ("matmul", "stock", "ok"),
        ("matmul", "restored", "not needed"),
    ]
    assert [row["triton"] for row in rows] == ["9.9.9"] * 2 + ["1.2.3"] * 2  # not the installed one
    expected = dict.fromkeys([*sweep_triton.COLUMNS, *measure.run_metadata()])
    assert all(list(row) == list(expected) for row in rows)
    assert capsys.readouterr().out.count(why) == 1
    judged = sweep_triton.verdict(pd.DataFrame(rows))
    assert judged == {
        "ok": True,
        "counts": {"releases": 1, "not to be had": 1, "kernels with tensor cores": 1, "without": 0},
    }


def test_a_process_that_crashes_is_a_row(child):
    child("row('matmul', 'stock')\nprint('LLVM ERROR: no such layout', file=sys.stderr)\nos.abort()")
    assert results(sweep_triton.sweep(["1.2.3"], ["matmul", "forward"])) == [
        ("matmul", "stock", "ok"),
        ("matmul", "restored", "ended by SIGABRT: no such layout"),
        ("forward", "stock", "not reached"),
        ("forward", "restored", "not reached"),
    ]


def test_a_process_that_fails_is_a_row(child):
    child("import no_such")
    why = "ended with exit code 1: ModuleNotFoundError: No module named 'no_such'"
    assert results(sweep_triton.sweep(["1.2.3"], ["matmul"])) == [
        ("matmul", "stock", why),
        ("matmul", "restored", "not reached"),
    ]


def test_a_process_that_hangs_is_cut_off_with_what_it_started(child):
    child("import subprocess, time\nrow('matmul', 'stock')\nsubprocess.run(['sleep', '60'])")
    start = perf_counter()
    rows = sweep_triton.sweep(["1.2.3"], ["matmul"], limit_s=1)
    assert perf_counter() - start < 20
    assert results(rows) == [("matmul", "stock", "ok"), ("matmul", "restored", "cut off after 1 s")]


def test_a_kernel_that_fails_has_the_compilers_word_for_it(child, capsys):
    child(
        "print('LLVM ERROR: no such layout\\nmodule {', file=sys.stderr, flush=True)\n"
        "row('matmul', 'stock', 'RuntimeError: PassManager::run failed')\n"
        "row('matmul', 'restored')"
    )
    rows = sweep_triton.sweep(["1.2.3"], ["matmul"])
    assert [row["result"] for row in rows] == ["RuntimeError: PassManager::run failed (no such layout)", "ok"]
    assert "module {" not in "".join(capsys.readouterr())


def test_the_process_has_its_release_first_and_a_cache_of_its_own(child, releases, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    child("row('matmul', 'stock', json.dumps(dict(os.environ)))\nrow('matmul', 'restored')")
    seen = json.loads(sweep_triton.sweep(["1.2.3"], ["matmul"])[0]["result"])
    assert seen["PYTHONPATH"].split(os.pathsep) == [str(releases / "1.2.3"), str(ROOT), "elsewhere"]
    assert "TRITON_INTERPRET" not in seen
    assert not os.path.exists(os.path.dirname(seen["TRITON_CACHE_DIR"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_timing_without_a_gpu_is_refused(tmp_path, releases, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep_triton.main(["--time", "--output", str(tmp_path / "out")])
    assert ended.value.code == 2 and "needs a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The real one --------------------------------------------------------------------------------------------------------


def test_sweep_of_the_installed_release(installed, tmp_path):
    flags = ["--triton", installed, "--kernels", "matmul", "forward", "--output", str(tmp_path / "out")]
    assert sweep_triton.main(flags) == 0
    frame = pd.read_csv(tmp_path / "out" / "triton_versions.csv")
    assert (tmp_path / "out" / "triton_versions.png").stat().st_size > 10_000
    assert list(frame.columns[: len(sweep_triton.COLUMNS)]) == list(sweep_triton.COLUMNS)
    assert set(measure.run_metadata()) < set(frame.columns) and set(frame["triton"]) == {installed}

    import sweep_kernels

    restored = frame.loc[frame["result"] == sweep_triton.NOT_NEEDED].empty
    code = frame[frame["path"] == ("restored" if restored else "stock")].set_index("kernel")
    for kernel in ("matmul", "forward"):
        assert code.loc[kernel, "result"] == "ok"
        assert 1 <= code.loc[kernel, "mma"] / sweep_kernels.predict(kernel)["mma"] < 1.25
        assert 0 < code.loc[kernel, "shared_bytes"] <= sweep_triton.SHARED_BYTES
        assert 0 < code.loc[kernel, "registers"] <= 255 and code.loc[kernel, "compile_s"] > 0


@pytest.mark.slow
def test_notebook(installed, tmp_path):
    pytest.importorskip("papermill")
    command = [sys.executable, ROOT / "scripts" / "run_notebooks.py", "03_triton_versions"]
    done = run([*command, "-p", "releases", json.dumps([installed]), "--output", tmp_path], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "03_triton_versions.json").read_text())
    assert result["ok"] is True and result["counts"]["kernels with tensor cores"] == len(sweep_triton.KERNELS)
    assert {"triton_versions.csv", "triton_versions.png"} <= {path.name for path in tmp_path.iterdir()}


def test_notebook_and_command_have_the_same_releases():
    source = json.loads((ROOT / "notebooks" / "03_triton_versions.ipynb").read_text())
    (parameters,) = (cell for cell in source["cells"] if "parameters" in cell["metadata"].get("tags", []))
    given = {}
    exec("".join(parameters["source"]), given)
    assert tuple(given["releases"]) == sweep_triton.RELEASES


# What it shows -------------------------------------------------------------------------------------------------------


def made_up(changes=()):
    """A sweep of three releases, the last two of which need help; changes: {(release, kernel, path): columns}."""
    code = {"result": "ok", "mma": 64, "fma": 0, "shared_bytes": 16384, "compile_s": 0.5, "gpu": "A GPU"}
    scalar, none = code | {"mma": 0, "fma": 2048}, dict.fromkeys(code) | {"gpu": "A GPU"}
    rows = {}
    for kernel in ("dkdv", "forward"):
        rows["3.2.0", kernel, "stock"] = code
        rows["3.2.0", kernel, "restored"] = none | {"result": sweep_triton.NOT_NEEDED}
        rows["3.3.0", kernel, "stock"] = none | {"result": "RuntimeError: failed"}
        rows["3.3.0", kernel, "restored"] = code
        rows["3.10.0", kernel, "stock"] = scalar | {"shared_bytes": 81920 if kernel == "dkdv" else 16384}
        rows["3.10.0", kernel, "restored"] = code
    rows = {key: row | dict(changes).get(key, {}) for key, row in rows.items()}
    names = ("triton", "kernel", "path")
    blank = dict.fromkeys(sweep_triton.COLUMNS)
    return pd.DataFrame([blank | dict(zip(names, key, strict=True)) | row for key, row in rows.items()])


def test_verdict_wants_every_kernel_restored_as_before():
    good = sweep_triton.verdict(made_up())
    assert good == {
        "ok": True,
        "counts": {"releases": 3, "not to be had": 0, "kernels with tensor cores": 6, "without": 0},
    }
    restored = ("3.10.0", "forward", "restored")
    for change in (
        {"mma": 0},
        {"mma": 32},
        {"result": "not timed: AssertionError"},
        {"mma": None, "result": "cut off"},
    ):
        bad = sweep_triton.verdict(made_up({restored: change}))
        assert not bad["ok"] and bad["counts"]["without"] == 1, change
    assert not sweep_triton.verdict(made_up({("3.2.0", "dkdv", "stock"): {"mma": 0}}))["ok"]
    alone = made_up()
    assert sweep_triton.verdict(alone[alone["triton"] == "3.10.0"])["ok"]  # nothing to compare with


def test_table_runs_down_the_releases():
    shown = sweep_triton.table(made_up())
    assert list(shown.index[:3]) == [("forward", "stock", version) for version in ("3.2.0", "3.3.0", "3.10.0")]
    assert shown["mma"].tolist()[:3] == [64, "", 0]


@pytest.mark.parametrize("tflops", [None, 21.5])
def test_figure_is_made_from_the_csv(tmp_path, tflops):
    timed = {("3.10.0", "forward", "restored"): {"tflops": tflops}}
    measure.write_csv(tmp_path / "sweep.csv", made_up(timed).to_dict("records"))
    frame = pd.read_csv(tmp_path / "sweep.csv")
    sweep_triton.save_figure(frame, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
    stock, restored, *speed = sweep_triton._draw(frame).axes
    # row by row of the CSV: dK/dV of the three releases, then the forward
    assert [text.get_text() for text in stock.texts] == ["64", "×", "0"] * 2
    assert [text.get_text() for text in restored.texts] == ["=", "64", "64"] * 2
    assert len({patch.get_facecolor() for patch in stock.patches}) == 4  # too large is told from merely scalar
    assert [[bar.get_height() for bar in axes.patches] for axes in speed] == ([[tflops]] if tflops else [])

"""The notebooks' sources, and that a run of them is judged by what it did, not by how it ended."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from children import ROOT, environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
missing = [name for name in ("nbformat", "papermill", "ipykernel") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

PARAMETERS = 'output_dir = "."\nnumber = 1'
RESULT = """
import json, pathlib
result = {"ok": number == 1, "counts": {"things": number}}
pathlib.Path(output_dir, "made_up.json").write_text(json.dumps(result))
"""


def run_notebooks(*args):
    """Run the command and return it, finished."""
    command = [sys.executable, str(ROOT / "scripts" / "run_notebooks.py"), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


@pytest.fixture
def make_notebook(tmp_path):
    """Writes a notebook of these cells, the first one tagged `parameters`, and returns its path."""
    import nbformat

    def make(*sources, name="made_up", tag="parameters"):
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[0].metadata["tags"] = [tag]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
        return path

    return make


def test_there_are_notebooks():
    assert {"01_tests", "02_benchmark", "03_triton_versions"} <= {path.stem for path in NOTEBOOKS}


@each_notebook
def test_source_is_valid_and_has_no_outputs(path):
    import nbformat

    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1
    assert f'"{path.stem}.json"' in code[-1].source
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert str(ROOT) not in path.read_text()


@each_notebook
def test_unknown_parameter_is_an_error(path, tmp_path):
    done = run_notebooks(path.stem, "-p", "no_such", "1", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "parameter: got 'no_such', accepted are" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_notebook_that_downloads_runs_only_where_named(tmp_path):
    done = run_notebooks("-p", "releases", "[3.2.0]", "--output", tmp_path / "out")
    assert done.returncode == 2 and "parameter: got 'releases', accepted are" in done.stderr


def test_name_that_is_no_notebook_is_an_error(tmp_path):
    done = run_notebooks("01_tests", "09_nope", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "scripts/run_local.sh: error: names: got 09_nope, accepted are 01_tests, 02_benchmark" in done.stderr


def test_notebook_without_parameters_is_an_error(make_notebook, tmp_path):
    done = run_notebooks(make_notebook(PARAMETERS, RESULT, tag="other"), "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "made_up.ipynb: has no cell tagged `parameters`" in done.stderr


def test_runs_are_judged_by_their_result_alone(make_notebook, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("fails", "leaves", "dies"):  # of an earlier run, which passed
        (out / f"{name}.json").write_text('{"ok": true, "counts": {}}')
    ends = {"fails": "1 / 0", "leaves": "import sys; sys.exit(0)", "dies": "import os; os._exit(0)"}
    bad = [make_notebook(PARAMETERS, end, RESULT.replace("made_up", name), name=name) for name, end in ends.items()]
    says_no = make_notebook(PARAMETERS, "number = 0", RESULT.replace("made_up", "says_no"), name="says_no")
    good = make_notebook(PARAMETERS, RESULT)
    done = run_notebooks(*bad, says_no, good, "--output", out)
    assert done.returncode == 1, done.stderr
    summary = {line.split()[0]: line for line in done.stdout.splitlines()[-5:]}
    assert {name: line.split()[1] for name, line in summary.items()} == {
        "fails": "FAILED",
        "leaves": "FAILED",
        "dies": "FAILED",
        "says_no": "FAILED",
        "made_up": "passed",
    }
    assert "ZeroDivisionError" in summary["fails"]
    assert summary["made_up"].endswith("1 things")
    for name in summary:
        assert (out / f"{name}.ipynb").is_file() and (out / f"{name}.log").is_file()
    assert not (out / "fails.json").exists()


def test_parameters_reach_the_notebook_that_has_them(make_notebook, tmp_path):
    other = make_notebook(
        'output_dir = "."\nlengths = [1]',
        RESULT.replace("number", "lengths[1]").replace("made_up", "other"),
        name="other",
    )
    arguments = ("-p", "lengths", "[7, 1]", "-p", "number", "1", "--output", tmp_path / "out")
    done = run_notebooks(make_notebook(PARAMETERS, RESULT), other, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "other.json").read_text())["counts"] == {"things": 1}


def test_tests_notebook(tmp_path):
    selection = "-k flops tests/test_measure.py"
    done = run_notebooks("01_tests", "-p", "pytest_args", selection, "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "01_tests.json").read_text())
    assert result["ok"] is True
    assert result["counts"]["passed"] >= 6 and result["counts"]["failed"] == 0
    log = (tmp_path / "01_tests.log").read_text()
    assert "passed" in log and "xunit2" not in log
    assert (tmp_path / "tests.xml").is_file()


@pytest.mark.slow
def test_benchmark_notebook(tmp_path):
    small = {"seq_lens": "[64]", "head_dims": "[32]", "tokens": "64", "width": "32"}
    small |= {"budget_ms": "2", "grouped_seq_lens": "[]", "host_seq_lens": "[32]"}
    given = [part for name, value in small.items() for part in ("-p", name, value)]
    done = run_notebooks("02_benchmark", *given, "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "02_benchmark.json").read_text())
    kernels = "measured" if torch.cuda.is_available() else "checked"
    assert result["ok"] is True and result["counts"][kernels] >= 6
    assert {"attention.csv", "attention.png", "02_benchmark.ipynb"} <= {path.name for path in tmp_path.iterdir()}

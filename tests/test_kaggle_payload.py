"""What is pushed: the commit and nothing else, the same bytes each time, in a notebook that unpacks and runs."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from random import Random

import pytest
from children import ROOT, environment
from kaggle_project import PARAMETERS, Project, git

missing = [name for name in ("nbformat", "papermill", "ipykernel", "psutil") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not on the PATH"),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]

if not missing:
    import nbformat
    import payload


@pytest.fixture
def project(tmp_path):
    """A git repository with one commit."""
    project = Project(tmp_path / "project")
    (project.root / "MANIFEST.json").unlink()
    (project.root / ".gitignore").write_text("__pycache__/\nignored.txt\n")
    (project.root / "results").mkdir()
    (project.root / "results" / "earlier.csv").write_text("a,b\n")
    project.commit()
    return project


@pytest.fixture
def build(project, tmp_path):
    def build(folder="built", slug="flashattn-t4", username="someone", allow_dirty=False, **parameters):
        options = {"slug": slug, "username": username, "allow_dirty": allow_dirty}
        return payload.build(project.root, tmp_path / folder, parameters=parameters, **options)

    return build


def sources(built):
    """The source of each code cell, by the cell's id."""
    cells = nbformat.read(built.notebook, as_version=nbformat.NO_CONVERT).cells
    return {cell.id: cell.source for cell in cells if cell.cell_type == "code"}


def unpacked(built, monkeypatch, change=lambda source: source):
    """The folder into which the notebook unpacks, when its cells are run here."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {}
    for cell in ("parameters", "payload", "unpack"):
        exec(change(sources(built)[cell]), names)
    return names["tree"]


def files(root):
    """What lies there, by name."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# What is built -------------------------------------------------------------------------------------------------------


def test_notebook_carries_the_commit_without_results(project, build, monkeypatch):
    (project.root / "ignored.txt").touch()
    built = build()
    commit = git(project.root, "rev-parse", "HEAD")
    assert built.manifest == payload.Manifest(commit, dirty=False)
    tree = unpacked(built, monkeypatch)
    carried = files(tree)
    assert json.loads(carried.pop("MANIFEST.json")) == {"commit": commit, "dirty": False}
    assert carried == {
        name: (project.root / name).read_bytes()
        for name in git(project.root, "ls-files").splitlines()
        if not name.startswith("results/")
    }
    shutil.rmtree(tree)


def test_notebook_is_valid_and_metadata_go_with_it(build):
    built = build()
    notebook = nbformat.read(built.notebook, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert built.bytes == built.notebook.stat().st_size <= payload.LIMIT_BYTES
    assert sorted(files(built.folder)) == ["flashattn-t4.ipynb", "kernel-metadata.json"]
    metadata = json.loads((built.folder / "kernel-metadata.json").read_text())
    assert metadata["id"] == "someone/flashattn-t4" and metadata["code_file"] == "flashattn-t4.ipynb"
    assert metadata["machine_shape"] == "NvidiaTeslaT4"
    assert metadata["enable_gpu"] is metadata["enable_internet"] is metadata["is_private"] is True
    slugify = pytest.importorskip("slugify", reason="python-slugify, which the kaggle command brings, is not installed")
    assert slugify.slugify(metadata["title"]) == "flashattn-t4"


def test_the_same_commit_makes_the_same_bytes(project, build, tmp_path):
    first = build()
    clone = tmp_path / "elsewhere" / "clone"
    git(tmp_path, "clone", "-q", str(project.root), str(clone))
    options = {"slug": "flashattn-t4", "username": "someone", "parameters": {}}
    second = payload.build(clone, tmp_path / "again", **options)
    assert files(first.folder) == files(second.folder)
    assert second == replace(first, folder=second.folder, notebook=second.notebook)
    other = build("other", quick=False)
    assert other.sha256 == first.sha256 and other.notebook.read_bytes() != first.notebook.read_bytes()
    assert other.minutes > first.minutes


def test_parameters_replace_the_defaults(build):
    given = {"quick": False, "notebooks": ["02_benchmark"], "notebook_parameters": {"02_benchmark": {"causal": [True]}}}
    names, defaults = {}, {}
    exec(sources(build(**given))["parameters"], names)
    exec(sources(build())["parameters"], defaults)
    assert {name: names[name] for name in PARAMETERS} == {name: defaults[name] for name in PARAMETERS} | given
    assert "# within 20 minutes" in sources(build(**given))["parameters"]


# What is refused -----------------------------------------------------------------------------------------------------


def test_changes_are_refused_unless_they_are_allowed(project, build, monkeypatch):
    (project.root / "scripts" / "tune.py").write_text("changed")
    (project.root / "kaggle.json").write_text("{}")  # where credentials may lie
    with pytest.raises(ValueError, match="working tree: got 2 uncommitted changes, such as .* a clean one"):
        build()
    built = build(allow_dirty=True)
    assert built.manifest == payload.Manifest(git(project.root, "rev-parse", "HEAD"), dirty=True)
    tree = unpacked(built, monkeypatch)
    assert json.loads((tree / "MANIFEST.json").read_text())["dirty"] is True
    assert (tree / "scripts" / "tune.py").read_text() == "changed"
    assert not (tree / "kaggle.json").exists()
    assert built.sha256 == build(allow_dirty=True).sha256
    shutil.rmtree(tree)


@pytest.mark.parametrize("name", ["kaggle.json", "docs/access_token"])
def test_credentials_are_refused(project, build, name):
    (project.root / "docs").mkdir()
    (project.root / name).write_text("made up")
    project.commit()
    with pytest.raises(ValueError, match=f"{name}: has the name of a file of credentials"):
        build()


def test_results_are_no_change(project, build):
    (project.root / "results" / "later.csv").touch()
    assert build().manifest.dirty is build(allow_dirty=True).manifest.dirty is False


def test_too_large_is_refused(project, build, tmp_path):
    (project.root / "large.bin").write_bytes(Random(0).randbytes(900_000))
    project.commit()
    with pytest.raises(ValueError, match="notebook: got 1,.* accepted are 1,000,000: .* largest files are large.bin"):
        build()
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize("slug", ["t4", "Flashattn-T4", "flashattn_t4", "flashattn--t4", "-flashattn", "a" * 51, ""])
def test_slugs_that_kaggle_would_change_are_refused(build, slug):
    with pytest.raises(ValueError, match="slug: got .*, accepted are 5 to 50 of"):
        build(slug=slug)


@pytest.mark.parametrize("username", ["", "a/b", "a b"])
def test_usernames_are_checked(build, username):
    with pytest.raises(ValueError, match="username: got"):
        build(username=username)


def test_notebook_without_kernelspec_is_refused(project, build):
    path = project.root / "kaggle" / "driver.ipynb"
    notebook = json.loads(path.read_text())
    del notebook["metadata"]["kernelspec"]
    path.write_text(json.dumps(notebook))
    project.commit()
    with pytest.raises(ValueError, match="kaggle/driver.ipynb: has no metadata.kernelspec"):
        build()


@pytest.mark.parametrize(
    "parameters, reason",
    [
        ({"notebooks": ["09_none"]}, "notebooks: got .* accepted is a list of some of 01_tests, 02_benchmark"),
        ({"quik": True}, "parameters: got .*quik, accepted are exactly"),
        (
            {"notebook_parameters": {"02_benchmark": {"seqlens": [1]}}},
            "got 'seqlens' for 02_benchmark, accepted are",
        ),
        (
            {"notebook_parameters": {"02_benchmark": {"seq_lens": 512}}},
            r"got 512 for .* seq_lens, accepted is one like \[",
        ),
        (
            {"notebook_parameters": {"02_benchmark": {"seq_lens": [512, "a"]}}},
            r"got \[512, 'a'\] for .* seq_lens, accepted is one like \[512, ",
        ),
        ({"notebook_parameters": {"02_benchmark": {"causal": [0]}}}, r"got \[0\] for .* causal, accepted is one like"),
        ({"notebook_parameters": {"02_benchmark": {"output_dir": "x"}}}, "got 'output_dir' .* accepted are seq_lens"),
        (
            {"notebooks": ["01_tests"], "notebook_parameters": {"02_benchmark": {"budget_ms": 10}}},
            "got some for 02_benchmark, which is not among the notebooks",
        ),
        ({"notebook_parameters": {"02_benchmark": {"seq_lens": (1, 2)}}}, "accepted is what JSON can hold"),
        ({"notebook_parameters": {"02_benchmark": {"seq_lens": {1}}}}, "accepted is what JSON can hold"),
    ],
)
def test_parameters_are_checked(build, parameters, reason):
    with pytest.raises(ValueError, match=reason):
        build(**parameters)


@pytest.mark.parametrize(
    "notebook, told",
    [
        ("02_benchmark", {"seq_lens": [64], "peer_seq_lens": [], "host_seq_lens": None, "budget_ms": 20}),
        ("03_triton_versions", {"releases": ["3.2.0"], "time_forward": True}),
    ],
)
def test_parameters_like_the_defaults_are_accepted(build, notebook, told):
    build(notebook_parameters={notebook: told})


def test_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="git rev-parse: .*; a payload is made of a git checkout"):
        payload.manifest(tmp_path)


# What it does --------------------------------------------------------------------------------------------------------


def test_damaged_payload_is_not_unpacked(build, monkeypatch):
    def damaged(source):
        return source.replace('payload = """\nU', 'payload = """\nV')

    with pytest.raises(ValueError, match="payload: missing or damaged"):
        unpacked(build(), monkeypatch, damaged)


def test_driver_notebook_has_no_outputs_and_no_payload():
    notebook = nbformat.read(ROOT / "kaggle" / "driver.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert 'payload = ""' in next(cell.source for cell in code if cell.id == "payload")


def test_built_notebook_runs(build, tmp_path):
    """As on Kaggle: by papermill, in a folder that knows nothing of the project."""
    built = build()
    folder = tmp_path / "working"
    folder.mkdir()
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "--log-output", built.notebook, "executed.ipynb"]
    given = environment(PYTHONPATH="", TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    status = json.loads((folder / "run" / "status.json").read_text())
    assert {step["state"] for step in status["steps"]} == {"passed"}, status
    assert (status["commit"], status["payload_sha256"]) == (built.manifest.commit, built.sha256)
    assert sorted(path.name for path in folder.iterdir()) == ["executed.ipynb", "flashattn_run.zip", "run"]
    assert not list(tmp_path.glob("flashattn_*"))  # what it had unpacked
    assert "02_benchmark, Triton 3.2.0: passed" in done.stderr

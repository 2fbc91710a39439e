"""All the way round: this checkout is pushed, the stand-in executes what came for real, and the results come home."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kaggle_server
import pytest
from kaggle_runs import placed
from kaggle_server import KEY, ROOT, Run, git

pytestmark = [
    kaggle_server.needs_kaggle,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".git").exists(), reason="this tree is no checkout, and only a commit can be pushed"
    ),
]
guard, service = kaggle_server.guard, kaggle_server.service

TESTS = ["-n", "2", "tests/test_attention.py", "-k", "scores"]
SMALL = {
    "01_tests": {"pytest_args": TESTS},
    "02_benchmark": {"seq_lens": [64], "head_dims": [32], "tokens": 64, "width": 32, "dtype": "float32"},
}


@pytest.fixture
def clone(tmp_path, guard):
    """A repository with one commit: the files of this checkout as they are now, committed or not."""
    root = tmp_path / "clone"
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    kaggle_server.commit_all(root)
    yield root
    kaggle_server.assert_no_key(root)


def executor(folder: Path):
    """What Kaggle does with a pushed notebook, but for accept_any_device: nobody can push that, so it is set here."""

    def execute(text):
        folder.mkdir()
        (folder.parent / "pushed.ipynb").write_text(text, encoding="utf-8")
        given = ["../pushed.ipynb", "../executed.ipynb", "--cwd", ".", "-p", "accept_any_device", "True"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KAGGLE_", "VERBOSE"))}
        done = subprocess.run(
            [sys.executable, "-m", "papermill", *given, "--no-progress-bar", "--log-output"],
            cwd=folder,
            env=kept | {"JUPYTER_PREFER_ENV_PATH": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        run.log = done.stderr.splitlines(keepends=True)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return "ERROR" if done.returncode else "COMPLETE", files

    run = Run(execute=execute)
    return run


def command(root, name, *args):
    kaggle_server.held()
    env = os.environ | {"FLASHATTN_PYTHON": sys.executable, "PYTHONPATH": ""}
    return subprocess.run([root / "scripts" / name, *args], cwd=root, env=env, capture_output=True, text=True)


def test_there_and_back(clone, service, tmp_path):
    pushed = git(clone, "rev-parse", "HEAD")
    service.next = [executor(tmp_path / "kaggle" / "working")]
    (tmp_path / "kaggle").mkdir()
    given = [w for book, told in SMALL.items() for n, v in told.items() for w in ("-p", book, n, json.dumps(v))]
    done = command(clone, "push_to_kaggle.sh", *SMALL, *given, "--tritons", "image", "--poll", "5")
    assert done.returncode == 0, done.stdout + done.stderr + "".join(service.runs[0].log)[-3000:]
    assert "complete, quick, on any device" in done.stdout and KEY not in done.stdout + done.stderr

    (name,) = [name for name in placed(clone) if name.endswith(f"_{pushed[:7]}")]
    folder = clone / "results" / name
    status = json.loads((folder / "status.json").read_text())
    assert status["commit"] == pushed and status["dirty"] == "no" and status["state"] == "finished"
    assert {step["name"]: step["state"] for step in status["steps"]} == dict.fromkeys(SMALL, "passed")
    came = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "01_tests.ipynb",
        "01_tests.log",
        "02_benchmark.ipynb",
        "attention.csv",
        "attention.png",
        "doctor.txt",
    } <= came
    assert f",{pushed},no," in (folder / "attention.csv").read_text()
    assert json.loads((folder / "01_tests.json").read_text())["counts"]["passed"] > 0

    assert git(clone, "rev-parse", "HEAD~") == pushed and git(clone, "status", "--porcelain") == ""
    message = git(clone, "log", "-1", "--format=%B")
    assert "01_tests" in message and "on any device" in message and "someone/flashattn-t4/1" in message
    assert f"({name})" in (clone / "results" / "README.md").read_text()
    assert (clone / "README.md").read_text() == (ROOT / "README.md").read_text()  # a rehearsal is not quoted

    again = command(clone, "pull_from_kaggle.sh", "someone/flashattn-t4/1")
    assert again.returncode == 0 and "it was here already" in again.stdout and "nothing to commit" in again.stdout

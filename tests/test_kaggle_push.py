"""The way to Kaggle: what the real command sends, and what a push that goes wrong says."""

import json
import os
import shutil
import signal
import subprocess
import sys
from time import monotonic, sleep

import kaggle_server
import pytest
from kaggle_runs import README, files_of, placed, status_of, zipped
from kaggle_server import KEY, ROOT, TRAVELS, Run, git

sys.path.insert(0, str(ROOT / "scripts"))

import kaggle_cli
import kaggle_pull
import kaggle_push

pytestmark = kaggle_server.needs_kaggle
guard, service = kaggle_server.guard, kaggle_server.service


@pytest.fixture
def repo(tmp_path, guard):
    """A small repository that can be pushed; after the test, the key is nowhere in it."""
    root = tmp_path / "a checkout"
    for name in ("kaggle", "notebooks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "results").mkdir()
    (root / "README.md").write_text(README)
    (root / ".gitignore").write_text("results/local/\n__pycache__/\n")
    kaggle_server.commit_all(root)
    yield root
    kaggle_server.assert_no_key(root)


def push(root, *args):
    return kaggle_push.main([*args, "--poll", "0.05"], root)


def records(root):
    return {path.name: json.loads(path.read_text()) for path in (root / kaggle_pull.RECORDS).glob("*_v*.json")}


def leaves(root, **changes):
    """The files of a complete run of what was pushed last, as its record tells."""
    while not records(root):
        sleep(0.02)  # a stand-in that executes is faster than the push's last line
    record = max(records(root).values(), key=lambda record: record["version"])
    changes = {"payload_sha256": record["sha256"], "parameters": record["parameters"]} | changes
    return {kaggle_pull.ARCHIVE: zipped(files_of(status_of(root) | changes))}


def test_what_is_sent(repo, service, capfd):
    assert push(repo, "01_tests", "02_benchmark", "-p", "02_benchmark", "seq_lens", "[512]", "--no-wait") == 0
    (sent,) = service.asked("SaveKernel")
    wanted = {
        "slug": "someone/flashattn-t4",
        "newTitle": "flashattn t4",
        "language": "python",
        "kernelType": "notebook",
    }
    wanted |= {"isPrivate": True, "enableGpu": True, "enableInternet": True, "machineShape": "NvidiaTeslaT4"}
    assert {name: sent[name] for name in wanted} == wanted | {"newTitle": sent["newTitle"]}
    assert sent["newTitle"].lower().replace(" ", "-") == "flashattn-t4"
    assert sent["sessionTimeoutSeconds"] == 60 * (60 + kaggle_push.MARGIN_MINUTES)
    notebook = json.loads(sent["text"])
    (cell,) = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert "seq_lens" in cell["source"] and "02_benchmark" in cell["source"]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3" and len(sent["text"]) < 1_000_000
    assert KEY not in sent["text"] and TRAVELS.decode() not in sent["text"]

    (record,) = records(repo).values()
    assert record["version"] == 1 and record["commit"] == git(repo, "rev-parse", "HEAD")
    assert record["parameters"]["notebook_parameters"] == {"02_benchmark": {"seq_lens": [512]}}
    assert record["parameters"]["accept_any_device"] is False and record["parameters"]["quick"] is True
    out, err = capfd.readouterr()
    assert "scripts/pull_from_kaggle.sh someone/flashattn-t4/1" in out
    assert KEY not in out + err and TRAVELS.decode() not in out + err
    assert service.authorized == {f"Basic {TRAVELS.decode()}"}  # the command did send it


def test_same_commit_same_bytes(repo, service):
    assert push(repo, "--no-wait") == 0 and push(repo, "--no-wait", "--slug", "another-name") == 0
    one, two = (sent["text"] for sent in service.asked("SaveKernel"))
    assert one == two


def test_push_waits_and_brings_back(repo, service, capfd):
    service.next = [Run(execute=lambda text: ("COMPLETE", leaves(repo)), log=["01_tests passed\n"])]
    assert push(repo) == 0
    out = capfd.readouterr().out
    assert "pushed     someone/flashattn-t4/1" in out and "COMPLETE" in out and "complete, quick" in out
    assert len(placed(repo)) == 1 and git(repo, "status", "--porcelain") == ""


def test_two_pushes_in_a_row(repo, service):
    for started in ("10", "15"):
        assert push(repo, "--no-wait") == 0
        files = leaves(repo, started=f"2026-12-02T{started}:00:00+00:00")
        service.runs[-1].states, service.runs[-1].files = ["COMPLETE"], files
    assert [record["version"] for _, record in sorted(records(repo).items())] == [1, 2]
    assert kaggle_pull.main(["someone/flashattn-t4/1", "--no-commit"], repo) == 0
    assert kaggle_pull.main(["someone/flashattn-t4", "--no-commit"], repo) == 0  # the latest
    assert len(placed(repo)) == 2
    assert [body["versionLabel"] for body in service.asked("ListKernelSessionOutput")] == ["v1", "v2"]


def test_script_that_was_killed(repo, service):
    """The push is killed while the run is under way; the pull, which knows what was pushed, picks it up."""
    service.next = [Run(["RUNNING"], log=["step 1\n"])]
    shutil.copytree(ROOT / "scripts", repo / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "-m", "Scripts")
    kaggle_server.held()
    command = [sys.executable, "-u", repo / "scripts" / "kaggle_push.py", "--poll", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    end = monotonic() + 60
    while "RUNNING" not in process.stdout.readline():
        assert process.poll() is None and monotonic() < end
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    service.runs[0].files, service.runs[0].states = leaves(repo), ["RUNNING", "COMPLETE"]
    assert kaggle_pull.main(["--poll", "0.05"], repo) == 0
    assert len(placed(repo)) == 1 and git(repo, "status", "--porcelain") == ""
    assert len(service.asked("SaveKernel")) == 1


def test_dry_run_sends_nothing_and_needs_no_account(repo, service, capfd, monkeypatch):
    monkeypatch.setattr(kaggle_cli, "command", lambda: pytest.fail("the command was called"))
    assert push(repo, "--dry-run", "--full", "--tritons", "image") == 0
    assert service.requests == []
    out = capfd.readouterr().out
    assert git(repo, "rev-parse", "HEAD") in out and "tritons = ['image']" in out and "limit_minutes = 600" in out
    (notebook,) = (repo / kaggle_pull.RECORDS / "flashattn-t4").glob("*.ipynb")
    assert str(notebook) in out and records(repo) == {}


REFUSALS = [
    ("Maximum weekly GPU quota of 30.00 hours has been reached.", "the week's GPU hours are used up"),
    ("Maximum batch GPU session count of 2 reached.", "two GPU sessions at most"),
    ("Phone verification is required to use GPUs.", "verify your phone number"),
    ("No kernel name found in notebook", "restore kaggle/driver.ipynb"),
    ("Notebook not found", "--owner is the account of the kaggle command"),
    ("Something nobody has seen.", "Something nobody has seen."),
]


@pytest.mark.parametrize(("refusal", "says"), REFUSALS, ids=[refusal.split()[0] for refusal, _ in REFUSALS])
def test_push_that_is_refused_with_exit_0(repo, service, capfd, refusal, says):
    service.refusal = refusal
    assert push(repo) == 1
    err = capfd.readouterr().err
    assert f"Kernel push error: {refusal}" in err and says in err and records(repo) == {}


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "no credentials that Kaggle accepts"), (403, "Kaggle refuses access"), (500, "before another push")],
)
def test_push_that_fails(repo, service, capfd, status, says):
    service.trouble = {"SaveKernel": [status]}
    assert push(repo) == 1
    assert says in capfd.readouterr().err and records(repo) == {}
    assert len(service.asked("SaveKernel")) == 1  # a second one might run it twice


def test_no_service(repo, service, capfd, monkeypatch):
    for name in kaggle_server.PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert push(repo) == 1
    assert "no connection to Kaggle" in capfd.readouterr().err


def test_no_credentials(repo, service, capfd, monkeypatch):
    held = kaggle_cli.environment()
    monkeypatch.setattr(kaggle_cli, "environment", lambda: {k: v for k, v in held.items() if k != "KAGGLE_KEY"})
    assert push(repo) == 1
    err = capfd.readouterr().err
    assert err.startswith("kaggle_push: no credentials that Kaggle accepts: log in, once, with\n") and "said" not in err
    (line,) = [line.strip() for line in err.splitlines() if "auth login" in line]
    assert line in (ROOT / "README.md").read_text() and service.requests == []


def test_a_long_answer_is_cut_between_words():
    said = str(kaggle_cli.KaggleError("unheard of " * 100))
    assert len(said) < 640 and said.endswith((" unheard ...", " of ..."))


def test_no_command(repo, capfd, monkeypatch):
    monkeypatch.setattr(kaggle_cli.shutil, "which", lambda *_, **__: None)
    assert push(repo) == 1
    assert "install kaggle==2.2.5 and six" in capfd.readouterr().err


def test_quota_is_looked_at_first(repo, service, capfd):
    service.gpu_seconds_left = 60
    assert push(repo) == 1
    assert "0.02 GPU hours are left this week; they come back at 2026-12-05" in capfd.readouterr().err
    assert service.asked("SaveKernel") == []
    service.gpu_seconds_left = 360
    assert push(repo, "--no-wait") == 0
    assert "warning: 0.1 GPU hours are left" in capfd.readouterr().out


def test_kernel_that_lands_elsewhere(repo, service, capfd):
    service.lands_at = "someone/another-one"
    assert push(repo, "--no-wait") == 0
    assert "warning: it landed there and not at someone/flashattn-t4" in capfd.readouterr().out
    assert list(records(repo)) == ["someone_another-one_v1.json"]


def test_uncommitted_changes(repo, service, capfd, monkeypatch):
    (repo / "README.md").write_text("changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(kaggle_cli, "command", lambda: pytest.fail("the command was called"))
        assert push(repo, "--no-wait") == 1
    assert "uncommitted" in capfd.readouterr().err and service.asked("SaveKernel") == []
    assert push(repo, "--no-wait", "--allow-dirty") == 0
    assert "with uncommitted changes" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["04_none"], "notebooks: got ['04_none'], accepted is a list of some of 01_tests"),
        (["-p", "02_benchmark", "no_such", "1"], "notebook_parameters: got 'no_such' for 02_benchmark, accepted are"),
        (["-p", "02_benchmark", "seq_lens", "[512"], "-p 02_benchmark seq_lens: got '[512', accepted is YAML"),
        (["--limit", "721"], "--limit: got 721, accepted are 1 to"),
        (["--tritons", "new"], "tritons: got ['new']"),
        (["--tritons", "3.1.0"], "tritons: got ['3.1.0'], accepted is a list of some of image, 3.2.0, 3.3.0"),
        (["--tritons", "3.2.7"], "tritons: got ['3.2.7']"),
        (["--slug", "t4"], "slug"),
        (["-p", "driver", "accept_any_device", "true"], "notebook_parameters: got {'driver'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_refused_before_an_account_is_asked_for(repo, capfd, monkeypatch, arguments, says):
    monkeypatch.setattr(kaggle_cli, "command", lambda: pytest.fail("the command was called"))
    assert push(repo, *arguments) == 1
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("main", [kaggle_push.main, kaggle_pull.main])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_poll_that_is_refused(repo, service, capfd, main, value):
    with pytest.raises(SystemExit):
        main(["--poll", value], repo)
    assert f"argument --poll: got {value!r}, accepted are" in capfd.readouterr().err and service.requests == []


def test_no_option_accepts_any_device():
    assert not any("device" in text for action in kaggle_push.parser()._actions for text in action.option_strings)


def test_the_command_is_told_to_print_no_headers(guard):
    """With these set it prints the Authorization header; the guard sets them for every test here."""
    assert os.environ["VERBOSE"] and os.environ["VERBOSE_OUTPUT"]
    assert not {"VERBOSE", "VERBOSE_OUTPUT"} & kaggle_cli.environment().keys()


def test_command_line_works_from_any_folder(tmp_path):
    script = ROOT / "scripts" / "push_to_kaggle.sh"
    env = os.environ | {"FLASHATTN_PYTHON": sys.executable}
    done = subprocess.run([script, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: scripts/push_to_kaggle.sh [")
    assert "between questions, 5 at least" in " ".join(done.stdout.split())

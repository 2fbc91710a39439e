"""The way back from Kaggle: what a run that ended in any way leaves in results/, by the real command."""

import functools
import json
import os
import stat
import subprocess
import sys
import zipfile

import kaggle_server
import pytest
from kaggle_runs import README, SHA, csv_of, files_of, placed, status_of, step, zipped
from kaggle_server import KEY, ROOT, Run, git

sys.path.insert(0, str(ROOT / "scripts"))

import kaggle_cli
import kaggle_pull
import readme_tables
import results_index

pytestmark = kaggle_server.needs_kaggle
guard, service = kaggle_server.guard, kaggle_server.service
ADDRESS = "someone/flashattn-t4"


def loose(files):
    return {f"run/{name}": content for name, content in files.items()}


@pytest.fixture
def repo(tmp_path, guard):
    """A repository with a README and no results; after the test, the key is nowhere in it."""
    root = tmp_path / "a checkout"
    (root / "results").mkdir(parents=True)
    (root / "README.md").write_text(README)
    (root / ".gitignore").write_text("results/local/\n")
    (root / "results" / "README.md").write_text(results_index.text(root / "results"))
    kaggle_server.commit_all(root)
    yield root
    kaggle_server.assert_no_key(root)


def remember(root, version=1, **changes):
    """What a push leaves on this machine."""
    record = {"owner": "someone", "slug": "flashattn-t4", "version": version, "sha256": SHA, "parameters": {}}
    record |= {"commit": git(root, "rev-parse", "HEAD")} | changes
    path = kaggle_pull.record_file(root, kaggle_cli.Address("someone", "flashattn-t4", version))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def pull(root, *args):
    return kaggle_pull.main([*args, "--poll", "0.05"], root)


def clean(root):
    return git(root, "status", "--porcelain") == ""


def test_complete_run(repo, service, capfd):
    files = files_of(status_of(repo), **{"tuned/Tesla_T4_triton3.6.0_restored.json": b"{}"})
    service.runs = [Run(files={kaggle_pull.ARCHIVE: zipped(files)}, log=["Tęsla: größer\n", "做完了\n"])]
    remember(repo)
    assert pull(repo) == 0
    out = capfd.readouterr().out
    for shown in ("QUEUED: waiting", "RUNNING", "    做完了", "COMPLETE", "complete, quick"):
        assert shown in out
    (name,) = placed(repo)
    assert name == f"2026-12-02_t4_{git(repo, 'rev-parse', 'HEAD~')[:7]}"
    folder = repo / "results" / name
    assert f"scripts/adopt_tuned.py results/{name}/tuned/Tesla_T4_triton3.6.0_restored.json" in out
    assert {path.name for path in folder.iterdir()} >= {"status.json", "01_tests.ipynb", "triton3.2.0", "README.md"}
    assert (folder / "kaggle.log").read_text(encoding="utf-8") == "Tęsla: größer\n做完了\n"
    readme = (repo / "README.md").read_text()
    assert "| ratio to EFFICIENT |" in readme and "| 64 | no | 512 | 21.5 | - | 17.0 | 1.26 |" in readme
    index = (repo / "results" / "README.md").read_text()
    assert "| 2026-12-02 | Tesla T4 | 3.6.0 | 301 of 303, 2 skipped | 21.5 |" in index
    assert "| 2026-12-02 | Tesla T4 | 3.2.0 | 300 of 302, 2 skipped | 23.0 |" in index
    message = git(repo, "log", "-1", "--format=%B")
    assert message.startswith("Results: Tesla T4, commit ") and "01_tests (Triton image): passed; 301 passed" in message
    assert f"Kaggle kernel {ADDRESS}/1" in message and clean(repo)
    assert KEY not in out

    before = git(repo, "rev-parse", "HEAD")
    assert pull(repo, f"https://www.kaggle.com/code/{ADDRESS}?scriptVersionId=7") == 0  # once more, by its page
    assert "it was here already" in capfd.readouterr().out
    assert git(repo, "rev-parse", "HEAD") == before and clean(repo) and placed(repo) == [name]
    assert [body["versionLabel"] for body in service.asked("ListKernelSessionOutput")] == ["v1", "v1"]

    (folder / "01_tests.json").write_text("edited")
    assert pull(repo, f"https://www.kaggle.com/code/{ADDRESS}") == 1  # an edited run is not committed as the run's own
    assert "were changed since it was taken in" in capfd.readouterr().err
    assert git(repo, "rev-parse", "HEAD") == before


PARTIAL = [step("01_tests"), step("02_benchmark", "failed", note="its last cell wrote no 02_benchmark.json")]
TIMED_OUT = [step("01_tests", "timed out"), step("02_benchmark", "not run")]
ON_ANY = {"accepts_any_device": True, "gpu": {"name": "NVIDIA H200"}}
P100 = {
    "state": "refused",
    "steps": [],
    "reason": "the GPU is a Tesla P100-PCIE-16GB (sm_60), and not a T4",
    "gpu": {"name": "Tesla P100-PCIE-16GB"},
}


@pytest.mark.parametrize(
    ("changes", "exit_status", "folder", "says"),
    [
        pytest.param({"steps": PARTIAL}, 1, "t4", "partial, quick", id="failed cell"),
        pytest.param({"steps": TIMED_OUT}, 1, "t4", "timed out", id="step timed out"),
        pytest.param(P100, 1, "p100", "not a T4", id="wrong GPU"),
        pytest.param(ON_ANY, 0, "h200", "on any device", id="any device"),
        pytest.param({"dirty": "yes"}, 0, "t4", "uncommitted changes", id="dirty"),
        pytest.param({"state": "running", "ended": None}, 1, "t4", "unfinished", id="unfinished"),
    ],
)
def test_what_is_kept_and_never_quoted(repo, service, capfd, changes, exit_status, folder, says):
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo, **changes)))})]
    assert pull(repo, ADDRESS) == exit_status
    (name,) = placed(repo)
    assert f"_{folder}_" in name and says in capfd.readouterr().out
    report = (repo / "results" / name / "README.md").read_text()
    assert says in report and "not quoted in the project's README" in report
    assert f"({name})" in (repo / "results" / "README.md").read_text()
    assert (repo / "README.md").read_text() == README and clean(repo)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        pytest.param("ERROR", "Your notebook's kernel died", id="dead Jupyter kernel"),
        pytest.param("ERROR", "Your notebook exceeded its time limit", id="time-out"),
        pytest.param("CANCEL_ACKNOWLEDGED", "", id="cancelled"),
    ],
)
def test_a_run_that_ended_before_its_zip_is_kept(repo, service, capfd, word, message):
    status = status_of(repo, state="running", ended=None, steps=TIMED_OUT)
    service.runs = [Run(["RUNNING", word], loose(files_of(status)), ["01_tests\n"], message)]
    assert pull(repo, f"{ADDRESS}/1") == 1
    (name,) = placed(repo)
    folder = repo / "results" / name
    assert (folder / "triton3.2.0" / "attention.csv").is_file() and (folder / "kaggle.log").is_file()
    assert f"which Kaggle calls {word}" in (folder / "README.md").read_text()
    assert "unfinished" in capfd.readouterr().out and (repo / "README.md").read_text() == README


@pytest.mark.parametrize("word", ["ERROR", "CANCEL_ACKNOWLEDGED"])
def test_output_that_kaggle_dropped(repo, service, capfd, word):
    service.runs = [Run(["CANCEL_REQUESTED", word], log=["Zürich\n", "\x1b[31mValueError: no\n"], message="it failed")]
    assert pull(repo, f"{ADDRESS}/1") == 1
    err = capfd.readouterr().err
    assert f"Kaggle says {word}: it failed, and no status.json came" in err
    assert "    Zürich" in err and "ValueError: no" in err and "\x1b" not in err
    log = repo / kaggle_pull.RECORDS / "someone_flashattn-t4_v1.log"
    assert log.read_text(encoding="utf-8").startswith("Zürich") and str(log.relative_to(repo)) in err
    assert placed(repo) == [] and clean(repo)


@pytest.mark.parametrize("late", [[], ["run/01_tests.json"]], ids=["no file", "no status"])
def test_output_that_comes_after_the_state(repo, service, capfd, late):
    files = loose(files_of(status_of(repo)))
    archive = {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))}
    service.runs = [Run(["COMPLETE"], files | archive, late=[late] * 4)]  # two listings make one attempt
    assert pull(repo, f"{ADDRESS}/1") == 0
    assert capfd.readouterr().out.count("may be still to come, asking again") == 2
    (name,) = placed(repo)
    assert (repo / "results" / name / "attention.csv").is_file() and clean(repo)


@pytest.mark.parametrize("method", ["ListKernelSessionOutput", "GET"])
def test_output_that_is_refused_at_first(repo, service, capfd, method):
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]
    service.trouble = {method: [404, 403]}  # GET: a signed address that has run out; the next listing has another
    assert pull(repo, f"{ADDRESS}/1") == 0
    assert capfd.readouterr().out.count("no output yet, asking again") == 2 and len(placed(repo)) == 1


def test_output_that_never_comes(repo, service, capfd, monkeypatch):
    monkeypatch.setattr(kaggle_cli, "OUTPUT_ATTEMPTS", 2)
    service.runs = [Run(["COMPLETE"], log=["the driver is done\n"])]
    assert pull(repo, f"{ADDRESS}/1") == 1
    err = capfd.readouterr().err
    assert "Kaggle says COMPLETE, and no status.json came: see https://www.kaggle.com/code/" in err
    assert "    the driver is done" in err and "failed or was cancelled" not in err
    assert len(service.asked("ListKernelSessionOutput")) == 4 and placed(repo) == []


def test_trouble_is_asked_about_again(repo, service, capfd):
    service.runs = [Run(["RUNNING", "COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]
    service.trouble = {"GetKernelSessionStatus": [500, 502, 503], "ListKernelSessionOutput": [500], "GET": [503]}
    assert pull(repo, f"{ADDRESS}/1") == 0
    out = capfd.readouterr().out
    assert out.count("asking again") >= 4 and "500 Server Error" in out and len(placed(repo)) == 1


def test_trouble_without_end_is_given_up(service):
    service.runs = [Run(["RUNNING"])]
    service.trouble = {"GetKernelSessionStatus": [500] * 99}
    with pytest.raises(kaggle_cli.KaggleError, match="Kaggle has trouble of its own"):
        kaggle_cli.wait(kaggle_cli.Address.parse(ADDRESS), 0.05, patience_s=1.0)


def test_waiting_has_an_end(service):
    service.runs = [Run(["QUEUED"])]
    with pytest.raises(kaggle_cli.KaggleError, match="QUEUED after"):
        kaggle_cli.wait(kaggle_cli.Address.parse(ADDRESS), 0.05, longest_s=1.0)


REFUSED = [(403, "Kaggle refuses access: check --owner"), (404, "Kaggle has no such kernel or version")]


@pytest.mark.parametrize("in_words", [False, True])
@pytest.mark.parametrize(("status", "says"), REFUSED)
def test_refused_access_is_said_at_once(repo, service, capfd, status, says, in_words):
    service.runs, service.in_words = [Run()], in_words
    service.trouble = {"GetKernelSessionStatus": [status]}
    assert pull(repo, f"{ADDRESS}/1") == 1
    assert says in capfd.readouterr().err and len(service.asked("GetKernelSessionStatus")) == 1


@pytest.mark.parametrize("in_words", [False, True])
def test_kernel_that_was_just_pushed_may_not_be_there_yet(repo, service, capfd, in_words):
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]
    service.trouble, service.in_words = {"GetKernelSessionStatus": [404, 403]}, in_words
    remember(repo)
    assert pull(repo) == 0
    assert capfd.readouterr().out.count("asking again") == 2 and len(placed(repo)) == 1


def test_kernel_that_was_pushed_and_never_appears(repo, service, capfd, monkeypatch):
    monkeypatch.setattr(kaggle_cli, "wait", functools.partial(kaggle_cli.wait, appears_s=6.0))
    remember(repo)
    assert pull(repo) == 1
    err = capfd.readouterr().err
    assert "still not there after" in err and f"then scripts/pull_from_kaggle.sh {ADDRESS}/1" in err
    assert len(service.asked("GetKernelSessionStatus")) >= 2


def test_too_many_requests_are_trouble_that_passes(repo, service):
    service.runs, service.in_words = [Run(["RUNNING"])], True
    service.trouble = {"GetKernelSessionStatus": [429]}
    with pytest.raises(kaggle_cli.KaggleError, match="fewer requests") as caught:
        kaggle_cli.state(kaggle_cli.Address.parse(ADDRESS))
    assert caught.value.passing


def test_no_credentials_is_said_at_once(repo, service, capfd, monkeypatch):
    held = kaggle_cli.environment()
    monkeypatch.setattr(kaggle_cli, "environment", lambda: {k: v for k, v in held.items() if k != "KAGGLE_KEY"})
    assert pull(repo, f"{ADDRESS}/1") == 1
    assert "kaggle auth login\n" in capfd.readouterr().err and service.requests == []


def test_no_waiting(repo, service, capfd):
    service.runs = [Run(["RUNNING"])]
    assert pull(repo, f"{ADDRESS}/1", "--no-wait") == 1
    assert "RUNNING, on a GPU; ask again later" in capfd.readouterr().out and placed(repo) == []


def test_many_files_on_many_pages(repo, service):
    service.page_size_limit = 100
    many = {f"part{number:03}.txt": b"x" for number in range(520)}
    service.runs = [Run(["ERROR"], loose(files_of(status_of(repo, state="running"), **many)))]
    assert pull(repo, f"{ADDRESS}/1") == 1
    (name,) = placed(repo)
    assert len(list((repo / "results" / name).glob("part*.txt"))) == 520


HOSTILE = [
    "../evil.txt",
    "/tmp/evil.txt",
    "run/../../evil.txt",
    "run/.git/evil.txt",
    "run/a/b/c/evil.txt",
    "run/evil.sh",
    "run/-evil.txt",
    "C:\\evil.txt",
    "run/e\nvil.txt",
    "run/évil.txt",
]


def test_a_server_s_names_are_not_trusted(repo, service):
    hostile = {name: b"evil" for name in HOSTILE}
    service.runs = [Run(["ERROR"], hostile | loose(files_of(status_of(repo, state="running"))))]
    assert pull(repo, f"{ADDRESS}/1") == 1
    assert len(placed(repo)) == 1
    assert not [path for path in repo.parent.rglob("*") if "vil" in path.name]
    fetched = [body["path"] for body in service.asked("GET") if body["path"].startswith("/file/")]
    assert len(fetched) == len(files_of({}))


@pytest.mark.parametrize(("limit", "value"), [("MAX_BYTES", 100_000), ("MAX_FILES", 3)])
def test_too_much_is_refused(repo, service, capfd, monkeypatch, limit, value):
    monkeypatch.setattr(kaggle_pull, limit, value)
    files = files_of(status_of(repo), **{f"{i}.txt": b"0" * 200_000 for i in range(3)})
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files)} | loose(files))]
    assert pull(repo, f"{ADDRESS}/1") == 1
    assert "size: more than" in capfd.readouterr().err and placed(repo) == [] and clean(repo)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"commit": "b" * 40}, "was pushed: it is another run"),
        ({"sha256": "6" * 64}, "payload: the run's is 555"),
    ],
)
def test_another_run_than_the_pushed_one(repo, service, capfd, record, says):
    remember(repo, **record)
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]
    assert pull(repo) == 1
    assert says in capfd.readouterr().err and placed(repo) == []


def test_commit_given_or_of_this_repository(repo, service, capfd):
    status = status_of(repo)
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status))})]
    assert pull(repo, f"{ADDRESS}/1", "--commit", "abcdef0") == 1
    assert "abcdef0 was pushed" in capfd.readouterr().err
    assert pull(repo, f"{ADDRESS}/1", "--commit", status["commit"][:7]) == 0
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status | {"commit": "c" * 40}))})]
    assert pull(repo, f"{ADDRESS}/1") == 1
    assert "which this repository does not have" in capfd.readouterr().err


def test_two_runs_of_a_commit_on_one_day(repo, service):
    first = status_of(repo)
    for version, started in ((1, "10"), (2, "15")):
        files = files_of(first | {"started": f"2026-12-02T{started}:00:00+00:00"})
        service.runs.append(Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files)}))
        remember(repo, version, commit=first["commit"])
    assert pull(repo, f"{ADDRESS}/2") == 0 and pull(repo, f"{ADDRESS}/1") == 0 and pull(repo) == 0
    one, two = placed(repo)
    assert two == f"{one}_2" and clean(repo)
    started = [json.loads((repo / "results" / n / "status.json").read_text())["started"][11:13] for n in (one, two)]
    assert started == ["15", "10"]


# By hand -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "run/"], ids=["the driver's", "Kaggle's, of all"])
def test_zip_brought_by_hand(repo, service, tmp_path, capfd, prefix):
    files = files_of(status_of(repo), **{"core.bin": b"x"})
    archive = tmp_path / "Downloads.zip"
    archive.write_bytes(zipped({prefix + name: data for name, data in files.items()}))
    assert pull(repo, "--zip", str(archive)) == 0
    (name,) = placed(repo)
    out = capfd.readouterr().out
    assert "core.bin" in out and not (repo / "results" / name / "core.bin").exists()
    assert "brought by hand" in git(repo, "log", "-1", "--format=%B") and clean(repo)
    assert pull(repo, "--zip", str(archive)) == 0
    assert "nothing to commit" in capfd.readouterr().out and placed(repo) == [name]
    assert service.requests == []  # no account is needed


ELSEWHERE = [
    ".virtual_documents/__notebook_source__.ipynb",
    "__notebook__.ipynb",
    "a folder/b/c/d/e/übung.json",
    "flashattn_run.zip",
    "/tmp/evil.txt",
    "../evil.txt",
    "run/.ipynb_checkpoints/01_tests-checkpoint.ipynb",
    "run/deep/er/and/deeper/core.bin",
]


@pytest.mark.parametrize("around", ["", "my download (1)/"])
def test_zip_with_other_things_beside_the_run(repo, tmp_path, capfd, around):
    files = {f"{around}{name}": data for name, data in loose(files_of(status_of(repo))).items()}
    others = {(name if name[0] in "/." else around + name): b"evil" for name in ELSEWHERE}
    archive = tmp_path / "output.zip"
    archive.write_bytes(zipped(others | files))
    assert pull(repo, "--zip", str(archive)) == 0
    assert f"left out, as no part of a run: {len(others)}, such as" in capfd.readouterr().out
    (name,) = placed(repo)
    folder = repo / "results" / name
    came = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert came == set(files_of({})) | {"README.md"}
    assert not [path for path in tmp_path.rglob("*") if "vil" in path.name]


@pytest.mark.parametrize("second", ["two/", "one/two/", ""])
def test_zip_with_two_runs(repo, tmp_path, capfd, second):
    archive = tmp_path / "output.zip"
    both = {top + name: data for top in ("one/", second) for name, data in files_of(status_of(repo)).items()}
    archive.write_bytes(zipped(both))
    assert pull(repo, "--zip", str(archive)) == 1
    err = capfd.readouterr().err
    assert "runs: got 2 in one zip, such as " in err and "'one'" in err and repr(second.rstrip("/") or ".") in err
    assert placed(repo) == [] and clean(repo)


@pytest.mark.parametrize("name", ["run/a/b/c/evil.txt", "run/../evil.bin", "run//evil.txt", "run/C:\\evil.txt"])
def test_zip_with_hostile_names_in_the_run(repo, tmp_path, capfd, name):
    archive = tmp_path / "output.zip"
    archive.write_bytes(zipped(loose(files_of(status_of(repo))) | {"__notebook__.ipynb": b"", name: b"evil"}))
    assert pull(repo, "--zip", str(archive)) == 1
    assert "name: got" in capfd.readouterr().err and placed(repo) == []


def test_zip_with_no_run_or_one_too_deep(repo, tmp_path, capfd):
    archive = tmp_path / "output.zip"
    for folder in ("a/b/c/d/", ".hidden/", "../", "/"):
        archive.write_bytes(zipped({folder + name: data for name, data in files_of(status_of(repo)).items()}))
        assert pull(repo, "--zip", str(archive)) == 1
        assert "status.json: is not there: this is no run" in capfd.readouterr().err and placed(repo) == []


def test_truncated_zip(repo, tmp_path, capfd):
    whole = zipped(files_of(status_of(repo)))
    archive = tmp_path / "run.zip"
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        archive.write_bytes(whole[:length])
        assert pull(repo, "--zip", str(archive)) == 1
        assert "run.zip: is no whole zip file" in capfd.readouterr().err
    damaged = bytearray(whole)
    damaged[50:60] = bytes(10)
    archive.write_bytes(damaged)
    assert pull(repo, "--zip", str(archive)) == 1
    assert placed(repo) == [] and clean(repo)


def test_truncated_zip_of_a_server_gives_way_to_loose_files(repo, service, capfd):
    files = files_of(status_of(repo))
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files)[:500]} | loose(files))]
    assert pull(repo, f"{ADDRESS}/1") == 0
    assert "trying the loose files" in capfd.readouterr().err and len(placed(repo)) == 1


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.endswith(".sh") and "/.git/" not in name])
def test_zip_with_hostile_names(repo, tmp_path, capfd, name):
    archive = tmp_path / "run.zip"
    archive.write_bytes(zipped(files_of(status_of(repo)) | {name: b"evil"}))
    assert pull(repo, "--zip", str(archive)) == 1
    assert "name: got" in capfd.readouterr().err
    assert placed(repo) == [] and not [path for path in tmp_path.rglob("*") if "vil" in path.name]


def test_zip_with_a_link_or_a_name_twice(repo, tmp_path, capfd):
    archive = tmp_path / "run.zip"
    link = zipfile.ZipInfo("link.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for info, says in ((link, "is a link"), ("STATUS.json", "is there twice")):
        archive.write_bytes(zipped(files_of(status_of(repo))))
        with zipfile.ZipFile(archive, "a") as file:
            file.writestr(info, "/etc/passwd")
        assert pull(repo, "--zip", str(archive)) == 1
        assert says in capfd.readouterr().err and placed(repo) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "format: got '2', accepted: 1"),
        ({"commit": "HEAD"}, "commit: got 'HEAD'"),
        ({"state": "fine"}, "state: got 'fine'"),
        ({"started": "../../x"}, "started: got '../../x'"),
        ({"steps": None}, "steps: got 'None'"),
    ],
)
def test_malformed_status(repo, tmp_path, capfd, changes, says):
    archive = tmp_path / "run.zip"
    archive.write_bytes(zipped(files_of(status_of(repo, **changes))))
    assert pull(repo, "--zip", str(archive)) == 1
    assert says in capfd.readouterr().err and placed(repo) == []


def test_what_a_status_says_steers_no_markdown(repo, tmp_path):
    evil = "<img src=x> | [here](http://evil) \n# title `"
    status = status_of(repo, gpu={"name": f"{evil} T4"}, machine={evil: evil}, steps=[step(evil, note=evil)])
    archive = tmp_path / "run.zip"
    archive.write_bytes(zipped(files_of(status)))
    assert pull(repo, "--zip", str(archive)) == 0
    (name,) = placed(repo)
    for path in (repo / "results" / name / "README.md", repo / "results" / "README.md"):
        text = path.read_text()
        assert "\\<img" in text and "\n# title" not in text and "[here]" not in text and "\\[here\\]" in text


# The repository ------------------------------------------------------------------------------------------------------


def test_no_commit_then_commit(repo, service):
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]
    head = git(repo, "rev-parse", "HEAD")
    assert pull(repo, f"{ADDRESS}/1", "--no-commit") == 0
    assert git(repo, "rev-parse", "HEAD") == head and not clean(repo)
    assert pull(repo, f"{ADDRESS}/1") == 0
    assert git(repo, "rev-parse", "HEAD~") == head and clean(repo)


def test_one_s_own_changes_are_not_committed(repo, service, capfd):
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]
    (repo / "mine.py").write_text("x = 1\n")
    git(repo, "add", "mine.py")
    (repo / "README.md").write_text(README + "mine\n")
    assert pull(repo, f"{ADDRESS}/1") == 1
    assert "README.md: has changes of your own" in capfd.readouterr().err and placed(repo) == []
    (repo / "README.md").write_text(README)
    assert pull(repo, f"{ADDRESS}/1") == 0
    assert git(repo, "status", "--porcelain") == "A  mine.py"


def test_a_pull_that_was_killed_is_finished_by_the_next(repo, service, monkeypatch):
    service.runs = [Run(["COMPLETE"], {kaggle_pull.ARCHIVE: zipped(files_of(status_of(repo)))})]

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kaggle_pull, "commit", killed)
        assert pull(repo, f"{ADDRESS}/1") == 130
    assert not clean(repo)
    assert pull(repo, f"{ADDRESS}/1") == 0 and clean(repo) and len(placed(repo)) == 1


def test_nothing_pushed_and_no_address(repo, capfd):
    with pytest.raises(SystemExit):
        pull(repo)
    assert "nothing was pushed from here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ('a/b has status "KernelWorkerStatus.RUNNING"', "RUNNING"),
        ('a/b has status "complete"', "COMPLETE"),
        ('a/b has status "cancelAcknowledged"\nFailure message: "no"', "CANCEL_ACKNOWLEDGED"),
    ],
)
def test_status_words_of_every_release(monkeypatch, said, word):
    monkeypatch.setattr(kaggle_cli, "call", lambda *_, **__: said)
    assert kaggle_cli.state(kaggle_cli.Address("a", "b"))[0] == word


def test_status_word_that_nobody_knows(monkeypatch):
    monkeypatch.setattr(kaggle_cli, "call", lambda *_, **__: 'a/b has status "KernelWorkerStatus.FINE"')
    with pytest.raises(kaggle_cli.KaggleError, match="FINE"):
        kaggle_cli.state(kaggle_cli.Address("a", "b"))


@pytest.mark.parametrize("name", ["KAGGLE_API_ENVIRONMENT", "HTTP_PROXY", "https_proxy", "KAGGLE_KEY"])
def test_the_guard_lets_no_call_out(monkeypatch, name):
    with monkeypatch.context() as patch:
        patch.setenv(name, "PROD")
        with pytest.raises(AssertionError):
            kaggle_cli.state(kaggle_cli.Address("a", "b"))


@pytest.mark.parametrize("text", ["flashattn-t4", "a/b/c/d", "../x/1", "-x/y", "https://evil.com/code/a/b", "a/b/0x1"])
def test_address_that_is_none(text):
    with pytest.raises(ValueError, match="accepted are OWNER/SLUG"):
        kaggle_cli.Address.parse(text)


def test_the_kinds_are_those_that_the_driver_packs():
    sys.path.insert(0, str(ROOT / "kaggle"))
    import driver

    assert set(kaggle_pull.KINDS) == set(driver.KINDS)


def test_tables_prefer_a_full_run_to_a_newer_quick_one(tmp_path, repo):
    for name, quick, tflops in (("2026-12-01_t4_aaaaaaa", False, 30.0), ("2026-12-02_t4_bbbbbbb", True, 10.0)):
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        (folder / "attention.csv").write_bytes(csv_of(tflops=tflops))
        (folder / "status.json").write_text(json.dumps(status_of(repo, parameters={"quick": quick})))
    assert "| 30.0 |" in readme_tables.updated(README, tmp_path / "results")


def test_index_of_a_run_made_by_hand(tmp_path):
    folder = tmp_path / "2026-12-01_h200_aaaaaaa"
    folder.mkdir()
    (folder / "01_tests.ipynb").write_text('["gpu     NVIDIA H200\\n",\n"triton   3.6.0\\n"]')
    (folder / "01_tests.json").write_text('{"counts": {"passed": 5, "failed": 1, "skipped": 2}}')
    closing = "= 1 failed, 7 passed, 2 skipped, 3 warnings in 70.00s (0:01:10) ="
    log = f"torch 2.11.0 Triton 3.2.0 NVIDIA H200 commit abc\nkept 9 passed by\n{closing}\n"
    (folder / "tests_triton3.2.0_turing_path.log").write_text(log)
    shown = results_index.text(tmp_path)
    assert "| 2026-12-01 | NVIDIA H200 | 3.6.0 | 5 of 8, 1 failed, 2 skipped | - | - | [made by hand](" in shown
    assert "| 2026-12-01 | NVIDIA H200 | 3.2.0 | 7 of 10, 1 failed, 2 skipped | - | - |" in shown
    assert "[tests_triton3.2.0_turing_path](2026-12-01_h200_aaaaaaa/tests_triton3.2.0_turing_path.log)" in shown
    (folder / "tests_triton3.6.0.log").write_text(closing)
    with pytest.raises(ValueError, match="aaaaaaa/tests_triton3.6.0.log: begins with"):
        results_index.text(tmp_path)


def test_figure_of_the_newest_run(tmp_path):
    folder = tmp_path / "results" / "2026-12-01_t4_aaaaaaa"
    folder.mkdir(parents=True)
    (folder / "attention.csv").write_bytes(csv_of())
    text = "<!-- figure:t4 -->\nold\n<!-- /figure:t4 -->\n"
    with pytest.raises(ValueError, match="figure: 2026-12-01_t4_aaaaaaa has no attention.png"):
        readme_tables.updated(text, tmp_path / "results")
    (folder / "attention.png").touch()
    shown = f"![TFLOP/s over length, Tesla T4](results/{folder.name}/attention.png)"
    assert readme_tables.updated(text, tmp_path / "results") == text.replace("old", shown)


def test_blocks_of_a_readme_for_runs_still_to_come(tmp_path):
    """They say that there is none, then show it; a run without the mode or the figure is passed over."""
    results, table, figure = tmp_path / "results", "table:t4_forward", "figure:t4"
    results.mkdir()
    text = "".join(f"<!-- {name} if any -->\n<!-- /{name} -->\n" for name in (table, figure))
    none_yet = readme_tables.updated(text, results)
    assert "\nNo complete run yet.\n" in none_yet and "\n**No figure here is from a T4 yet**" in none_yet

    def add(name, csv, *others):
        (results / name).mkdir()
        (results / name / "attention.csv").write_bytes(csv)
        for other in others:
            (results / name / other).touch()

    add("2026-12-01_t4_aaaaaaa", csv_of().replace(b"forward", b"backward"))
    shown = readme_tables.updated(none_yet, results)
    assert "\nNo complete run yet.\n" in shown and f"<!-- {figure} if any -->\n<!-- /{figure} -->" in shown
    add("2026-12-02_t4_bbbbbbb", csv_of(tflops=20.5), "attention.png")
    add("2026-12-03_t4_ccccccc", csv_of().replace(b"forward", b"backward").replace(b"12-02T10:10", b"12-03T10:10"))
    shown = readme_tables.updated(none_yet, results)
    assert "| 20.5 |" in shown and "(results/2026-12-02_t4_bbbbbbb/attention.png)" in shown and " yet" not in shown
    assert readme_tables.updated(shown, results) == shown


def test_the_readme_shows_a_t4_once_there_is_one():
    text = (ROOT / "README.md").read_text()
    for name in ("figure:t4", "table:t4_forward", "table:t4_forward+backward"):
        assert f"<!-- {name} if any -->" in text
    assert "figure here is from" not in readme_tables.BLOCK.sub("", text)


@pytest.mark.skipif(not [*ROOT.glob("results/*_*_*/")], reason="no results, as where the tree was pushed to Kaggle")
def test_the_index_is_in_step_with_results():
    assert results_index.main(["--check"]) == 0


def test_command_line_works_from_any_folder(tmp_path):
    script = ROOT / "scripts" / "pull_from_kaggle.sh"
    env = os.environ | {"FLASHATTN_PYTHON": sys.executable}
    done = subprocess.run([script, "--zip", "absent.zip"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "there is no file absent.zip" in done.stderr
    done = subprocess.run([script, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: scripts/pull_from_kaggle.sh [")

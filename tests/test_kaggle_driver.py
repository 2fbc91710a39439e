"""The driver against a made-up project: whatever happens to the machine or to a child, the account of it is right."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from time import monotonic

import pytest
from children import ROOT, environment
from kaggle_project import PARAMETERS, T4, Project

psutil = pytest.importorskip("psutil", reason="psutil, which ipykernel brings, is not installed")

import child  # noqa: E402
import driver  # noqa: E402
import plan  # noqa: E402

from flashattn import turing  # noqa: E402

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb") if path.stem not in plan.NO_GPU)
HANG = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
for session in (False, True):
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=session)
    with (root / "pids").open("a") as file:
        print(process.pid, file=file)
print("hanging", flush=True)
"""
SHORT = {"notebooks": ["01_tests", "02_benchmark"], "tritons": ["image"]}
ALL_STEPS = [
    ("01_tests", "image"),
    ("01_tests", "3.2.0"),
    ("tune", "image"),
    ("02_benchmark", "image"),
    ("03_triton_versions", "image"),
    ("tune", "3.2.0"),
    ("02_benchmark", "3.2.0"),
]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project")


@pytest.fixture
def run(project, tmp_path):
    """Run the driver on the project; checks that what it returns and what it leaves are the same."""

    def run(**parameters):
        status = driver.run(tmp_path / "run", PARAMETERS | parameters, "5" * 64, root=project.root)
        assert status == json.loads((tmp_path / "run" / "status.json").read_text())
        assert status["ended"] and (tmp_path / "flashattn_run.zip").is_file()
        return status

    return run


def states(status):
    return {(step["name"], step["triton"]): step["state"] for step in status["steps"]}


def notes(status):
    return {(step["name"], step["triton"]): step["note"] for step in status["steps"]}


def wait_for(path):
    """Have an act wait for a file in the project's folder."""
    return f"while not (root / {path!r}).exists(): time.sleep(0.02)\n"


def are_gone(project):
    """Whether all processes that a HANG has started have ended."""
    pids = [int(pid) for pid in (project.root / "pids").read_text().split()]
    assert pids
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


# A run ---------------------------------------------------------------------------------------------------------------


def test_complete_run(run, project, tmp_path, capsys):
    status = run()
    assert status["state"] == "finished" and status["reason"] == ""
    assert list(states(status).items()) == [(step, "passed") for step in ALL_STEPS]
    assert notes(status)["02_benchmark", "3.2.0"] == "3 passed"
    assert (status["commit"], status["dirty"], status["payload_sha256"]) == ("a" * 40, "no", "5" * 64)
    assert status["gpu"] == T4 | {"count": 2} and status["machine"]["torch"] == "2.10.0"
    assert status["parameters"] == PARAMETERS and status["accepts_any_device"] is False
    names = set(zipfile.ZipFile(tmp_path / "flashattn_run.zip").namelist())
    assert names >= {"status.json", "machine.json", "doctor.txt", "driver.log", "01_tests.json"}
    assert names >= {"triton3.2.0/02_benchmark.json"} and any(name.startswith("tuned/") for name in names)
    log = (tmp_path / "run" / "driver.log").read_text()
    assert "02_benchmark, Triton 3.2.0 | 02_benchmark is fine" in log and log in capsys.readouterr().out
    assert (tmp_path / "run" / "doctor.txt").read_text() == "Nothing is wrong.\n"


def test_children_are_told_what_they_need_and_nothing_that_may_be_secret(run, project, monkeypatch):
    of_jupyter = ("MPLBACKEND", "JPY_PARENT_PID", "FORCE_COLOR")
    for name in (*of_jupyter, "KAGGLE_USER_SECRETS_TOKEN", "KAGGLE_KEY", "A_PASSWORD"):
        monkeypatch.setenv(name, "left out")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    run(notebooks=["02_benchmark"], notebook_parameters={"02_benchmark": {"seq_lens": [64]}})
    for script in ("machine", "tune", "run_notebooks"):
        for _, given in project.asked(script):
            assert "left out" not in given.values() and "TRITON_INTERPRET" not in given
            assert given["FLASHATTN_COMMIT"] == "a" * 40 and given["FLASHATTN_DIRTY"] == "0"
            assert given["KAGGLE_KERNEL_RUN_TYPE"] == "Batch"
    paths = [given["PYTHONPATH"].split(os.pathsep) for _, given in project.asked("run_notebooks")]
    assert paths[0][0] == str(project.root)
    assert paths[1][:2] == [str(project.root / "releases" / "3.2.0"), str(project.root)]
    name, _, output, *given = project.asked("run_notebooks")[1][0]
    assert name == "02_benchmark" and output.endswith("/run/triton3.2.0")
    told = {parameter: json.loads(value) for parameter, value in zip(given[1::3], given[2::3], strict=True)}
    assert told == plan.QUICK["02_benchmark"] | {"seq_lens": [64]}
    assert [argv for argv, _ in project.asked("tune")] == [plan.QUICK_TUNE] * 2


def test_status_is_written_after_every_step(run, project):
    project.act("02_benchmark run", "(root / 'seen').write_text((output / 'status.json').read_text())")
    run(**SHORT)
    seen = json.loads((project.root / "seen").read_text())
    assert seen["state"] == "running" and seen["ended"] is None
    assert list(states(seen).values()) == ["passed", "passed", "not run"]
    assert notes(seen)["02_benchmark", "image"] == "not reached"


def test_tests_run_at_once_where_there_are_two_gpus(run, project):
    project.act("01_tests run", "(root / 'a').touch()\n" + wait_for("b"))
    project.act("01_tests triton3.2.0", "(root / 'b').touch()\n" + wait_for("a"))
    run(notebooks=["01_tests", "02_benchmark"])
    visible = [given["CUDA_VISIBLE_DEVICES"] for argv, given in project.asked("run_notebooks") if argv[0] == "01_tests"]
    assert sorted(visible) == ["0,1", "1,0"]
    assert all("CUDA_VISIBLE_DEVICES" not in given for _, given in project.asked("tune"))


def test_one_gpu_is_for_one_at_a_time(run, project):
    project.gpus(T4)
    project.act("01_tests run", "time.sleep(0.3); (root / 'a').touch()")
    project.act("01_tests triton3.2.0", "assert (root / 'a').exists()")
    assert set(states(run(notebooks=["01_tests"])).values()) == {"passed"}


def test_earlier_run_is_removed(run, tmp_path):
    run(notebooks=["none"])
    (tmp_path / "run" / "stale.csv").touch()
    run(notebooks=["none"])
    assert not (tmp_path / "run" / "stale.csv").exists()


# Machines ------------------------------------------------------------------------------------------------------------


P100, L4 = {"name": "Tesla P100", "capability": "6.0"}, {"name": "NVIDIA L4", "capability": "8.9"}


@pytest.mark.parametrize("gpus", [[], [P100], [T4, L4]])
def test_other_machines_are_refused(run, project, gpus):
    project.gpus(*gpus)
    status = run()
    assert status["state"] == "refused" and status["steps"] == []
    assert "accepted is a T4 (7.5)" in status["reason"] and "NvidiaTeslaT4" in status["reason"]
    assert all(gpu["name"] in status["reason"] or gpu == T4 for gpu in gpus)
    assert status["commit"] == "a" * 40 and status["machine"]["triton"] == "3.6.0"
    assert project.asked("run_notebooks") == project.asked("triton_releases") == []


def test_any_device_is_accepted_where_that_is_asked_for(run, project):
    project.gpus()
    status = run(accept_any_device=True)
    assert status["accepts_any_device"] is True and status["gpu"] == {"name": "CPU", "capability": "", "count": 0}
    assert list(states(status)) == [step for step in ALL_STEPS if step[0] != "tune"]
    assert set(states(status).values()) == {"passed"}


def test_torch_that_does_not_import_is_refused(run, project):
    project.script("kaggle/machine.py", "raise ImportError('libcudart.so.12')")
    status = run()
    assert status["state"] == "refused" and "libcudart.so.12" in status["reason"]


def test_this_machine(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "machine.json"
    command = [sys.executable, ROOT / "kaggle" / "machine.py", path]
    subprocess.run(command, env=environment(interpreted=False), check=True)
    facts = json.loads(path.read_text())
    assert {"gpus", "gpu", "driver", "sm_clock_mhz", "power_limit_w", "cuda", "torch", "triton", "python"} <= set(facts)
    assert facts["cores"] >= 1 and all(set(gpu) == {"name", "capability"} for gpu in facts["gpus"])


def test_without_internet_a_pass_is_left_out(run, project):
    said = "Triton 3.2.0 cannot be fetched: Network is unreachable"
    project.script("scripts/triton_releases.py", f"print({said!r}, file=sys.stderr); sys.exit(1)")
    status = run()
    for (name, triton), state in states(status).items():
        assert state == ("not run" if triton == "3.2.0" else "passed"), name
    assert notes(status)["02_benchmark", "3.2.0"] == said
    assert status["state"] == "finished"


def test_missing_packages_are_named(run, project, monkeypatch):
    monkeypatch.setattr(driver, "MODULES", ["json", "no_such_module"])
    project.script("pip/__main__.py", "print('ERROR: no network'); sys.exit(1)")
    status = run(**SHORT)
    assert notes(status)["01_tests", "image"] == "not installed: no_such_module; pip said: ERROR: no network"
    assert list(states(status).values()) == ["not run", "passed", "not run"]


def test_tests_do_without_xdist(run, project, monkeypatch):
    find_spec = driver.find_spec
    monkeypatch.setattr(driver, "find_spec", lambda name: None if name == "xdist" else find_spec(name))
    run(notebooks=["01_tests"], tritons=["image"])
    ((argv, _),) = project.asked("run_notebooks")
    assert json.loads(argv[argv.index("pytest_args") + 1]) == plan.QUICK["01_tests"]["pytest_args"]


# Children ------------------------------------------------------------------------------------------------------------


def test_hanging_child_is_cut_off_with_all_that_it_started(run, project, monkeypatch):
    monkeypatch.setattr(plan, "LEAST_LIMIT_MINUTES", 0)
    monkeypatch.setitem(plan.MINUTES, "02_benchmark", (3 / 60 / plan.SLACK, 0))
    monkeypatch.setattr(child, "GRACE_S", 0.5)
    project.act("02_benchmark run", HANG + "time.sleep(600)")
    status = run(notebooks=["02_benchmark", "03_triton_versions"], tritons=["image"])
    assert list(states(status).values()) == ["passed", "timed out", "passed"]
    assert notes(status)["02_benchmark", "image"] == "cut off after 3 s: hanging"
    assert are_gone(project)


def test_child_that_leaves_orphans(run, project):
    project.act("01_tests run", HANG)
    assert set(states(run(notebooks=["01_tests"], tritons=["image"])).values()) == {"passed"}
    assert are_gone(project)


def test_time_is_up_for_a_child_that_ends_when_interrupted(run, project, monkeypatch):
    monkeypatch.setattr(plan, "LEAST_LIMIT_MINUTES", 0)
    monkeypatch.setitem(plan.MINUTES, "01_tests", (6 / 60 / plan.SLACK, 0))
    act = "try: print('at work'); time.sleep(600)\nexcept KeyboardInterrupt: print('ends its kernel'); sys.exit(1)"
    project.act("01_tests run", act)
    start = monotonic()
    status = run(notebooks=["01_tests"], tritons=["image"])
    assert notes(status)["01_tests", "image"] == "cut off after 6 s: at work"
    assert monotonic() - start < 6 + child.GRACE_S


@pytest.mark.parametrize(
    "act, note",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("print('a'); print(); sys.exit(2)", "ended with exit code 2: a"),
        (
            "sys.stdout.buffer.write(b'\\xff no\\n'); sys.exit(1)",
            "ended with exit code 1: \N{REPLACEMENT CHARACTER} no",
        ),
    ],
)
def test_failing_child_stops_no_other(run, project, act, note):
    project.act("02_benchmark run", act)
    status = run(notebooks=["02_benchmark", "03_triton_versions"], tritons=["image"])
    assert status["state"] == "finished"
    assert list(states(status).values()) == ["passed", "failed", "passed"]
    assert notes(status)["02_benchmark", "image"] == note


def test_child_that_prints_without_end(run, project, monkeypatch, tmp_path):
    monkeypatch.setattr(child, "MAX_LINES", 50)
    project.act("01_tests run", "print('x' * 100_000)\nfor number in range(20_000): print(number)")
    status = run(notebooks=["01_tests"], tritons=["image"])
    assert states(status) == {("01_tests", "image"): "passed"}
    log = (tmp_path / "run" / "driver.log").read_text()
    assert "50 lines were shown" in log and len(log) < 250_000


def test_limit_of_the_run(run, project, monkeypatch):
    monkeypatch.setattr(driver.Run, "left_s", lambda self: 0.5 if (project.root / "late").exists() else 3.0)
    monkeypatch.setattr(driver, "LEAST_S", 1.0)
    project.act("01_tests run", "(root / 'late').touch(); time.sleep(600)")
    status = run(**SHORT)
    assert list(states(status).values()) == ["timed out", "not run", "not run"]
    assert notes(status)["01_tests", "image"] == "cut off after 3 s"
    assert notes(status)["02_benchmark", "image"] == "the run's limit of 10 minutes is used up"


def test_full_disk(run, project, monkeypatch):
    free = driver.shutil.disk_usage(project.root)

    def disk_usage(path):
        return free._replace(free=10 << 20 if (project.root / "full").exists() else 10 << 30)

    monkeypatch.setattr(driver.shutil, "disk_usage", disk_usage)
    project.act("02_benchmark run", "(root / 'full').touch(); time.sleep(600)")
    status = run(notebooks=["02_benchmark", "03_triton_versions"], tritons=["image"])
    assert list(states(status).values()) == ["passed", "failed", "not run"]
    assert notes(status)["02_benchmark", "image"] == "the disk is full: 10 MB left"
    assert notes(status)["03_triton_versions", "image"] == "the disk is full: 10 MB left"


# The driver itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters, reason",
    [
        (
            {"notebooks": ["01_tests", "09_none"]},
            "notebooks: got ['01_tests', '09_none'], accepted is a list of some of",
        ),
        ({"notebooks": []}, "notebooks: got []"),
        ({"tritons": ["image", "3.2.0; rm -r /"]}, "tritons: got"),
        ({"tritons": ["image", "image"]}, "tritons: got"),
        ({"notebook_parameters": {"01_tests": []}}, "notebook_parameters: got"),
        ({"limit_minutes": 0}, "limit_minutes: got 0, accepted is a number of minutes above 0"),
        ({"limit_minutes": True}, "limit_minutes: got True"),
        ({"quick": "yes"}, "quick: got 'yes', accepted is True or False"),
        ({"accept_any_device": 1}, "accept_any_device: got 1"),
        ({"quik": True}, "parameters: got"),
    ],
)
def test_parameters_that_are_refused(run, project, parameters, reason):
    status = run(**parameters)
    assert status["state"] == "refused" and status["reason"].startswith(reason)
    assert not (project.root / "asked").exists()


def test_driver_does_not_raise(run, project, monkeypatch, tmp_path):
    monkeypatch.setattr(driver.Run, "judge", lambda *_: 1 / 0)
    status = run(**SHORT)
    assert status["reason"] == "the driver itself failed: ZeroDivisionError: division by zero"
    assert set(states(status).values()) == {"not run"}
    (project.root / "MANIFEST.json").unlink()
    assert "MANIFEST.json" in run()["reason"]
    (tmp_path / "file").touch()
    status = driver.run(tmp_path / "file" / "run", PARAMETERS, root=project.root)
    assert status["state"] == "finished" and "NotADirectoryError" in status["reason"]


def test_interrupt_ends_the_children_and_is_put_down(project, monkeypatch, tmp_path):
    monkeypatch.setattr(child, "GRACE_S", 0.5)
    project.act("02_benchmark run", HANG + "(root / 'hangs').touch(); time.sleep(600)")

    def trouble(self):
        if (project.root / "hangs").exists():
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(driver.Run, "trouble", trouble)
    with pytest.raises(KeyboardInterrupt):
        driver.run(tmp_path / "run", PARAMETERS | SHORT, root=project.root)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("finished", "interrupted")
    assert list(states(status).values()) == ["passed", "passed", "not run"]
    assert are_gone(project)


# The plan ------------------------------------------------------------------------------------------------------------


def settings(**parameters):
    return plan.Settings.of(PARAMETERS | parameters, NOTEBOOKS)


def test_estimates_are_as_promised():
    assert plan.estimate(settings()) <= 20
    assert plan.estimate(settings(quick=False)) <= 3 * 60
    assert set(plan.MINUTES) - {plan.TUNE} == {*NOTEBOOKS, *plan.NO_GPU}
    limits = [step.limit_minutes(False) for steps in plan.batches(settings(quick=False), 2) for step in steps]
    assert sum(limits) < 12 * 60


def test_limits_of_steps():
    assert [plan.Step(name, plan.IMAGE).limit_minutes(True) for name in (plan.TESTS, plan.TUNE)] == [12, 10]
    assert [plan.Step(name, plan.IMAGE).limit_minutes(False) for name in (plan.TESTS, plan.TUNE)] == [78, 12]


def test_limit_of_the_run_comes_before_that_of_a_step(run, tmp_path):
    run(notebooks=["02_benchmark"], tritons=["image"], limit_minutes=5)
    log = (tmp_path / "run" / "driver.log").read_text()
    assert "tune, Triton of the image: starts, 5 minutes at most" in log and "10 minutes" not in log
    run(notebooks=["02_benchmark"], tritons=["image"], limit_minutes=60)
    assert "tune, Triton of the image: starts, 10 minutes at most" in (tmp_path / "run" / "driver.log").read_text()


def test_passes_have_the_releases_with_tensor_cores():
    assert plan.TRITONS == ["3.2.0", *turing.RESTORED]


def test_passes_and_notebooks_in_order_of_worth():
    told = settings(tritons=["3.2.0", "image", "3.7.1"], notebooks=NOTEBOOKS[::-1])
    assert [[f"{step.name} {step.triton}" for step in steps] for steps in plan.batches(told, 2)] == [
        ["01_tests 3.2.0", "01_tests image"],
        ["01_tests 3.7.1"],
        ["03_triton_versions 3.2.0"],
        ["tune 3.2.0"],
        ["02_benchmark 3.2.0"],
        ["tune image"],
        ["02_benchmark image"],
        ["tune 3.7.1"],
        ["02_benchmark 3.7.1"],
    ]


def test_what_notebooks_are_told():
    def told(name, gpus=2, processes=2, **parameters):
        return plan.notebook_parameters(name, settings(**parameters), gpus=gpus, processes=processes)

    assert told("01_tests", quick=False) == {"pytest_args": ["-n", "2"]}
    assert told("01_tests", quick=False, processes=0) == {"pytest_args": []}
    assert told("02_benchmark", quick=False) == {} and told("02_benchmark") == plan.QUICK["02_benchmark"]
    assert told("02_benchmark", gpus=0) == {}
    assert told("03_triton_versions", gpus=0, quick=False) == plan.QUICK["03_triton_versions"]
    given = {"01_tests": {"pytest_args": "-k causal"}}
    assert told("01_tests", notebook_parameters=given) == given["01_tests"]


@pytest.mark.parametrize("module", ["driver", "plan", "child"])
def test_driver_imports_only_what_is_there_before_pip_was_asked(module):
    tree = ast.parse((ROOT / "kaggle" / f"{module}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert others <= {"plan", "child", "psutil"}  # ipykernel, in which the driver runs, brings psutil

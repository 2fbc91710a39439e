"""The two lists of pins agree, and the commands do as they say: run with a recording Python and conda."""

import re
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (".ci/run", "scripts/setup.sh", "scripts/test.sh", "scripts/run_local.sh")
TOOLS = "bash cat cksum cp dirname grep mkdir mv rm sed tee".split()

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are bash scripts")
needs_yaml = pytest.mark.skipif(find_spec("yaml") is None, reason="PyYAML reads environment.yml")

# Answers setup.sh's questions, makes venvs that hold a copy of itself, and logs whatever it is told to do.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *sys.exit*) exit 0 ;;
    *print*) echo VERSION; exit ;;
    "-m pip --version") exit 0 ;;
esac
echo "$PWD|$*" >>"$FAKE_LOG"
case "$*" in
    "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    *${FAKE_FAILS:-nothing}*) echo "${FAKE_SAYS:-going wrong}"; exit 3 ;;
esac
"""
FAKE_CONDA = """#!/usr/bin/env bash
echo "conda|$*" >>"$FAKE_LOG"
mkdir -p "$4/bin"
cp "$(command -v fake-python)" "$4/bin/python"
"""


class Checkout:
    """A copy of the commands in a folder of its own, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "a checkout", folder / "bin", folder / "log"
        (self.root / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        (self.root / "scripts").mkdir()
        for name in ("environment.yml", "pyproject.toml", *COMMANDS):
            shutil.copy(ROOT / name, self.root / name)
        for name in COMMANDS:
            (self.root / name).chmod(0o755)  # an unpacked zip may have lost it
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def add(self, name, text=FAKE_PYTHON, version="3.12"):
        path = self.bin / name
        path.write_text(text.replace("VERSION", version))
        path.chmod(0o755)
        return path

    def run(self, command, *arguments, **environment):
        """The finished process, and what the fakes were asked meanwhile. Started from another folder."""
        self.log.write_text("")
        process = subprocess.run(
            [self.root / command, *arguments],
            cwd=self.bin,
            env={"PATH": str(self.bin), "FAKE_LOG": str(self.log), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return process, self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def environment():
    """environment.yml's conda packages, and its pip section."""
    import yaml

    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return dependencies[:-1], dependencies[-1]["pip"]


@needs_yaml
def test_pins_agree():
    _, pins = environment()
    assert pins[-1] == "-e ."
    pinned = {Requirement(pin).name: Requirement(pin) for pin in pins[:-1]}
    tools = {Requirement(tool).name: Requirement(tool) for tool in project()["optional-dependencies"]["dev"]}
    libraries = [*project()["dependencies"], *project()["optional-dependencies"]["gpu"]]
    assert pinned.keys() == tools.keys() | {Requirement(library).name for library in libraries}
    for name, tool in tools.items():
        assert pinned[name] == tool
    for accepted in map(Requirement, libraries):
        specifier = pinned[accepted.name].specifier
        if specifier != accepted.specifier:
            (exact,) = specifier
            assert exact.operator == "==" and accepted.specifier.contains(exact.version), accepted.name


@needs_yaml
def test_python_of_environment_is_accepted():
    packages = dict(package.partition("=")[::2] for package in environment()[0])
    assert SpecifierSet(project()["requires-python"]).contains(packages["python"])


@needs_bash
@needs_yaml
def test_venv_gets_the_pins_of_environment(checkout):
    checkout.add("python3.12")
    process, asked = checkout.run("scripts/setup.sh")
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{checkout.root}/.venv/bin/python\n"
    assert asked[0].endswith("|-m venv --clear .venv")
    assert asked[1].startswith(f"{checkout.root}|-m pip install ") and asked[1].endswith("-r .venv/requirements.txt")
    assert len(asked) == 2
    assert (checkout.root / ".venv/requirements.txt").read_text().splitlines() == environment()[1]


@needs_bash
@pytest.mark.parametrize(
    "there, taken", [("3.11 3.12 3.13", "3.12"), ("3.11 3.13", "3.11"), ("3.13", "3.13"), ("", "3")]
)
def test_venv_takes_the_first_python(checkout, there, taken):
    checkout.add("python3", version="3")
    for version in there.split():
        checkout.add(f"python{version}", version=version)
    process, _ = checkout.run("scripts/setup.sh")
    assert f"making .venv/ with Python {taken}\n" in process.stderr


@needs_bash
def test_python_that_does_not_start_is_passed_over(checkout):
    checkout.add("python3.12", "#!/usr/bin/env bash\nexit 127\n")
    checkout.add("python3.13", version="3.13")
    process, _ = checkout.run("scripts/setup.sh")
    assert process.returncode == 0 and "with Python 3.13" in process.stderr


@needs_bash
def test_setup_is_made_once_and_again_where_pins_change(checkout):
    checkout.add("python3.12")
    assert len(checkout.run("scripts/setup.sh")[1]) == 2
    assert checkout.run("scripts/setup.sh")[1] == []
    with (checkout.root / "environment.yml").open("a") as file:
        file.write("      - another==1.0\n")
    _, asked = checkout.run("scripts/setup.sh")
    assert len(asked) == 1 and "pip install" in asked[0]


@needs_bash
def test_setup_that_failed_is_not_taken_for_made(checkout):
    checkout.add("python3.12")
    process, _ = checkout.run("scripts/setup.sh", FAKE_FAILS="pip install")
    assert process.returncode == 3 and process.stdout == ""
    process, asked = checkout.run("scripts/setup.sh")
    assert process.returncode == 0 and "pip install" in asked[-1]


@needs_bash
def test_venv_that_moved_is_made_anew(checkout):
    checkout.add("python3.12")
    checkout.run("scripts/setup.sh")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    process, asked = checkout.run("scripts/setup.sh")
    assert process.stdout == f"{checkout.root}/.venv/bin/python\n"
    assert "venv --clear" in asked[0]


@needs_bash
def test_venv_by_the_python_asked_for(checkout):
    checkout.add("fake-python")
    checkout.add("conda", FAKE_CONDA)
    checkout.add("python3.12")
    asked_for = checkout.add("mine", version="3.13")
    for spelling in ("mine", "./mine", str(asked_for)):
        process, _ = checkout.run("scripts/setup.sh", "--venv", spelling)
        assert process.stdout == f"{checkout.root}/.venv/bin/python\n", process.stderr
    process, asked = checkout.run("scripts/setup.sh", "--venv", "python3.12")
    assert "making .venv/ with Python 3.12" in process.stderr and "venv --clear" in asked[0]
    process, _ = checkout.run("scripts/setup.sh", "--venv", "python3.9")
    assert process.returncode == 1 and "python3.9" in process.stderr


@needs_bash
@pytest.mark.parametrize("name", ["conda", "mamba", "micromamba"])
def test_conda_comes_first(checkout, name):
    checkout.add("fake-python")
    checkout.add("python3.12")
    checkout.add(name, FAKE_CONDA)
    created = f"conda|env create --prefix {checkout.root}/.conda --file {checkout.root}/environment.yml"
    process, asked = checkout.run("scripts/setup.sh")
    assert process.stdout == f"{checkout.root}/.conda/bin/python\n"
    assert asked == [created]
    assert checkout.run("scripts/setup.sh")[1] == []
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("\n")
    assert checkout.run("scripts/setup.sh")[1] == [created]


@needs_bash
def test_no_python_says_what_to_do(checkout):
    checkout.add("python3", "#!/usr/bin/env bash\nexit 1\n")  # too old
    process, _ = checkout.run("scripts/setup.sh")
    assert process.returncode == 1 and process.stdout == ""
    assert "3.11 to 3.13" in process.stderr and "FLASHATTN_PYTHON" in process.stderr


@needs_bash
def test_unknown_argument_is_named(checkout):
    process, _ = checkout.run("scripts/setup.sh", "--fast")
    assert process.returncode == 1 and "--fast" in process.stderr


@needs_bash
def test_prepared_python_is_used_as_it_is(checkout):
    mine = checkout.add("mine")
    for spelling in ("mine", "./mine", str(mine)):
        process, asked = checkout.run("scripts/setup.sh", FLASHATTN_PYTHON=spelling)
        assert process.returncode == 0 and asked == []
        assert Path(process.stdout.strip()).samefile(mine)
    process, _ = checkout.run("scripts/setup.sh", FLASHATTN_PYTHON="absent")
    assert process.returncode == 1 and "FLASHATTN_PYTHON" in process.stderr and "absent" in process.stderr
    process, asked = checkout.run("scripts/setup.sh", "--venv", "mine", FLASHATTN_PYTHON="mine")
    assert process.returncode == 1 and "--venv mine" in process.stderr and (process.stdout, asked) == ("", [])


@needs_bash
def test_a_link_is_not_emptied(checkout, tmp_path):
    checkout.add("python3.12")
    (tmp_path / "elsewhere").mkdir()
    (checkout.root / ".venv").symlink_to(tmp_path / "elsewhere")
    process, asked = checkout.run("scripts/setup.sh")
    assert process.returncode == 1 and ".venv is a link" in process.stderr and asked == []


@needs_bash
@pytest.mark.parametrize("page", ["README.md", "docs/running.md"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside the interpreter", "elsewhere on the PATH"])
def test_login_is_by_the_command_that_the_push_takes(checkout, page, beside):
    (line,) = re.findall(r"^ *(?:\$ )?(.*kaggle.* auth login)\b", (ROOT / page).read_text(), re.MULTILINE)
    checkout.add("kaggle", "#!/usr/bin/env bash\necho on the PATH: $*\n")
    folder = checkout.root / "mine"
    folder.mkdir()
    checkout.add("mine").rename(folder / "python3")
    if beside:
        checkout.add("other", "#!/usr/bin/env bash\necho beside: $*\n").rename(folder / "kaggle")
    line = f"cd '{checkout.root}' && {line}"
    process, _ = checkout.run(checkout.bin / "bash", "-c", line, FLASHATTN_PYTHON=str(folder / "python3"))
    assert process.stdout == f"{'beside' if beside else 'on the PATH'}: auth login\n", process.stderr


@needs_bash
def test_tests_take_the_arguments_of_pytest(checkout):
    checkout.add("mine")
    _, asked = checkout.run("scripts/test.sh", "-k", "causal", FLASHATTN_PYTHON="mine")
    (pytest_call,) = asked
    assert pytest_call.startswith(f"{checkout.root}|-m pytest ")
    assert "--junitxml results/local/tests.xml" in pytest_call and pytest_call.endswith(" -k causal")


@needs_bash
def test_local_run_keeps_the_log_and_the_exit_status(checkout):
    checkout.add("mine")
    process, asked = checkout.run("scripts/run_local.sh", "02_benchmark", FLASHATTN_PYTHON="mine")
    assert process.returncode == 0
    assert asked == [f"{checkout.root}|-u scripts/run_notebooks.py --output results/local 02_benchmark"]
    log = checkout.root / "results/local/run.log"
    failing = {"FLASHATTN_PYTHON": "mine", "FAKE_FAILS": "run_notebooks"}
    process, _ = checkout.run("scripts/run_local.sh", **failing, FAKE_SAYS="== 02_benchmark")
    assert process.returncode == 3 and log.read_text() == process.stdout == "== 02_benchmark\n"
    process, _ = checkout.run("scripts/run_local.sh", "--help", **failing, FAKE_SAYS="usage:")  # starts no notebook
    assert process.returncode == 3 and process.stdout == "usage:\n" and log.read_text() == "== 02_benchmark\n"
    process, _ = checkout.run("scripts/run_local.sh", FLASHATTN_PYTHON="absent")
    assert process.returncode == 1 and "absent" in process.stdout and log.read_text() == "== 02_benchmark\n"
    assert list(log.parent.iterdir()) == [log]


CI_PARTS = [("nothing", 0), ("ruff check", 1), ("ruff format", 1), ("triton_releases", 1), ("pytest", 3)]


@needs_bash
@pytest.mark.parametrize("fails, status", CI_PARTS)
def test_ci_runs_everything_and_fails_where_one_part_does(checkout, fails, status):
    checkout.add("mine")
    process, asked = checkout.run(".ci/run", FLASHATTN_PYTHON="mine", FAKE_FAILS=fails)
    assert process.returncode == status
    asked = [call.split("|")[1].removeprefix("-m ").split()[0] for call in asked]
    assert asked == ["ruff", "ruff", "scripts/triton_releases.py", "pytest"]

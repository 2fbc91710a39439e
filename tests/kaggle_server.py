"""A stand-in for Kaggle on loopback, and the guard that keeps the real `kaggle` command from reaching anything else.

    guard = kaggle_server.guard        # in a test module: its tests cannot reach Kaggle
    service = kaggle_server.service    # a fixture: the stand-in

The command, told that its API is at http://localhost, sends absolute URIs to its HTTP proxy: this server.
"""

import base64
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import kaggle_cli  # noqa: E402

API = "/api/v1/kernels.KernelsApiService/"
STREAM = "/api/v1/kernels/logs/stream/"
USER, KEY = "someone", secrets.token_hex(16)  # made up for each run, so that it is in no source
TRAVELS = base64.b64encode(f"{USER}:{KEY}".encode())
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def _missing() -> list[str]:
    """What the tests of the push and the pull lack here: the pinned command and git, and not to be at Kaggle itself."""
    pinned = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"kaggle==' in line)
    try:
        kaggle = [] if f'"kaggle=={metadata.version("kaggle")}"' in pinned else [pinned.strip(' ",')]
    except metadata.PackageNotFoundError:
        kaggle = [pinned.strip(' ",')]
    away = ["another place than Kaggle"] if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else []
    return kaggle + away + [name for name in ("git",) if not shutil.which(name)]


needs_kaggle = pytest.mark.skipif(bool(_missing()), reason=f"missing: {', '.join(_missing())}")


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, errors="replace", check=True)
    return done.stdout.strip()


def commit_all(root: Path) -> None:
    """Make a folder a repository with one commit of all that is in it."""
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "Start")


def assert_no_key(root: Path) -> None:
    """The key, as it is or as it travels, is in no file of a repository and in no commit."""
    kept = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    for data in [*kept, git(root, "log", "-p", "--all").encode()]:
        assert KEY.encode() not in data and TRAVELS not in data


@dataclass
class Run:
    """One version of a kernel: the states that it is asked through, the last one staying, and what it leaves.

    `execute`, given the pushed notebook's text, runs it for real and returns (state, files). late: the names of the
    files that each of the first listings has.
    """

    states: list[str] = field(default_factory=lambda: ["QUEUED", "RUNNING", "COMPLETE"])
    files: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    message: str = ""
    execute: Callable[[str], tuple[str, dict[str, bytes]]] | None = None
    late: list[list[str]] = field(default_factory=list)
    pushed: dict = field(default_factory=dict)

    def start(self) -> None:
        if self.execute:
            self.states = ["RUNNING"]
            threading.Thread(target=self._execute, daemon=True).start()

    def _execute(self) -> None:
        state, self.files = self.execute(self.pushed["text"])
        self.states = [state]

    def blob(self) -> str:
        """The log as Kaggle stores it."""
        return json.dumps([{"stream_name": "stdout", "time": 0.5 * i, "data": s} for i, s in enumerate(self.log)])


class Service(ThreadingHTTPServer):
    """What Kaggle would know: `runs` in the order of their pushes, `next` for those to come, requests so far.

    trouble: {method, such as "SaveKernel" or "GET": HTTP statuses to answer first}, with words where in_words, which
    the command then prints instead of the status. refusal: why a push is refused.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: list[Run] = []
        self.next: list[Run] = []
        self.trouble: dict[str, list[int]] = {}
        self.in_words = False
        self.refusal = ""
        self.gpu_seconds_left = 30 * 3600
        self.lands_at = ""  # another slug than the one that was pushed
        self.requests: list[tuple[str, dict]] = []
        self.authorized: set[str] = set()
        self.page_size_limit = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def asked(self, method: str) -> list[dict]:
        return [body for name, body in self.requests if name == method]

    def run_of(self, body: dict) -> Run | None:
        version = int(body.get("versionLabel", "").removeprefix("v") or len(self.runs))
        return self.runs[version - 1] if 0 < version <= len(self.runs) else None


class Handler(BaseHTTPRequestHandler):
    server: Service

    def log_message(self, *_):
        pass

    def answer(self, body: object, status: int = 200, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def troubled(self, method: str) -> bool:
        statuses = self.server.trouble.get(method)
        if statuses and self.server.in_words:
            self.answer({"code": statuses[0], "message": "Trouble"}, statuses.pop(0))
        elif statuses:
            self.answer(b"<html>trouble</html>", statuses.pop(0), "text/html")
        return bool(statuses) or statuses == [] and self.server.trouble.pop(method) == []

    def do_POST(self):
        path = urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        method = path.rpartition("/")[2]
        self.server.requests.append((method, body))
        self.server.authorized.add(self.headers.get("Authorization", ""))
        if self.troubled(method):
            return
        handle = getattr(self, method, None) if path.startswith(API) else None
        self.answer(*(handle(body) if handle else ({"code": 404, "message": f"no method {method}"}, 404)))

    def GetAcceleratorQuotaStatistics(self, body):
        used = 30 * 3600 - self.server.gpu_seconds_left
        quota = {"timeUsed": f"{used}s", "totalTimeAllowed": f"{30 * 3600}s"}
        return ({"gpuQuota": quota, "quotaRefreshTime": "2026-12-05T00:00:00Z"},)

    def SaveKernel(self, body):
        if self.server.refusal:
            return ({"error": self.server.refusal},)
        run = self.server.next.pop(0) if self.server.next else Run()
        run.pushed = body
        self.server.runs.append(run)
        run.start()
        slug = self.server.lands_at or body["slug"]
        number = len(self.server.runs)
        url = f"https://www.kaggle.com/code/{slug}"
        return ({"ref": f"/code/{slug}", "url": url, "versionNumber": number, "kernelId": 1},)

    def GetKernelSessionStatus(self, body):
        run = self.server.run_of(body)
        if not run:
            return {"code": 404, "message": "Notebook not found"}, 404
        state = run.states.pop(0) if len(run.states) > 1 else run.states[0]
        return ({"status": state, "failureMessage": run.message if state not in ("QUEUED", "RUNNING") else ""},)

    def ListKernelSessionOutput(self, body):
        run = self.server.run_of(body)
        if not run:
            return {"code": 404, "message": "Notebook not found"}, 404
        first = int(body.get("pageToken") or 0)
        names = run.late.pop(0) if run.late else sorted(run.files)
        last = first + min(body.get("pageSize") or 20, self.server.page_size_limit)
        index = self.server.runs.index(run)
        urls = [f"http://localhost/file/{index}/{base64.urlsafe_b64encode(name.encode()).decode()}" for name in names]
        files = [{"fileName": name, "url": url} for name, url in zip(names, urls, strict=True)][first:last]
        return ({"files": files, "log": run.blob(), "nextPageToken": str(last) if last < len(names) else ""},)

    def do_GET(self):
        parts = urlsplit(self.path)
        self.server.requests.append(("GET", {"path": parts.path}))
        if self.troubled("GET"):
            return
        if parts.path.startswith("/file/"):
            _, _, index, name = parts.path.split("/")
            data = self.server.runs[int(index)].files[base64.urlsafe_b64decode(unquote(name)).decode()]
            self.answer(data, kind="application/octet-stream")
        elif parts.path.startswith(STREAM):
            label = parse_qs(parts.query).get("versionLabel", [""])[0]
            self.stream(self.server.run_of({"versionLabel": label}))
        else:
            self.answer({}, 404)

    def stream(self, run: Run) -> None:
        """Server-sent events: what was logged, then what is, until the run ends."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        sent, end = 0, monotonic() + 60
        while monotonic() < end:
            over = run.states[0] in kaggle_cli.ENDED
            for data in run.log[sent:]:
                event = json.dumps({"stream_name": "stdout", "time": 0.5 * sent, "data": data})
                self.wfile.write(f"data: {event}\n\n".encode())
                sent += 1
            self.wfile.flush()
            if over:
                self.wfile.write(b"data: END_OF_LOG\n\n")
                return
            sleep(0.05)

    def do_CONNECT(self):  # https: the way to the real service, which only a broken test takes
        self.server.requests.append(("CONNECT", {"path": self.path}))
        self.answer({}, 403)


def held() -> None:
    """Raise unless the environment sends the command to the stand-in and nowhere else."""
    assert os.environ.get("KAGGLE_API_ENVIRONMENT") == "LOCALHOST", "any other value is the real service"
    for name in PROXIES:
        assert os.environ.get(name, "").startswith("http://127.0.0.1:"), name
    assert os.environ.get("NO_PROXY") == os.environ.get("no_proxy") == ""
    assert os.environ.get("KAGGLE_KEY") == KEY and "KAGGLE_API_TOKEN" not in os.environ
    assert not (Path.home() / ".kaggle").exists() and Path(os.environ["KAGGLE_CONFIG_DIR"]).is_relative_to(Path.home())


@pytest.fixture
def service():
    server = Service()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    assert not server.asked("CONNECT"), "a test tried to reach another host"


@pytest.fixture(autouse=True)
def guard(service, tmp_path_factory, monkeypatch):
    """The environment of the command during a test; fails where a call would be made under any other."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(home / "config"))
    monkeypatch.setenv("KAGGLE_API_ENVIRONMENT", "LOCALHOST")
    monkeypatch.setenv("KAGGLE_USERNAME", USER)
    monkeypatch.setenv("KAGGLE_KEY", KEY)
    monkeypatch.delenv("KAGGLE_API_TOKEN", raising=False)
    for name in PROXIES:
        monkeypatch.setenv(name, service.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A Test")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "test@example.com")
    for name in ("VERBOSE", "VERBOSE_OUTPUT"):  # with which the command prints the Authorization header
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(kaggle_cli, "POLL_S", (0.01, 1.0))  # the stand-in does not mind
    real = kaggle_cli.environment

    def environment():
        held()
        return real()

    monkeypatch.setattr(kaggle_cli, "environment", environment)
    held()
    yield
    held()

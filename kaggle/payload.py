"""Builds what is pushed to Kaggle: the driver notebook with the project in it, and its kernel-metadata.json.

The project is a zip file in base64, of exactly the commit that is checked out, with a MANIFEST.json that names it, for
there is no git on the other side. The same commit and parameters make the same bytes.
"""

import ast
import base64
import hashlib
import io
import json
import re
import subprocess
import tarfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import nbformat
import plan

LIMIT_BYTES = 1_000_000  # of a notebook that Kaggle takes
LEFT_OUT = "results"  # what earlier runs brought back
CREDENTIALS = ("kaggle.json", "access_token", "credentials.json")  # as the kaggle command names its files


@dataclass(frozen=True)
class Manifest:
    """The commit of a payload, and whether the working tree differs from it."""

    commit: str
    dirty: bool


@dataclass(frozen=True)
class Built:
    """A folder for `kaggle kernels push`; sha256 is the zip file's, bytes the notebook's, minutes an estimate."""

    folder: Path
    notebook: Path
    manifest: Manifest
    sha256: str
    bytes: int
    minutes: float


def manifest(root: Path, allow_dirty: bool = False) -> Manifest:
    """Of a payload of the checkout at root. Raises ValueError for uncommitted changes, unless they are allowed."""
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    changes = _git(root, "status", "--porcelain", "--", ".", f":(exclude){LEFT_OUT}").decode().splitlines()
    if changes and not allow_dirty:
        raise ValueError(
            f"working tree: got {len(changes)} uncommitted changes, such as {changes[0][3:]}; accepted is a clean "
            "one: commit or stash them, or give --allow-dirty, which marks the results and leaves untracked files out"
        )
    return Manifest(commit, bool(changes))


def build(
    root: Path, folder: Path, *, slug: str, username: str, parameters: dict[str, object], allow_dirty: bool = False
) -> Built:
    """Build the kernel username/slug of the checkout at root into a folder, which is made.

    parameters replace defaults of driver.ipynb. Raises ValueError, which says what to do, for a dirty tree, a bad slug
    or parameter, a notebook without a kernelspec, and one that is too large.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) or not 5 <= len(slug) <= 50:
        raise ValueError(
            f"slug: got {slug!r}, accepted are 5 to 50 of a-z, 0-9 and single hyphens between them: Kaggle makes its "
            "own of the title, and another one puts the kernel elsewhere"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", username, re.ASCII):
        raise ValueError(f"username: got {username!r}, accepted is the name in the address of your Kaggle profile")
    made_of = manifest(root, allow_dirty)
    files = _files(root, made_of)
    archive = _zip(files, made_of)
    sha256 = hashlib.sha256(archive).hexdigest()
    notebook = nbformat.reads(files["kaggle/driver.ipynb"].decode(), as_version=4)
    if not notebook.metadata.get("kernelspec", {}).get("name"):
        raise ValueError("kaggle/driver.ipynb: has no metadata.kernelspec, which Kaggle needs; restore it from git")
    settings = _set_parameters(notebook, parameters, files)
    encoded = base64.encodebytes(archive).decode()
    _assign(_cell(notebook, "payload"), {"payload": f'"""\n{encoded}"""', "payload_sha256": json.dumps(sha256)})
    nbformat.validate(notebook)
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > LIMIT_BYTES:
        largest = ", ".join(sorted(files, key=lambda name: -len(files[name]))[:3])
        raise ValueError(
            f"notebook: got {len(text.encode()):,} bytes, accepted are {LIMIT_BYTES:,}: make the project smaller; its "
            f"largest files are {largest}"
        )
    metadata = json.loads(files["kaggle/kernel-metadata.json"])
    metadata |= {"id": f"{username}/{slug}", "title": slug.replace("-", " "), "code_file": f"{slug}.ipynb"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / metadata["code_file"]
    path.write_text(text, encoding="utf-8", newline="\n")
    (folder / "kernel-metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return Built(folder, path, made_of, sha256, len(text.encode()), plan.estimate(settings))


def _git(root: Path, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise ValueError("git: not found on the PATH: install it, since a payload is made of a commit") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise ValueError(f"git {arguments[0]}: {said}; a payload is made of a git checkout with a commit") from None


def _files(root: Path, made_of: Manifest) -> dict[str, bytes]:
    """The files of the commit, or of a dirty tree those that git tracks, by name."""
    if made_of.dirty:
        names = _git(root, "ls-files", "-z").decode().split("\0")
        files = {
            name: (root / name).read_bytes()
            for name in names
            if (root / name).is_file() and not (root / name).is_symlink()
        }
    else:
        with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "--format=tar", made_of.commit))) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
    if secret := next((name for name in files if Path(name).name in CREDENTIALS), ""):
        raise ValueError(
            f"{secret}: has the name of a file of credentials, which must not be pushed: git rm --cached it"
        )
    return {name: files[name] for name in sorted(files) if not name.startswith(f"{LEFT_OUT}/")}


def _zip(files: dict[str, bytes], made_of: Manifest) -> bytes:
    """The same files make the same bytes: no time, owner or mode of this machine enters."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in (files | {"MANIFEST.json": json.dumps(asdict(made_of)).encode()}).items():
            entry = zipfile.ZipInfo(name)  # of 1 January 1980
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()


def _set_parameters(
    notebook: nbformat.NotebookNode, parameters: dict[str, object], files: dict[str, bytes]
) -> plan.Settings:
    """Put the parameters into their cell. Raises ValueError for one that the driver or a notebook would refuse."""
    cell = _cell(notebook, "parameters")
    defaults = _defaults(cell)
    folder = "notebooks/"
    there = {name: files[name] for name in files if name.startswith(folder) and name.endswith(".ipynb")}
    settings = plan.Settings.of(defaults | parameters, [Path(name).stem for name in there])
    try:
        exact = json.loads(json.dumps(parameters)) == parameters
    except TypeError:
        exact = False
    if not exact:
        raise ValueError(f"parameters: got {parameters}, accepted is what JSON can hold, such as lists and no tuples")
    for name, told in settings.notebook_parameters.items():
        source = nbformat.reads(there[f"{folder}{name}.ipynb"].decode(), as_version=4)
        known = _defaults(_cell(source, "parameters"))
        del known["output_dir"]  # run_notebooks.py sets it
        for unknown in {*told} - {*known}:
            raise ValueError(f"notebook_parameters: got {unknown!r} for {name}, accepted are {', '.join(known)}")
        for parameter, value in told.items():
            default = known[parameter]
            if not _like(value, default):
                raise ValueError(
                    f"notebook_parameters: got {value!r} for {name}'s {parameter}, accepted is one like {default!r}"
                )
        if name not in settings.notebooks:
            raise ValueError(f"notebook_parameters: got some for {name}, which is not among the notebooks to be run")
    _assign(cell, {name: repr(value) for name, value in parameters.items()})
    return settings


def _like(value: object, default: object) -> bool:
    """Whether a value's type is one that a notebook takes where it has this default."""
    if isinstance(value, list) and isinstance(default, list) and default:
        return {type(x) for x in value} <= {type(x) for x in default}
    kinds = (int, float) if type(default) in (int, float) else (type(default), type(None))
    return default is None or type(value) in kinds


def _cell(notebook: nbformat.NotebookNode, tag: str) -> nbformat.NotebookNode:
    """The cell with a tag."""
    for cell in notebook.cells:
        if tag in cell.metadata.get("tags", []):
            return cell
    raise ValueError(f"notebook: has no cell tagged `{tag}`; restore it from git")


def _defaults(cell: nbformat.NotebookNode) -> dict[str, object]:
    """What a cell of parameters gives to names, expressions among it."""
    names: dict[str, object] = {}
    exec(cell.source, {}, names)
    return names


def _assign(cell: nbformat.NotebookNode, values: dict[str, str]) -> None:
    """Give the names other values, as Python has them; comments stay."""
    lines = cell.source.splitlines()
    body = ast.parse(cell.source).body
    found = {node.targets[0].id: node.value for node in body if isinstance(node, ast.Assign)}
    for name, value in values.items():
        at = found[name]
        line = lines[at.lineno - 1].encode()
        lines[at.lineno - 1] = (line[: at.col_offset] + value.encode() + line[at.end_col_offset :]).decode()
    cell.source = "\n".join(lines)

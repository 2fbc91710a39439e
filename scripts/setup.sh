#!/usr/bin/env bash
# Makes the environment that every command here runs in, and prints the path of its interpreter, alone, on
# stdout; progress goes to stderr. Quick where nothing has changed.
#
#   scripts/setup.sh                  .conda/ where there is conda, mamba or micromamba, else .venv/
#   scripts/setup.sh --venv PYTHON    .venv/ made by that interpreter, conda or not
#   FLASHATTN_PYTHON=PYTHON           that interpreter as it is: nothing is made or installed
set -euo pipefail
exec </dev/null # nothing below may wait for an answer
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$@"
    exit 1
}

absolute() { # the path of a command, or of a file named from the caller's folder
    local path
    path="$(command -v "$1")" || return 1
    case "$path" in
        /*) echo "$path" ;;
        *) echo "$PWD/$path" ;;
    esac
}
# Asked by running it: pyenv leaves launchers on PATH for versions that it then refuses to start.
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

as_asked() { [[ -z "$base" || "$(version "$python")" == "$(version "$base")" ]]; }

find_conda() {
    local name
    for name in conda mamba micromamba; do
        if absolute "$name"; then return; fi
    done
}

find_python() {
    local name
    for name in python3.12 python3.11 python3.13 python3; do
        if supported "$name"; then
            absolute "$name"
            return
        fi
    done
    fail "no conda, mamba or micromamba and no Python 3.11 to 3.13 on PATH: install one of them, or name an" \
        "interpreter with scripts/setup.sh --venv PYTHON or FLASHATTN_PYTHON=PYTHON"
}

make_conda() { # anew at each change: the three create alike, but each updates in its own way
    say "making .conda/ from environment.yml with $conda; this takes minutes"
    rm -rf .conda
    CONDA_ALWAYS_YES=true MAMBA_ALWAYS_YES=true \
        "$conda" env create --prefix "$root/.conda" --file "$root/environment.yml" >&2
}

venv_serves() { # whether .venv/ can stay: a venv works only in the folder it was made in
    supported "$python" && "$python" -m pip --version >/dev/null 2>&1 &&
        [[ ! -f "$stamp" || "$(cat "$stamp")" == "$root "* ]] && as_asked
}

make_venv() {
    [[ ! -L .venv ]] || fail ".venv is a link, and what it points to would be emptied: remove it or set FLASHATTN_PYTHON"
    if ! venv_serves; then
        if [[ -z "$base" ]]; then base="$(find_python)"; fi
        say "making .venv/ with Python $(version "$base")"
        "$base" -m venv --clear .venv >&2
    fi
    say "installing the pins of environment.yml into .venv/; the first time this takes minutes"
    sed -n 's/^      - //p' environment.yml >.venv/requirements.txt
    "$python" -m pip install --no-input --disable-pip-version-check -r .venv/requirements.txt >&2
}

up_to_date() {
    [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]] && supported "$python" && as_asked
}

if [[ -n "${FLASHATTN_PYTHON:-}" ]]; then
    (($# == 0)) || fail "FLASHATTN_PYTHON is set, so nothing is made: unset it for $*"
    absolute "$FLASHATTN_PYTHON" || fail "FLASHATTN_PYTHON: no interpreter to run at $FLASHATTN_PYTHON"
    exit
fi

base="" # the interpreter asked for, if any
conda=""
case "$#:${1:-}" in
    0:) conda="$(find_conda)" ;;
    2:--venv)
        base="$(absolute "$2" || true)"
        supported "$base" || fail "--venv: $2 is not a Python 3.11 to 3.13 that runs"
        ;;
    *) fail "cannot read the arguments: $*; accepted: none, or --venv PYTHON" ;;
esac

cd "$root"
environment="$([[ -n "$conda" ]] && echo .conda || echo .venv)"
python="$root/$environment/bin/python"
stamp="$environment/flashattn-stamp"
wanted="$root $(cat environment.yml pyproject.toml | cksum)"

if ! up_to_date; then
    if [[ -n "$conda" ]]; then make_conda; else make_venv; fi
    echo "$wanted" >"$stamp"
    say "$environment/ is ready"
fi
echo "$python"

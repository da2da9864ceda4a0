#!/bin/sh
# `make setup`: everything a fresh Debian 12/13 or Ubuntu 24.04 machine lacks. Safe to run again: does only what is missing.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=.venv

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v apt-get >/dev/null || die "this script knows apt only; on other systems install the packages of tools/packages.txt by hand, then run it with AENV_SKIP_APT=1"

if [ -z "${AENV_SKIP_APT:-}" ]; then
    missing=""
    for package in $(sed 's/#.*//' tools/packages.txt); do
        dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        as_root=""
        if [ "$(id -u)" != 0 ]; then
            command -v sudo >/dev/null || die "not root and no sudo; as root run: apt-get install$missing"
            as_root=sudo
        fi
        say "installing distribution packages:$missing"
        # shellcheck disable=SC2086
        $as_root apt-get -q update >/dev/null
        # shellcheck disable=SC2086
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install $missing |
            sed -n 's/^\(Setting up [^ ]*\).*/    \1/p' >&2
        for package in $missing; do
            dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || die "could not install $package"
        done
    fi
fi

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    die "$PYTHON is $("$PYTHON" --version 2>&1); Python 3.11 to 3.13 is needed (make setup PYTHON=python3.12)"
if [ ! -x $VENV/bin/python ]; then
    say "making the virtual environment $VENV"
    "$PYTHON" -m venv $VENV
fi

wanted=$(cat pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat $VENV/.aenv-dependencies 2>/dev/null || true)" != "$wanted" ]; then
    say "installing Python packages"
    $VENV/bin/python -m pip install -q --upgrade pip "setuptools>=75" "Cython>=3.1,<4" "cffi>=1.17"
    say "building the compiled parts"
    $VENV/bin/python -m pip install -q --no-build-isolation -e '.[dev]'
    echo "$wanted" > $VENV/.aenv-dependencies
else
    log=$(mktemp)
    $VENV/bin/python setup.py -q build_ext --inplace >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; die "the build failed"; }
    rm -f "$log"
fi
say "ready: $VENV/bin/aenv ($($VENV/bin/python --version))"

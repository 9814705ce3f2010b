#!/bin/sh
# Sets up .venv and what the sandbox needs, with `test` also the Slurm that the tests run; safe to run again.
# Called by the Makefile from the repository's root.
# As root on Debian it installs missing system packages itself; anybody else is told what is missing and how to get it.
set -eu

say() { printf 'rollmill set-up: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

python=""
for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
done

packages=""
[ -n "$python" ] || packages="python3"
command -v bwrap >/dev/null 2>&1 || packages="$packages bubblewrap"
command -v unshare >/dev/null 2>&1 || packages="$packages util-linux"
if ! command -v uv >/dev/null 2>&1 && [ ! -x .venv/bin/uv ]; then
    # uv comes from the package index by pip, into the environment itself: that needs the standard venv module.
    [ -n "$python" ] && "$python" -c 'import ensurepip, venv' 2>/dev/null || packages="$packages python3-venv"
fi
# need PROGRAM PACKAGE: daemons are not on an ordinary user's PATH.
need() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1 || packages="$packages $2"; }
if [ "${1:-}" = test ]; then
    need munged munge; need slurmctld slurmctld; need slurmd slurmd; need srun slurm-client
    need slurmdbd "slurmdbd slurm-wlm-mysql-plugin"; need mariadbd "mariadb-server-core mariadb-client-core"
    [ "$(id -u)" != 0 ] || need useradd passwd
fi
if [ -n "$packages" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing$packages"
        apt-get update -qq
        # shellcheck disable=SC2086 # one word a package
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    else
        fail "missing:$packages; as root: apt-get install -y --no-install-recommends$packages"
    fi
    [ -n "$python" ] || python=python3
fi
if [ "${1:-}" = test ]; then sh launch/apptainer.sh; fi

stamp=.venv/.rollmill-lock
if [ -x .venv/bin/python ] && cmp -s requirements.lock "$stamp"; then exit 0; fi

if command -v uv >/dev/null 2>&1; then
    uv=uv
    [ -x .venv/bin/python ] || uv venv -q --python "$(command -v "$python")" .venv
else
    uv=.venv/bin/uv
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    [ -x "$uv" ] || .venv/bin/python -m pip install -q uv
fi
say "installing the locked packages into .venv"
"$uv" pip install -q --python .venv/bin/python --require-hashes -r requirements.lock
"$uv" pip install -q --python .venv/bin/python --no-deps --editable .
cp requirements.lock "$stamp"

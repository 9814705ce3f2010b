#!/bin/sh
# Sets up .venv-vllm, an environment of its own for a CPU build of vLLM; safe to run again. Called from the repository's root.
# On a cluster with GPUs vLLM is there already, or installed by its own instructions: name its interpreter by fleet.python.
set -eu

fail() { printf 'rollmill set-up: %s\n' "$*" >&2; exit 1; }

lock=tests/vllm/requirements.lock
stamp=.venv-vllm/.rollmill-lock
if [ -x .venv-vllm/bin/python ] && cmp -s "$lock" "$stamp"; then exit 0; fi

python=""
for candidate in "${PYTHON:-}" .venv/bin/python python3.11 python3.12 python3.13 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "vLLM needs Python >= 3.11 with the venv module; as root: apt-get install -y python3-venv"
[ -x .venv-vllm/bin/python ] || "$python" -m venv .venv-vllm
printf 'rollmill set-up: installing vLLM into .venv-vllm (2.3 GB)\n' >&2
.venv-vllm/bin/python -m pip install -q --no-deps -r "$lock" 2>.venv-vllm/install.log || {
    grep -v '^WARNING' .venv-vllm/install.log | tail -n 3 >&2
    fail "vLLM could not be installed: .venv-vllm/install.log; torch's CPU wheel is not on the package index itself: \
give PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL a place that has it"
}
cp "$lock" "$stamp"

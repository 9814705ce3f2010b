#!/bin/sh
# Installs Apptainer where it is missing: for tests, and for machines that are no cluster. Safe to run again.
# Debian 12 has no package of it. There Debian's own from a later suite is taken, checked by apt against the signed index,
# its few imports of a newer glibc are led back to this one's (launch/older_libc.py, which refuses what it cannot carry),
# and apt resolves its other dependencies from this machine's own suite. Nothing of the later suite stays configured.
# APPTAINER_DEB=FILE installs that package instead; APPTAINER_SUITE names the suite (sid).
set -eu

say() { printf 'rollmill set-up: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

here=$(cd "$(dirname "$0")" && pwd)
if command -v apptainer >/dev/null 2>&1; then exit 0; fi
[ "$(id -u)" = 0 ] || fail "missing: apptainer; as root: sh launch/apptainer.sh"
command -v apt-get >/dev/null 2>&1 || fail "missing: apptainer; install it by this system's own means"

export DEBIAN_FRONTEND=noninteractive
install() { apt-get -o DPkg::Lock::Timeout=900 install -y -qq --no-install-recommends "$@" >/dev/null; }

say "installing apptainer"
apt-get -o DPkg::Lock::Timeout=900 update -qq
if [ -n "${APPTAINER_DEB:-}" ]; then
    install "$(readlink -f "$APPTAINER_DEB")"
    exit 0
fi
if apt-cache show apptainer >/dev/null 2>&1; then
    install apptainer
    exit 0
fi

suite=${APPTAINER_SUITE:-sid}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' | head -1)
[ -n "$mirror" ] || fail "apt knows no Debian mirror: run apt-get update, or give APPTAINER_DEB=FILE"
mkdir -p "$work/etc/preferences.d" "$work/state/lists/partial" "$work/cache/archives/partial"
: >"$work/state/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/etc/sources.list"
later() { # apt with a state of its own; a mirror that is a snapshot has an index that is out of date, but signed
    apt-get -qq -o Dir::Etc="$work/etc" -o Dir::Etc::sourcelist="$work/etc/sources.list" \
        -o Dir::Etc::sourceparts=/dev/null -o Dir::State="$work/state" -o Dir::State::status="$work/state/status" \
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Check-Valid-Until=false "$@"
}
later update
(cd "$work" && later download apptainer) || fail "$suite at $mirror has no apptainer: give APPTAINER_DEB=FILE"
dpkg-deb -R "$work"/apptainer_*.deb "$work/tree"

python=python3
command -v "$python" >/dev/null 2>&1 || install python3-minimal
"$python" "$here/older_libc.py" "$work/tree" >&2 \
    || fail "this apptainer cannot be carried to this system: give APPTAINER_DEB=FILE"

libc=$(dpkg-query -W -f '${Version}' libc6 | sed 's/-.*//')
sed -i -e "s/libc6 (>= [0-9.]*)/libc6 (>= $libc)/" -e 's/^Version: .*/&~rollmill/' "$work/tree/DEBIAN/control"
(cd "$work/tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | xargs -0 md5sum >DEBIAN/md5sums)
dpkg-deb --root-owner-group -Zgzip -z1 -b "$work/tree" "$work/apptainer.deb" >/dev/null
install "$work/apptainer.deb"
apptainer --version >&2

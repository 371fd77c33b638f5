#!/usr/bin/env bash
# Says in one sentence what this machine lacks for `make setup`, before anything is downloaded.
# Reads PYTHON (the interpreter to make the environment with) and VENV (where the environment lies or will lie).
set -u

fail() {
  echo "setup: $*" >&2
  exit 1
}

python="${PYTHON:-python3.11}"
venv="${VENV:-.venv}"

is_311='import sys; sys.exit(sys.version_info[:2] != (3, 11))'
headers='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'

[ "$(uname -s)-$(uname -m)" = "Linux-x86_64" ] ||
  fail "the pinned environment is for Linux on x86_64 and this is $(uname -s) on $(uname -m): use a Linux x86_64 machine or container."
"$python" -c "$is_311" >/dev/null 2>&1 ||
  fail "Python 3.11 is missing ('$python' does not run it): install it (Debian 12: apt-get install python3.11 python3.11-venv python3.11-dev) or name it: make PYTHON=/path/to/python3.11 ..."
"$python" -c "import venv, ensurepip" >/dev/null 2>&1 ||
  fail "'$python' cannot make virtual environments: install its venv module (Debian: apt-get install python3.11-venv)."
{ command -v cc && echo 'int main(void) { return 0; }' | cc -x c - -o /dev/null; } >/dev/null 2>&1 ||
  fail "a C compiler is missing ('cc' does not compile): install one (Debian: apt-get install gcc libc6-dev), because a few pinned packages come as source."
"$python" -c "$headers" >/dev/null 2>&1 ||
  fail "the C headers of '$python' (Python.h) are missing: install them (Debian: apt-get install python3.11-dev)."
if [ -x "$venv/bin/python" ]; then
  "$venv/bin/python" -c "$is_311" >/dev/null 2>&1 ||
    fail "$venv was made with another Python than 3.11: remove it (rm -r $venv) and run make again."
fi
free_mb="$(df -Pm . | awk 'NR == 2 {print $4}')"
[ -d "$venv" ] || [ "$free_mb" -ge 6000 ] ||
  fail "the environment takes about 4.5 GB and only $free_mb MB are free here: make room for 6000 MB."

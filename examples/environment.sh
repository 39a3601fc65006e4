# shellcheck shell=bash
# Sourced by quickstart.sh and tests/run.sh: the project's Python environment, made when it is missing.
#
#   source examples/environment.sh; use_environment        # to train
#   source examples/environment.sh; use_environment test   # with pytest and ruff
#
# PYTHON   a Python >= 3.12 to build on; default: the first one found on PATH or among pyenv's versions
# VENV     where the environment is, default .venv
# VENV_OPTIONS, PIP_OPTIONS   extra words for `python -m venv` and `pip install`

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Prints the base interpreter behind a candidate if it runs, is new enough and can make environments.
usable_python() {
  "$1" -c '
import sys
if sys.version_info < (3, 12): sys.exit(1)
import ensurepip, venv
print(sys._base_executable)' 2>/dev/null
}

find_python() {
  local candidate found
  if [ -n "${PYTHON:-}" ]; then
    usable_python "$PYTHON" && return
    echo "PYTHON=$PYTHON is not a working Python >= 3.12 with venv: point it at one, or unset it." >&2
    return 1
  fi
  for candidate in python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12,13,14}*/bin/python; do
    command -v "$candidate" >/dev/null || continue
    # A name that exists may still be a shim without a Python behind it: only one that runs counts.
    if found="$(usable_python "$candidate")"; then
      echo "$found"
      return
    fi
  done
  echo "No Python >= 3.12 with venv found on PATH or among pyenv's versions: install one (on Debian and Ubuntu" \
    "also its python3-venv package), or set PYTHON to its path." >&2
  return 1
}

# What the environment was made from; another answer means that it is stale.
environment_stamp() {
  cat "$REPOSITORY/setup.py" "$REPOSITORY/pyproject.toml" | cksum
}

# use_environment [EXTRA]: make or update $VENV and put it first on PATH.
# shellcheck disable=SC2120
use_environment() {
  local extra="${1:-}" python stamp lock
  VENV="$(realpath -m "${VENV:-$REPOSITORY/.venv}")"
  if command -v flock >/dev/null; then # two scripts started at once install once
    exec {lock}<"$REPOSITORY"
    flock "$lock"
  fi
  stamp="$(environment_stamp)"
  if [ "$(cat "$VENV/.installed-${extra:-base}" 2>/dev/null)" != "$stamp" ] ||
    ! "$VENV/bin/python" -c '' 2>/dev/null; then
    # One of ours that was left half-made, or moved here from elsewhere, starts over.
    if [ -e "$VENV/.made-for" ] && { [ -e "$VENV/.installing" ] || [ "$(<"$VENV/.made-for")" != "$REPOSITORY" ]; }; then
      rm -rf "$VENV"
    fi
    if ! "$VENV/bin/python" -c '' 2>/dev/null; then
      python="$(find_python)" || return 1
      echo "Making $VENV with $python"
      mkdir -p "$VENV"
      echo "$REPOSITORY" >"$VENV/.made-for"
      touch "$VENV/.installing"
      # shellcheck disable=SC2086
      "$python" -m venv ${VENV_OPTIONS:-} "$VENV" || return 1
    fi
    rm -f "$VENV"/.installed-*
    [ ! -e "$VENV/.made-for" ] || touch "$VENV/.installing"
    echo "Installing megatron_dllm${extra:+[$extra]} (PyTorch alone is some GB: this takes minutes, once)"
    # shellcheck disable=SC2086
    "$VENV/bin/python" -m pip install -q ${PIP_OPTIONS:-} -e "$REPOSITORY${extra:+[$extra]}" || return 1
    echo "$stamp" >"$VENV/.installed-base"
    [ -z "$extra" ] || echo "$stamp" >"$VENV/.installed-$extra"
    rm -f "$VENV/.installing"
  fi
  [ -z "${lock:-}" ] || exec {lock}<&-
  export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
}

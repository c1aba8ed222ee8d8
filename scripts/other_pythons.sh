#!/usr/bin/env bash
# The sdist on every other Python that it is for and that this machine has: built, installed without extras, run.
#
#   scripts/other_pythons.sh SDIST PYTHON        PYTHON is the one that has been tried already
set -euo pipefail
sdist=$(realpath "$1")
tried=$("$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

# An interpreter with its headers; a version manager may have it without having it on the path.
find_python() {
    local candidates=("$(command -v "python$1" || true)")
    if command -v pyenv > /dev/null; then
        candidates+=("$(pyenv prefix "$(pyenv latest "$1" 2> /dev/null)" 2> /dev/null || true)/bin/python$1")
    fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import ensurepip, pathlib, sysconfig
assert pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()' > /dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
}

for version in 3.11 3.12 3.13; do
    [[ $version != "$tried" ]] || continue
    python=$(find_python "$version")
    if [[ -z $python ]]; then
        echo "not tried: there is no Python $version here"
        continue
    fi
    "$python" -m pip wheel -q --no-deps --wheel-dir "$wheels/$version" "$sdist"
    echo "Python $version:"
    "$(dirname "$0")/try_wheel.sh" "$wheels/$version"/*.whl "$python"
done

#!/usr/bin/env bash
# Does what a newcomer does with a wheel: installs it without extras into an empty environment, imports it, runs it.
#
#   scripts/try_wheel.sh WHEEL [PYTHON]
set -euo pipefail
wheel=$(realpath "$1")
python=$(command -v "${2:-python3}")
[[ $python == /* ]] || python=$PWD/$python
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
"$python" -m venv environment
environment/bin/python -m pip install -q "$wheel"
environment/bin/segue --version
environment/bin/python -c 'import segue; segue.LLM; segue.AsyncLLM; segue.EngineArgs(model="smollm2")'
environment/bin/segue pull smollm2 > /dev/null
answer=$(environment/bin/segue run smollm2 "What is the capital of France?" --max-tokens 8 2> errors) || {
    cat errors
    exit 1
}
test -n "$answer" || { echo "segue run said nothing"; exit 1; }
# What needs an extra says which, in one line.
if environment/bin/segue serve smollm2 > output 2>&1; then
    echo "segue serve ran without the packages of the server"
    exit 1
fi
grep -q "segue\[server\]" output || { cat output; exit 1; }
test "$(wc -l < output)" -eq 1 || { cat output; exit 1; }
du -sh environment | sed 's/environment/with all it needs/'
echo "the wheel works: $answer"

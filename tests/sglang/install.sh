#!/usr/bin/env bash
# Makes an environment with the real SGLang for CPUs, and prints its interpreter's path.
# It lies outside the checkout, under a name made from everything that goes into it, and is reused once complete.
# Usage: install.sh UV [PYTHON]
set -euo pipefail
uv=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)

contents() {
  "$python" --version
  cd "$here"
  find sglang-cpu-requirements.txt stand-ins -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cat
}
hash=$(contents | sha256sum | cut -c1-16)
environment=${POLYRL_CACHE:-$HOME/.cache/polyrl}/sglang-$hash

if [ ! -e "$environment/complete" ]; then
  # Two at once would each take away what the other has made.
  mkdir -p "${environment%/*}"
  exec 9>"$environment.lock"
  flock -w 1800 9
fi
if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  echo "installing SGLang for CPUs into $environment (5.5 GB, about a minute)" >&2
  "$uv" venv -q --python "$python" "$environment" >&2
  # Bytecode is compiled here because otherwise the first start would do it, and take 100 s instead of 20.
  "$uv" pip install -q --python "$environment/bin/python" --no-deps --compile-bytecode \
    -r "$here/sglang-cpu-requirements.txt" >&2
  cp -r "$here"/stand-ins/* "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  touch "$environment/complete"
fi
echo "$environment/bin/python"

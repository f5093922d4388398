#!/usr/bin/env bash
# Makes an environment with TRL, on the same torch and transformers as PolyRL's, and prints its interpreter's path.
# It lies outside the checkout, under a name made from everything that goes into it, and is reused once complete.
# Usage: install_trl.sh UV [PYTHON]
set -euo pipefail
uv=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
hash=$({ "$python" --version; cat "$here/trl-requirements.txt" "$root/constraints.txt"; } | sha256sum | cut -c1-16)
environment=${POLYRL_CACHE:-$HOME/.cache/polyrl}/trl-$hash

if [ ! -e "$environment/complete" ]; then
  rm -rf "$environment"
  echo "installing TRL into $environment" >&2
  "$uv" venv -q --python "$python" "$environment" >&2
  # Bytecode is compiled here because otherwise the first start would do it.
  # shellcheck disable=SC2046 # one option, or none
  "$uv" pip install -q --compile-bytecode --python "$environment/bin/python" $("$root/make/torch-backend" "$uv" "$python") \
    -c "$root/constraints.txt" -r "$here/trl-requirements.txt" >&2
  touch "$environment/complete"
fi
echo "$environment/bin/python"

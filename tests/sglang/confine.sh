#!/usr/bin/env bash
# Runs a command in a network namespace in which only the loopback interface exists: on any other host SGLang's internal
# rendezvous would listen on all interfaces. POLYRL_ALLOW_UNCONFINED=1 runs it without, where namespaces are forbidden.
set -euo pipefail
unshare=(unshare -n)
[ "$(id -u)" -eq 0 ] || unshare=(unshare -rn)
if "${unshare[@]}" ip link set lo up 2>/dev/null; then
  exec "${unshare[@]}" bash -c 'ip link set lo up && exec "$@"' confine "$@"
fi
if [ "${POLYRL_ALLOW_UNCONFINED:-}" = 1 ]; then
  echo "warning: no network namespace here; SGLang listens on all interfaces while this runs" >&2
  exec "$@"
fi
echo "cannot make a network namespace (${unshare[*]}); set POLYRL_ALLOW_UNCONFINED=1 to run SGLang without one" >&2
exit 1

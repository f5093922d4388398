#!/usr/bin/env bash
# Prints a folder with etcd, kube-apiserver and kubectl, as KUBEBUILDER_ASSETS names one: taken from the control plane of a
# kind cluster that runs here, once per version, or in an earlier call.
set -euo pipefail
cache=${POLYRL_CACHE:-$HOME/.cache/polyrl}

# The control plane's programs lie in images of their own; where they run, /proc shows them.
running() { docker exec "$1" sh -c "cat /proc/\$(pidof $2)/exe"; }

fetch() {
  local node=$1 half=$2
  echo "taking etcd, kube-apiserver and kubectl from the node $node" >&2
  running "$node" etcd >"$half/etcd" && running "$node" kube-apiserver >"$half/kube-apiserver" &&
    docker exec "$node" cat /usr/bin/kubectl >"$half/kubectl" && chmod 755 "$half" "$half"/* &&
    "$half/etcd" --version >&2 && "$half/kube-apiserver" --version >&2
}

node=$(docker ps -q --filter label=io.x-k8s.kind.role=control-plane 2>/dev/null | head -n 1) || true
if [ -n "$node" ] && version=$(docker exec "$node" cat /kind/version 2>/dev/null); then
  folder=$cache/api-server-$version
  if [ ! -d "$folder" ]; then
    mkdir -p "$cache"
    half=$(mktemp -d "$cache/half.XXXXXX")
    trap 'rm -rf "$half"' EXIT
    # Whole or not at all; another call may have been quicker.
    if fetch "$node" "$half"; then mv -T "$half" "$folder" 2>/dev/null || true; fi
  fi
fi
folder=$(find "$cache" -maxdepth 1 -name 'api-server-*' 2>/dev/null | sort -V | tail -n 1) || true
if [ -z "$folder" ]; then
  echo "there is no API server to test on: name a folder with etcd, kube-apiserver and kubectl in KUBEBUILDER_ASSETS," \
    "or make a kind cluster that they can be taken from (make cluster-up)" >&2
  exit 1
fi
echo "$folder"

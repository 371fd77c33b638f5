#!/usr/bin/env bash
# Ray on several hosts; the first one is the head. See docs/cluster.md.
#
#   scripts/ray_hosts.sh start HOST...    # then, on the first host: python examples/grpo.py ray.address=auto
#   scripts/ray_hosts.sh stop HOST...
#
# Every host has this folder at the same path (a shared file system, or copies) with its .venv. Settings, from the
# environment:
#   ON        how a command is run on a host; default ssh
#   PORT      of the head; default 6379
#   RAY       path of the command; default .venv/bin/ray of this folder
#   HEAD_ARGS, NODE_ARGS   more arguments for `ray start`, such as --num-cpus=8
#   FORWARD   names of variables that the hosts' processes get too; default those of Hugging Face, NCCL and gloo
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
ON=${ON:-ssh} PORT=${PORT:-6379} RAY=$(printf %q "${RAY:-$here/.venv/bin/ray}") HEAD_ARGS=${HEAD_ARGS:-} NODE_ARGS=${NODE_ARGS:-}
FORWARD=${FORWARD:-PYTHONPATH HF_HOME HF_HUB_OFFLINE NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME}

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
action=$1; shift

# Without a token whoever reaches a port of Ray's can run code on every host.
given="RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token"
for name in $FORWARD; do
  if [ -n "${!name:-}" ]; then given+=" $name=$(printf %q "${!name}")"; fi
done
# The head asks every node each second. After three silences of a second and a half a node is lost: less than 10 s, where
# Ray's own settings take a minute.
checks="RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=1500 RAY_health_check_failure_threshold=3"

on() { $ON "$1" "cd $(printf %q "$here") && $2"; }
address_of() { on "$1" "hostname -I 2>/dev/null | cut -d' ' -f1" </dev/null | tail -1; }

case $action in
start)
  # What other hosts reach it by: its first address, or the name that it was given by.
  address=$(address_of "$1")
  address=${address:-$1}
  token=$(on "$1" "$RAY get-auth-token --generate" </dev/null | tail -1)
  on "$1" "env $given $checks $RAY start --head --node-ip-address=$address --port=$PORT $HEAD_ARGS" </dev/null >&2
  shift
  for host in "$@"; do
    printf %s "$token" | on "$host" "umask 077 && mkdir -p ~/.ray && cat >~/.ray/auth_token"
    own=$(address_of "$host")
    on "$host" "env $given $RAY start --address=$address:$PORT --node-ip-address=${own:-$host} $NODE_ARGS" </dev/null >&2
  done
  echo "Run the driver on the first host with RAY_AUTH_MODE=token and ray.address=$address:$PORT"
  ;;
stop)
  for host in "$@"; do on "$host" "$RAY stop --force" </dev/null >&2 || true; done
  ;;
*) usage ;;
esac

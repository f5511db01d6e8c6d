#!/bin/sh
# Compile the pipeline, start a run with the kfp command, and exit with the run's true end: 0 when it succeeds, else 1.
# (`kfp run create --watch` exits 0 on a run that failed.)
#
# KFP_ENDPOINT        address of the Kubeflow Pipelines API
# KFP_NAMESPACE       namespace, where Kubeflow has several users
# KFP_EXISTING_TOKEN  bearer token, from the CI system's secrets; in the environment, where no process list shows it
# EXPERIMENT, RUN_NAME, POLL_SECONDS, WAIT_SECONDS   optional
set -eu
: "${KFP_ENDPOINT:?set it to the address of the Kubeflow Pipelines API}"
experiment=${EXPERIMENT:-tuneline}
name=${RUN_NAME:-$experiment-$(date +%Y%m%d-%H%M%S)}
until=$(($(date +%s) + ${WAIT_SECONDS:-86400}))

tuneline compile -c customization.yaml -p platform.yaml -o pipeline.yaml
# What counts is whether there is a run: kfp also fails when the server does not answer to its look at the run it has just made.
kfp run create -e "$experiment" -r "$name" -f pipeline.yaml "$@" > created.txt 2>&1 || true
id=$(sed -n 's,^Run details: .*/runs/details/,,p' created.txt)
[ -n "$id" ] || { cat created.txt >&2; exit 1; }
sed -n 's,^Run details,run,p' created.txt

before=
while :; do
    # A server that does not answer for a moment ends neither the run nor this script.
    state=$(kfp --output json run get "$id" | python3 -c 'import json, sys; print(json.load(sys.stdin)["state"])') || state=unknown
    [ "$state" = "$before" ] || echo "$name: $state"
    before=$state
    case $state in
        SUCCEEDED) exit 0 ;;
        FAILED | SKIPPED | CANCELED) exit 1 ;;
    esac
    [ "$(date +%s)" -lt "$until" ] || { echo "no longer waiting for $name; it goes on" >&2; exit 75; }
    sleep "${POLL_SECONDS:-15}"
done

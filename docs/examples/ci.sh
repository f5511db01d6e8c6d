#!/bin/sh
# Compile the pipeline, start a run with the kfp command and wait for it. Exit with 0 if the run succeeds, 1 if not, 75 if it still runs after
# WAIT_SECONDS. (`kfp run create --watch` exits with 0 even if the run fails.)
#
# KFP_ENDPOINT        address of the Kubeflow Pipelines API
# KFP_NAMESPACE       namespace; required in multi-user Kubeflow
# KFP_EXISTING_TOKEN  bearer token, from the CI system's secrets; process lists show options, but not the environment
# EXPERIMENT, RUN_NAME, POLL_SECONDS, WAIT_SECONDS   optional
set -eu
: "${KFP_ENDPOINT:?set it to the address of the Kubeflow Pipelines API}"
experiment=${EXPERIMENT:-tuneline}
name=${RUN_NAME:-$experiment-$(date +%Y%m%d-%H%M%S)}
until=$(($(date +%s) + ${WAIT_SECONDS:-86400}))

tuneline compile -c customization.yaml -p platform.yaml -o pipeline.yaml
# kfp also fails if it creates the run but cannot read it afterwards, so check for the ID of a run instead of the exit code.
kfp run create -e "$experiment" -r "$name" -f pipeline.yaml "$@" > created.txt 2>&1 || true
id=$(sed -n 's,^Run details: .*/runs/details/,,p' created.txt)
[ -n "$id" ] || { cat created.txt >&2; exit 1; }
sed -n 's,^Run details,run,p' created.txt

before=
while :; do
    # If the server does not answer, try again: the run continues.
    state=$(kfp --output json run get "$id" | python3 -c 'import json, sys; print(json.load(sys.stdin)["state"])') || state=unknown
    [ "$state" = "$before" ] || echo "$name: $state"
    before=$state
    case $state in
        SUCCEEDED) exit 0 ;;
        FAILED | SKIPPED | CANCELED) exit 1 ;;
    esac
    [ "$(date +%s)" -lt "$until" ] || { echo "no longer waiting for $name; the run continues" >&2; exit 75; }
    sleep "${POLL_SECONDS:-15}"
done

#!/bin/sh
# Grant a user a permission on a registered model and on its history, a second registered model.
#   MLFLOW_TRACKING_URI=https://mlflow.example sh mlflow/grant.sh MODEL USER READ|USE|EDIT|MANAGE|DENY
# The administrator's name and password are in ~/.netrc, or in the file of NETRC.
set -eu
model=$1 user=$2 permission=$3
for name in "$model" "$model.history"; do
  body=$(printf '{"username": "%s", "resource_type": "registered_model", "resource_id": "%s", "permission": "%s"}' "$user" "$name" "$permission")
  curl -fsS --netrc-file "${NETRC:-$HOME/.netrc}" -H 'Content-Type: application/json' -d "$body" \
    "$MLFLOW_TRACKING_URI/api/3.0/mlflow/users/permissions/grant" > /dev/null
  echo "$user has $permission on $name"
done

#!/bin/sh
# Upgrade the database schema, then start the tracking server in this process.
#   MLFLOW_ENV=mlflow/server.env sh mlflow/serve.sh
# MLFLOW_FLASK_SERVER_SECRET_KEY and, at the first start, MLFLOW_AUTH_ADMIN_PASSWORD are read from the files of SECRET_KEY_FILE and ADMIN_PASSWORD_FILE.
set -eu
: "${MLFLOW_ENV:=/etc/mlflow/server.env}"
: "${SECRET_KEY_FILE:=/run/secrets/flask-secret-key}"
: "${ADMIN_PASSWORD_FILE:=/run/secrets/admin-password}"
set -a
# shellcheck disable=SC1090
. "$MLFLOW_ENV"
# shellcheck disable=SC2034
MLFLOW_FLASK_SERVER_SECRET_KEY=$(cat "$SECRET_KEY_FILE")
# shellcheck disable=SC2034
MLFLOW_AUTH_ADMIN_PASSWORD=$(cat "$ADMIN_PASSWORD_FILE")
set +a
mlflow db upgrade "$MLFLOW_BACKEND_STORE_URI"
exec mlflow server --app-name basic-auth --serve-artifacts

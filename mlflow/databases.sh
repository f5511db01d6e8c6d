# shellcheck shell=sh
# Sourced by backup.sh and restore.sh: the server's settings, the program that copies artifacts, the addresses of the two databases.
umask 077
tell() { printf '%s: %s\n' "${0##*/}" "$1" >&2; }
refuse() { tell "$1"; exit 1; }

: "${MLFLOW_ENV:=/etc/mlflow/server.env}" "${AUTH_INI:=/etc/mlflow/basic_auth.ini}"
set -a
# shellcheck disable=SC1090
. "$MLFLOW_ENV"
set +a
: "${SYNC:=aws s3 sync --only-show-errors ${MLFLOW_S3_ENDPOINT_URL:+--endpoint-url $MLFLOW_S3_ENDPOINT_URL}}"

# address NAME VALUE: print the address without the Python driver, which PostgreSQL's programs do not support.
address() {
    plain=$(printf '%s\n' "$2" | sed 's/^postgresql+[a-z0-9]*:/postgresql:/')
    without_password "$1" "$plain"
    case $plain in
    postgresql://*) printf '%s\n' "$plain" ;;
    *) refuse "$1 is not the address of a PostgreSQL database" ;;
    esac
}
without_password() { # the list of processes would show the password
    case $2 in
    *://*:*@* | *[?\&]password=*) refuse "$1 contains a password; store it in the file of PGPASSFILE, or S3 keys in AWS_SHARED_CREDENTIALS_FILE" ;;
    esac
}
without_password MLFLOW_ARTIFACTS_DESTINATION "$MLFLOW_ARTIFACTS_DESTINATION"
without_password MLFLOW_S3_ENDPOINT_URL "${MLFLOW_S3_ENDPOINT_URL:-}"
# shellcheck disable=SC2034
registry=$(address MLFLOW_BACKEND_STORE_URI "$MLFLOW_BACKEND_STORE_URI")
# shellcheck disable=SC2034
users=$(address "database_uri of $AUTH_INI" "$(sed -n 's/^database_uri[[:space:]]*[=:][[:space:]]*//p' "$AUTH_INI")")

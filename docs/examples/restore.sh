#!/bin/sh
# Bring a backup that backup.sh made back, as a work folder that is not there yet: where it was, or at another place.
#   sh restore.sh /backups/20261122T014300Z .tuneline
# MLflow's database names the folder of its artifacts by its whole path, so that is written anew; all else is found by digest.
set -eu
backup=$1
: "${PYTHON:=python3}" "${SYNC:=cp -Rp}"

tell() { printf 'restore.sh: %s\n' "$1" >&2; }

case $backup in *.part) tell "$backup is no whole backup: backup.sh was interrupted"; exit 1 ;; esac
[ -d "$backup" ] || { tell "there is no backup $backup"; exit 1; }
if [ -d "$2" ] && [ -n "$(ls -A "$2")" ]; then
    tell "$2 is not empty: move it away first"
    exit 1
fi
mkdir -p "$2"
workdir=$(cd "$2" && pwd)
part=$workdir.part
mkdir "$part"
# shellcheck disable=SC2086 - SYNC is a program and its options
$SYNC "$backup/." "$part/"
if [ -f "$part/mlflow.db" ]; then
    "$PYTHON" - "$part/mlflow.db" "$workdir" <<'END'
import pathlib, sqlite3, sys
ADDRESSES = ("experiments.artifact_location", "runs.artifact_uri", "logged_models.artifact_location", "model_versions.source", "model_versions.storage_location")
new = pathlib.Path(sys.argv[2], "mlflow-artifacts").as_uri()
with sqlite3.connect(sys.argv[1]) as database:
    old = database.execute("SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE 'file:%/mlflow-artifacts'")
    for (root,) in old.fetchall():
        for table, column in (address.split(".") for address in ADDRESSES):
            database.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                (new, len(root) + 1, root, len(root) + 1, root + "/"),
            )
END
fi
if [ -n "${TUNELINE_STORE:-}" ] && [ -d "$part/store" ]; then # beside what may be there: an artifact's folder is its digest
    mkdir -p "$TUNELINE_STORE"
    # shellcheck disable=SC2086
    $SYNC "$part/store/." "$TUNELINE_STORE/"
    rm -r "$part/store"
fi
rmdir "$workdir"
mv "$part" "$workdir" # there at once, or not at all
echo "$workdir"

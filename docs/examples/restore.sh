#!/bin/sh
# Restore a backup created by backup.sh into a workdir that is empty or does not exist yet, at the original path or another one.
#   sh restore.sh /backups/20261122T014300Z .tuneline
# MLflow's database contains the absolute path of its artifacts, which the script replaces; tuneline finds everything else by digest. In a clone of
# the data repository, every commit contains the old path of the DVC remote: before `dvc pull`, set the new one with `dvc remote modify --local`.
# The restored files belong to the user who restores them. With TUNELINE_STORE, missing artifacts are added to that store; this can be repeated.
set -eu
mask=$(umask)
umask 077
: "${PYTHON:=python3}" "${SYNC:=cp -Rp}"

tell() { printf 'restore.sh: %s\n' "$1" >&2; }
refuse() { tell "$1"; exit 1; }
path() { "$PYTHON" -IS -c "import os, sys; print(os.path.$1(sys.argv[1]))" "$2"; }
copy() { mkdir "$2" && $SYNC "$1/." "$2/"; } # cp and rsync treat a source in the same way only if it ends in "/."
# add_to_store STORE: add missing artifacts, each atomically and with the current time, so that gc keeps them; then the files that refer to them.
add_to_store() {
    umask "$mask" # other users may use the store
    own=$1/unfinished/restore.${backup##*/}
    rm -rf "$own" # left by a killed restore
    mkdir -p "$own"
    for one in "$backup"/store/*; do
        home=$1/${one##*/}
        if [ -f "$one/manifest.json" ] && [ ! -f "$home/manifest.json" ]; then
            copy "$one" "$own/new"
            touch "$own/new/manifest.json"
            [ ! -e "$home" ] || mv "$home" "$own/" # incomplete: it has no manifest
            mv "$own/new" "$home"
        fi
    done
    for one in "$backup"/store/*; do
        [ -f "$one/manifest.json" ] || (cd "$backup/store" && find "${one##*/}" -type f -exec sh -ec 'store=$1 own=$2; shift 2
            for note; do
                if [ ! -e "$store/$note" ]; then
                    mkdir -p "$store/${note%/*}"
                    cp -p "$note" "$own/note"
                    mv "$own/note" "$store/$note"
                fi
            done' sh "$1" "$own" {} +)
    done
    rm -rf "$own"
}

[ -d "$1" ] || refuse "the backup $1 does not exist"
backup=$(CDPATH='' cd -- "$1" && pwd)
case $backup in *.part) refuse "$backup is not a complete backup: backup.sh was interrupted" ;; esac
case ${TUNELINE_STORE:-} in *://*) refuse "TUNELINE_STORE is a URL. Unset it to restore the artifacts into the workdir" ;; esac
workdir=$(path abspath "$2")
if [ -d "$workdir" ]; then # may be a mount point or a symlink, so it is not replaced
    part=$workdir/.restoring
    [ ! -e "$part" ] || refuse "$workdir contains files of an interrupted restore. Empty it and try again"
    [ -z "$(ls -A "$workdir")" ] || refuse "$workdir is not empty. Move it elsewhere first"
else
    part=$workdir.part
    [ ! -e "$workdir" ] && [ ! -L "$workdir" ] || refuse "$workdir is not a folder"
    [ ! -e "$part" ] || refuse "$part was left by an interrupted restore. Remove it and try again"
    mkdir -p "$(dirname "$workdir")"
fi
store=$(path realpath "${TUNELINE_STORE:-$workdir/store}")
inside=${store#"$(path realpath "$workdir")/"} # relative to the workdir if the store is inside it, otherwise absolute
[ "$store" != "$(path realpath "$workdir")" ] || refuse "TUNELINE_STORE is the workdir itself"

mkdir "$part"
for one in "$backup"/*; do
    case ${one##*/} in
    store) ;;
    mlflow.db) cp -p "$one" "$part/" ;;
    *) copy "$one" "$part/${one##*/}" ;;
    esac
done
if [ -f "$part/mlflow.db" ]; then
    "$PYTHON" -IS - "$part/mlflow.db" "$workdir" <<'END'
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
if [ ! -d "$backup/store" ]; then
    tell "$backup contains no store"
elif [ "$inside" = "$store" ]; then
    (add_to_store "$store")
else
    mkdir -p "$(dirname "$part/$inside")"
    copy "$backup/store" "$part/$inside"
fi
sync -f "$part" 2> /dev/null || sync
if [ "$part" = "$workdir.part" ]; then
    mv "$part" "$workdir" # atomic
else
    mv "$part"/* "$workdir"
    rmdir "$part"
fi
echo "$workdir"

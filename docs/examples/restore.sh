#!/bin/sh
# Bring a backup that backup.sh made back, as a work folder that is not there yet or empty: where it was, or at another place.
#   sh restore.sh /backups/20261122T014300Z .tuneline
# MLflow's database names the folder of its artifacts by its whole path, so that is written anew; tuneline finds all else by digest. Not so a
# stock `dvc pull` from a clone of the data repository: each commit names the remote's old path (`dvc remote modify --local` says the new one).
# What comes back belongs to who restores it. With TUNELINE_STORE the artifacts go there, beside those that are there; repeating does no harm.
set -eu
mask=$(umask)
umask 077
: "${PYTHON:=python3}" "${SYNC:=cp -Rp}"

tell() { printf 'restore.sh: %s\n' "$1" >&2; }
refuse() { tell "$1"; exit 1; }
path() { "$PYTHON" -IS -c "import os, sys; print(os.path.$1(sys.argv[1]))" "$2"; }
copy() { mkdir "$2" && $SYNC "$1/." "$2/"; } # cp and rsync agree on what that means only with "/." at the end
# What a store has not yet: artifacts, each whole or not at all and in use as of now, then the notes that name them.
add_to_store() {
    umask "$mask" # others use it
    own=$1/unfinished/restore.${backup##*/}
    rm -rf "$own" # of one that was killed
    mkdir -p "$own"
    for one in "$backup"/store/*; do
        home=$1/${one##*/}
        if [ -f "$one/manifest.json" ] && [ ! -f "$home/manifest.json" ]; then
            copy "$one" "$own/new"
            touch "$own/new/manifest.json"
            [ ! -e "$home" ] || mv "$home" "$own/" # it was never finished
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

[ -d "$1" ] || refuse "there is no backup $1"
backup=$(CDPATH='' cd -- "$1" && pwd)
case $backup in *.part) refuse "$backup is no whole backup: backup.sh was interrupted" ;; esac
case ${TUNELINE_STORE:-} in *://*) refuse "TUNELINE_STORE is a URL: unset it, and the artifacts come into the folder" ;; esac
workdir=$(path abspath "$2")
if [ -d "$workdir" ]; then # perhaps a mount point or a symlink, so it stays
    part=$workdir/.restoring
    [ ! -e "$part" ] || refuse "$workdir holds what a restore left that was killed: empty it, and repeat"
    [ -z "$(ls -A "$workdir")" ] || refuse "$workdir is not empty: move it away first"
else
    part=$workdir.part
    [ ! -e "$workdir" ] && [ ! -L "$workdir" ] || refuse "$workdir is no folder"
    [ ! -e "$part" ] || refuse "$part is left of a restore that was killed: remove it, and repeat"
    mkdir -p "$(dirname "$workdir")"
fi
store=$(path realpath "${TUNELINE_STORE:-$workdir/store}")
inside=${store#"$(path realpath "$workdir")/"} # its path below the work folder, else the whole path
[ "$store" != "$(path realpath "$workdir")" ] || refuse "TUNELINE_STORE is the work folder itself"

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
    tell "there is no store in $backup"
elif [ "$inside" = "$store" ]; then
    (add_to_store "$store")
else
    mkdir -p "$(dirname "$part/$inside")"
    copy "$backup/store" "$part/$inside"
fi
sync -f "$part" 2> /dev/null || sync
if [ "$part" = "$workdir.part" ]; then
    mv "$part" "$workdir" # there at once, or not at all
else
    mv "$part"/* "$workdir"
    rmdir "$part"
fi
echo "$workdir"

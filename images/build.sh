#!/bin/sh
# Builds the images in IMAGES; `make images` calls it. docs/how-to/images.md describes the variables.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "make images: $*" >&2
    exit 1
}

usable() {
    command -v "$1" >/dev/null || return 1
    case $1 in docker) docker info >/dev/null 2>&1 ;; esac # docker cannot build without its daemon
}

if [ -z "${ENGINE:-}" ]; then
    for engine in docker podman buildah; do
        if usable "$engine"; then ENGINE=$engine && break; fi
    done
fi
if [ -z "${ENGINE:-}" ]; then
    fail "found neither docker with a running daemon, nor podman, nor buildah. Install one of them, or set its path: make images ENGINE=/path/to/podman"
fi
command -v "$ENGINE" >/dev/null || fail "ENGINE is $ENGINE, which does not exist"

IMAGES=${IMAGES:-curation evaluation training serving}
for image in $IMAGES; do
    if [ ! -f "images/$image.Containerfile" ]; then
        fail "image $image does not exist; expected one of:$(cd images && printf ' %s' *.Containerfile | sed 's/\.Containerfile//g')"
    fi
done
if [ -n "${BASE_IMAGE:-}" ] && [ "$IMAGES" != "${IMAGES% *}" ]; then
    fail "BASE_IMAGE applies to a single image. Select it: make images IMAGES=curation BASE_IMAGE=$BASE_IMAGE"
fi
SKOPEO=${SKOPEO:-skopeo}
if [ -n "${SIGN_KEY:-}" ] && [ -z "${PUSH:-}" ]; then fail "SIGN_KEY applies only to pushed images. Add PUSH=1"; fi
if [ -n "${PUSH:-}" ]; then command -v "$SKOPEO" >/dev/null || fail "PUSH requires skopeo, which does not exist. Install it"; fi

# Build arguments stay in the image's history, which everyone with permission to pull it can read.
case "${PIP_INDEX_URL:-} ${PIP_EXTRA_INDEX_URL:-} ${TORCH_INDEX_URL:-}" in
    *://*@*)
        fail "an index address with a user or a password would stay in the image's history. Pass it as a secret: make images ARGS='--secret id=pip.conf,src=pip.conf'"
        ;;
esac

# Print a base image with its digest from bases.lock. Without one, or to update it, read it from the registry and add it to bases.lock.
pin_base() {
    case $1 in
        *@sha256:* | localhost/*) echo "$1" && return ;; # an image that exists only on this machine has no digest in a registry
    esac
    pattern=$(echo "$1" | sed 's/[.[*^$]/\\&/g')
    digest=$(sed -n "s|^$pattern ||p" images/bases.lock)
    if [ -z "$digest" ] || [ -n "${UPDATE_BASES:-}" ]; then
        command -v "$SKOPEO" >/dev/null ||
            fail "images/bases.lock has no digest of $1, and skopeo, which reads it from the registry, does not exist. Install skopeo, or set BASE_IMAGE=NAME@sha256:DIGEST"
        found=$("$SKOPEO" inspect --no-tags --format '{{.Digest}}' "docker://$1") || fail "cannot read the digest of $1 from its registry"
        if [ "$found" != "$digest" ]; then
            echo "images/bases.lock: $1 is now $found${digest:+, was $digest}. Commit this file" >&2
            sed -i "\\|^$pattern |d" images/bases.lock
            echo "$1 $found" >>images/bases.lock
        fi
        digest=$found
    fi
    tag=${1##*/}
    echo "${1%"$tag"}${tag%%:*}@$digest"
}

# Copy the bill of materials out of an image.
write_sbom() {
    case $ENGINE in
        *buildah)
            container=$("$ENGINE" from --pull-never "$1") &&
                "$ENGINE" run "$container" cat /opt/tuneline/sbom.cdx.json >"$2" &&
                "$ENGINE" rm "$container" >/dev/null
            ;;
        *) "$ENGINE" run --rm --pull never --network none "$1" cat /opt/tuneline/sbom.cdx.json >"$2" ;;
    esac || { rm -f "$2" && fail "cannot read the bill of materials of $1"; }
}

# Push an image, sign it with SIGN_KEY, and write its digest.
push() {
    source=containers-storage:$1
    case $ENGINE in
        *docker) # skopeo reads only from daemons that accept the version of its API
            "$ENGINE" push --quiet "$1" >/dev/null
            source=docker://$1
            ;;
    esac
    settings=$(mktemp -d) # writes the signature beside the image in the registry, as cosign does
    echo 'default-docker: {use-sigstore-attachments: true}' >"$settings/default.yaml"
    "$SKOPEO" --registries.d "$settings" copy --quiet --digestfile "$2" \
        ${SIGN_KEY:+--sign-by-sigstore-private-key "$SIGN_KEY"} ${SIGN_PASSPHRASE_FILE:+--sign-passphrase-file "$SIGN_PASSPHRASE_FILE"} \
        "$source" "docker://$1"
    rm -r "$settings"
    echo "pushed ${1%:*}@$(cat "$2")"
}

revision=$(git describe --always --abbrev=40 --dirty=+changes --exclude='*' 2>/dev/null) || revision=
layers=
case $ENGINE in *buildah) layers=--layers ;; esac # docker and podman always write a layer per instruction
mkdir -p wheels # a mount of the build; empty: packages come from the index
rm -f dist/tuneline-*.whl
"${PYTHON:-python3}" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
version=$(echo dist/tuneline-*.whl)
version=${version#dist/tuneline-}
version=${version%%-*}
package_files=$(
    { cat hashes.txt embedded.txt pyproject.toml images/install.sh images/triton_version.sh images/contents.py && sha256sum wheels/* 2>/dev/null || :; } |
        sha256sum
)
wheel=$(sha256sum dist/tuneline-*.whl)

for image in $IMAGES; do
    name=${REGISTRY:-tuneline}/python-$image:${TAG:-latest}
    default=$(sed -n 's/^ARG BASE_IMAGE=//p' "images/$image.Containerfile")
    base=$(pin_base "${BASE_IMAGE:-$default}")
    case $base in *@*) digest=${base#*@} ;; *) digest= ;; esac
    echo "building $name from $base with $ENGINE"
    # A build argument without a value takes its value from the environment.
    # shellcheck disable=SC2086 # ARGS contains several options
    "$ENGINE" build $layers --file "images/$image.Containerfile" --tag "$name" \
        --build-arg "BASE_IMAGE=$base" ${digest:+--label "org.opencontainers.image.base.digest=$digest"} \
        --label "org.opencontainers.image.base.name=${BASE_IMAGE:-$default}" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
        --build-arg "PACKAGE_FILES=${package_files%% *}" --build-arg "WHEEL=${wheel%% *}" \
        ${PIP_INDEX_URL:+--build-arg PIP_INDEX_URL} ${PIP_EXTRA_INDEX_URL:+--build-arg PIP_EXTRA_INDEX_URL} \
        ${PIP_TRUSTED_HOST:+--build-arg PIP_TRUSTED_HOST} ${TORCH_INDEX_URL:+--build-arg TORCH_INDEX_URL} \
        ${ARGS:-} .
    write_sbom "$name" "dist/python-$image.cdx.json"
    if [ -n "${PUSH:-}" ]; then push "$name" "dist/python-$image.digest"; fi
done

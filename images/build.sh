#!/bin/sh
# Builds the images in IMAGES; `make images` calls it. docs/how-to/images.md describes the variables.
set -eu
cd "$(dirname "$0")/.."

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
    echo "make images: found neither docker with a running daemon, nor podman, nor buildah. Install one of them, or set its path: make images ENGINE=/path/to/podman" >&2
    exit 1
fi
command -v "$ENGINE" >/dev/null || { echo "make images: ENGINE is $ENGINE, which does not exist" >&2 && exit 1; }

IMAGES=${IMAGES:-curation evaluation training serving}
for image in $IMAGES; do
    if [ ! -f "images/$image.Containerfile" ]; then
        echo "make images: image $image does not exist; expected one of:$(cd images && printf ' %s' *.Containerfile | sed 's/\.Containerfile//g')" >&2
        exit 1
    fi
done
if [ -n "${BASE_IMAGE:-}" ] && [ "$IMAGES" != "${IMAGES% *}" ]; then
    echo "make images: BASE_IMAGE applies to a single image. Select it: make images IMAGES=curation BASE_IMAGE=$BASE_IMAGE" >&2
    exit 1
fi

# Build arguments stay in the image's history, which everyone with permission to pull it can read.
case "${PIP_INDEX_URL:-} ${PIP_EXTRA_INDEX_URL:-} ${TORCH_INDEX_URL:-}" in
    *://*@*)
        echo "make images: an index address with a user or a password would stay in the image's history. Pass it as a secret: make images ARGS='--secret id=pip.conf,src=pip.conf'" >&2
        exit 1
        ;;
esac

revision=$(git describe --always --abbrev=40 --dirty=+changes --exclude='*' 2>/dev/null) || revision=
layers=
case $ENGINE in *buildah) layers=--layers ;; esac # docker and podman always write a layer per instruction
mkdir -p wheels # a mount of the build; empty: packages come from the index
rm -f dist/tuneline-*.whl
"${PYTHON:-python3}" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
version=$(echo dist/tuneline-*.whl)
version=${version#dist/tuneline-}
version=${version%%-*}

for image in $IMAGES; do
    name=${REGISTRY:-tuneline}/python-$image:${TAG:-latest}
    echo "building $name with $ENGINE"
    # A build argument without a value takes its value from the environment.
    # shellcheck disable=SC2086 # ARGS contains several options
    "$ENGINE" build $layers --file "images/$image.Containerfile" --tag "$name" \
        ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"} \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
        ${PIP_INDEX_URL:+--build-arg PIP_INDEX_URL} ${PIP_EXTRA_INDEX_URL:+--build-arg PIP_EXTRA_INDEX_URL} \
        ${PIP_TRUSTED_HOST:+--build-arg PIP_TRUSTED_HOST} ${TORCH_INDEX_URL:+--build-arg TORCH_INDEX_URL} \
        ${ARGS:-} .
done

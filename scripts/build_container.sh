#!/bin/sh
# Builds the image with docker, podman or buildah, whichever is here, and trains once inside of it:
#
#   scripts/build_container.sh [IMAGE]
#
# Variables:
#   BASE         the image to begin with; "debootstrap": a Debian made here, where no registry can be reached (root)
#   TORCH_INDEX  an index of torch's wheels, such as the one for CPUs; else torch as pip finds it
#   BUILD_ARGS   more arguments of the build, such as --volume /etc/pip.conf:/etc/pip.conf:ro
set -eu
cd "$(dirname "$0")/.."
image=${1:-paceline:0.1}

for tool in docker podman buildah none; do
    if command -v "$tool" >/dev/null; then break; fi
done
if [ "$tool" = none ]; then
    echo "none of docker, podman and buildah is installed: apt install buildah" >&2
    exit 2
fi

set --
if [ "${BASE:-}" = debootstrap ]; then
    tool=buildah
    folder=${TMPDIR:-/tmp}/paceline-debian
    if [ ! -e "$folder/bin/sh" ]; then
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$folder"
    fi
    made=$(buildah from scratch)
    buildah copy --quiet "$made" "$folder" / >/dev/null
    buildah commit --quiet --rm "$made" localhost/paceline-debian >/dev/null
    set -- --build-arg BASE=localhost/paceline-debian
elif [ -n "${BASE:-}" ]; then
    set -- --build-arg "BASE=$BASE"
fi
if [ -n "${TORCH_INDEX:-}" ]; then
    set -- "$@" --build-arg "TORCH_INDEX=$TORCH_INDEX"
fi

# shellcheck disable=SC2086  # several arguments in one variable
case $tool in
buildah)
    buildah build --isolation chroot --format docker "$@" ${BUILD_ARGS:-} --tag "$image" .
    container=$(buildah from "$image")
    trap 'buildah rm "$container" >/dev/null' EXIT
    buildah run --isolation chroot "$container" -- make run
    ;;
*)
    "$tool" build "$@" ${BUILD_ARGS:-} --tag "$image" .
    "$tool" run --rm --ipc=host "$image" make run
    ;;
esac

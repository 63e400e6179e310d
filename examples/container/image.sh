#!/bin/sh
# Makes image.tar, beside fiec.json, out of this machine's own shell: nothing is fetched. A real
# program would have a Containerfile; what matters is the archive that fiec.json names.
#
#     image.sh [podman|docker]
set -eu
engine=${1:-podman}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
shell=$(readlink -f /bin/sh)
mkdir -p "$work/root/bin"
cp "$shell" "$work/root/bin/sh"
# The libraries that it is linked with, each where the loader looks for it.
ldd "$shell" | tr ' \t' '\n\n' | grep '^/' | while read -r library; do
    mkdir -p "$work/root$(dirname "$library")"
    cp -L "$library" "$work/root$library"
done
tar -cf "$work/image.tar" -C "$work/root" .
name=localhost/fiec-example-shell:1
"$engine" import "$work/image.tar" "$name"
"$engine" save --output "$work/saved.tar" "$name"
mv "$work/saved.tar" "$(dirname "$0")/image.tar"

#!/bin/bash
# Fetches what the image is made of into wheelhouse/: the pinned wheels, and DueMQ's own, built here.
# Needs the package index; after it, `make kind-test` needs no network.  IMAGE_ARCH: x86_64 or aarch64.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=${IMAGE_ARCH:-$(uname -m)}
python=.venv/bin/python
quiet=(--disable-pip-version-check --no-input -q)

rm -rf wheelhouse wheelhouse.new
trap 'rm -rf wheelhouse.new' EXIT
"$python" -m pip download "${quiet[@]}" --dest wheelhouse.new --require-hashes --only-binary=:all: \
  --python-version 3.11 --implementation cp \
  --platform "manylinux2014_$arch" --platform "manylinux_2_28_$arch" --platform "manylinux_2_27_$arch" \
  -r requirements/server.txt
for project in sdk recurring cli server; do
  rm -rf "$project/build" # setuptools would pack modules that are long gone
  "$python" -m build --no-isolation --wheel --outdir wheelhouse.new "$project" >/dev/null 2>wheelhouse.new/build.log || { cat wheelhouse.new/build.log >&2; exit 1; }
  rm -rf "$project/build" wheelhouse.new/build.log
done
mv wheelhouse.new wheelhouse
echo "wheelhouse: $(find wheelhouse -name '*.whl' | wc -l) wheels, $(du -sh wheelhouse | cut -f1)"

#!/bin/bash
# Fetches what the image's target `traces` is made of into wheelhouse-traces/: the pinned wheels, pyspark's built
# from its source, and DueMQ's own.  Needs the package index, and Python 3.11 on the processor that the image is for.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
quiet=(--disable-pip-version-check --no-input -q)

rm -rf wheelhouse-traces wheelhouse-traces.new
trap 'rm -rf wheelhouse-traces.new' EXIT
"$python" -m pip wheel "${quiet[@]}" --require-hashes --no-build-isolation --wheel-dir wheelhouse-traces.new -r requirements/traces.txt
for project in sdk trace_analytics; do
  rm -rf "$project/build" # setuptools would pack modules that are long gone
  "$python" -m build --no-isolation --wheel --outdir wheelhouse-traces.new "$project" >/dev/null 2>wheelhouse-traces.new/build.log || { cat wheelhouse-traces.new/build.log >&2; exit 1; }
  rm -rf "$project/build" wheelhouse-traces.new/build.log
done
mv wheelhouse-traces.new wheelhouse-traces
echo "wheelhouse-traces: $(find wheelhouse-traces -name '*.whl' | wc -l) wheels, $(du -sh wheelhouse-traces | cut -f1)"

#!/usr/bin/env bash
# build.sh go|node|java|rust: fetches pinned dependencies, generates from protos/ and builds.
# build.sh pyright: fetches the type checker that checks programs of the Python client.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)

build_go() {
  cd go && mkdir -p bin
  GOBIN=$PWD/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
  GOBIN=$PWD/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
  local maps=() file
  for file in "$root"/protos/duemq/v1/*.proto; do
    file=duemq/v1/${file##*/}
    maps+=("--go_opt=M$file=clienttest/duemqv1" "--go-grpc_opt=M$file=clienttest/duemqv1")
  done
  PATH=$PWD/bin:$PATH "$root/.venv-proto/bin/python" -m grpc_tools.protoc -I"$root/protos" \
    --go_out=. --go_opt=module=clienttest --go-grpc_out=. --go-grpc_opt=module=clienttest "${maps[@]}" \
    "$root"/protos/duemq/v1/*.proto
  go build -mod=readonly -o bin/client . && go build -mod=readonly -o bin/consumer ./consumer
}

build_node() {
  cd node && npm ci --no-audit --no-fund --silent
}

build_pyright() {
  cd ../pyright && npm ci --ignore-scripts --no-audit --no-fund --silent
}

build_java() {
  cd java && mvn -q -B -ntp package
}

build_rust() {
  cd rust && cargo build --quiet --locked --target-dir target
}

"build_$1"

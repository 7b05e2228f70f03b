# Certificates of kind-test.sh, which sources this, of an authority of its own: that of the services, in the Secret
# `duemq-tls`, and that of the load, in `duemq-load`, with the permissions that it needs and no others.

# As the chart's README says, and the address under which a pod's own `duemq` asks it.
certificate_names() {
  local name names=IP:127.0.0.1,DNS:$release-nameserver.$namespace.svc.cluster.local
  for name in nameserver broker timer-service; do
    names+=",DNS:*.$release-$name-headless.$namespace.svc.cluster.local"
  done
  echo "subjectAltName=$names"
}

make_certificate() { # FILE COMMON_NAME: FILE.crt and FILE.key, anew
  local key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
  (
    cd "$work"
    [ -f ca.crt ] || quietly openssl req "${key[@]}" -x509 -days 2 -subj /CN=kind -keyout ca.key -out ca.crt
    certificate_names >names
    quietly openssl req "${key[@]}" -subj "/CN=$2" -keyout "$1.key" -out request
    quietly openssl x509 -req -days 2 -in request -extfile names -CA ca.crt -CAkey ca.key -CAcreateserial -out "$1.crt"
  )
}

put_secret() { # NAME FILE
  kubectl -n "$namespace" create secret generic "$1" --dry-run=client -o yaml --from-file="$work/ca.crt" \
    --from-file="tls.crt=$work/$2.crt" --from-file="tls.key=$work/$2.key" | kubectl apply -f - >/dev/null
}

write_permissions() {
  cat >"$work/permissions.toml" <<TOML
[[allow]]
names = ["duemq"]
service = true

[[allow]]
names = ["load"]
send = ["kind-load"]
receive = ["kind-load"]
groups = ["kind-load"]
TOML
}

use_tls() { # from here on for what is installed, and for the load
  make_certificate tls duemq
  make_certificate load load
  write_permissions
  kubectl create namespace "$namespace" --dry-run=client -o yaml | kubectl apply -f - >/dev/null 2>&1
  put_secret duemq-tls tls
  put_secret duemq-load load
  values+=(--set tls.secretName=duemq-tls,tls.verifyClients=true --set-file "tls.permissions=$work/permissions.toml")
  load_nameservers=$release-nameserver.$namespace.svc.cluster.local:9876
  load_env=", {name: DUEMQ_TLS_CA, value: /tls/ca.crt}, {name: DUEMQ_TLS_CERT, value: /tls/tls.crt}, {name: DUEMQ_TLS_KEY, value: /tls/tls.key}"
  load_mount=", {name: tls, mountPath: /tls}"
  load_volume=", {name: tls, secret: {secretName: duemq-load}}"
}

renew_certificate() {
  make_certificate tls duemq
  put_secret duemq-tls tls
}

serves_certificate() { # POD PORT: that of the Secret
  local served
  served=$(kubectl -n "$namespace" exec "$1" -- \
    python -c "import ssl; print(ssl.get_server_certificate(('127.0.0.1', $2)))" 2>/dev/null | openssl x509 -noout -fingerprint) || return 1
  [ "$served" = "$(openssl x509 -noout -fingerprint -in "$work/tls.crt")" ]
}

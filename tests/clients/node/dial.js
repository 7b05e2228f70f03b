// How to connect to the servers of a cluster: to be copied with what needs it.
import grpc from "@grpc/grpc-js";
import { readFileSync } from "node:fs";

// By TLS if DUEMQ_TLS_CA names whom to trust.  DUEMQ_TLS_CERT and DUEMQ_TLS_KEY are shown where certificates are asked
// for: by their names servers know who calls, and what they may do.
function transport() {
  const [ca, key, cert] = ["CA", "KEY", "CERT"].map((name) => process.env[`DUEMQ_TLS_${name}`])
    .map((file) => (file ? readFileSync(file) : null));
  return ca ? grpc.credentials.createSsl(ca, key, cert) : grpc.credentials.createInsecure();
}

const credentials = transport();
const options = {
  "grpc.max_receive_message_length": 16 << 20, // a pull answers up to 8 MiB; gRPC alone takes 4
  // A server that vanished without a word is noticed by its silence: not by calls, whose deadline leaves the connection
  // as it is.  Servers take pings 1.25 s apart.
  "grpc.keepalive_time_ms": 5_000,
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.keepalive_permit_without_calls": 1,
  // Between attempts; by itself gRPC waits for up to two minutes, as an outage lasts.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 500,
};

// Connects to host:port when something is called, and again after a connection broke.
export function dial(Service, address) {
  return new Service(address, credentials, options);
}

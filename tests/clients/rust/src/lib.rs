//! What both programs need: the code made of protos/, and calls to a server of a cluster.

use std::error::Error;
use std::{env, fs, future::Future, time::Duration};

use anyhow::{Context, Result};
use prost::Message;
use tonic::service::{Interceptor, interceptor::InterceptedService};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Response, Status};

pub mod v1 {
    tonic::include_proto!("duemq.v1");
}

/// For each client of tonic's: a connection has no such limit, and a client's is 4 MiB by itself.
pub const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Longer than a broker parks a pull.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Servers end connections whose pings come more often than each 1.25 s.
const PING_EVERY: Duration = Duration::from_secs(5);

/// Connects to the servers of a cluster, by TLS if `DUEMQ_TLS_CA` names whom to trust.
/// `DUEMQ_TLS_CERT` and `DUEMQ_TLS_KEY` are shown where certificates are asked for.
#[derive(Clone)]
pub struct Dialer {
    tls: Option<ClientTlsConfig>,
}

impl Dialer {
    pub fn from_env() -> Result<Self> {
        let Some(authority) = pem("DUEMQ_TLS_CA")? else {
            return Ok(Self { tls: None });
        };
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
        if let Some(certificate) = pem("DUEMQ_TLS_CERT")? {
            let key = pem("DUEMQ_TLS_KEY")?.context("DUEMQ_TLS_CERT without DUEMQ_TLS_KEY")?;
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        Ok(Self { tls: Some(tls) })
    }

    /// Connects when something is called, and again after a connection broke.
    pub fn dial(&self, address: &str) -> Result<Channel> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .with_context(|| format!("address {address:?}"))?
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_EVERY)
            .keep_alive_while_idle(true);
        if let Some(tls) = &self.tls {
            endpoint = endpoint.tls_config(tls.clone()).context("what DUEMQ_TLS_… name")?;
        }
        Ok(endpoint.connect_lazy())
    }
}

fn pem(variable: &str) -> Result<Option<Vec<u8>>> {
    let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    let read = fs::read(&path).with_context(|| format!("{variable}={}", path.display()))?;
    Ok(Some(read))
}

/// A connection on which each call says whom it is for: a broker by its `store_id`.  Another one
/// that has the address by now refuses the call.
pub type Meant = InterceptedService<Channel, StoreId>;

/// 0 where none is told: an older broker or nameserver, or no broker.
#[derive(Clone)]
pub struct StoreId(pub u64);

impl StoreId {
    pub fn at(self, channel: Channel) -> Meant {
        InterceptedService::new(channel, self)
    }
}

impl Interceptor for StoreId {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.set_timeout(CALL_TIMEOUT);
        if self.0 != 0 {
            request.metadata_mut().insert("duemq-store-id", self.0.into());
        }
        Ok(request)
    }
}

/// What is answered to a call, in time.  The timeout of a tonic request is no such bound: it
/// leaves out the wait for a connection, and for an answer's body.
pub async fn answer<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answered) => answered.map(Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!("no answer in {CALL_TIMEOUT:?}"))),
    }
}

/// What a server says of a call that failed; None where the failure is gRPC's own.
pub fn refusal(status: &Status) -> Option<v1::Error> {
    let trailer = status.metadata().get_bin("duemq-error-bin")?;
    v1::Error::decode(trailer.to_bytes().ok()?).ok()
}

/// What gRPC says of a call that failed, and why: that a connection failed is no reason yet.
pub fn describe(status: &Status) -> String {
    let said = format!("{:?}: {}", status.code(), status.message());
    match status.source().and_then(|source| anyhow::Chain::new(source).last()) {
        Some(cause) if cause.to_string() != status.message() => format!("{said}: {cause}"),
        _ => said,
    }
}

// Package dial connects to the servers of a cluster: to be copied with what needs it.
package dial

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	pb "clienttest/duemqv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const answerBytes = 16 << 20 // a pull answers up to 8 MiB; gRPC alone takes 4

// A server that vanished without a word is noticed by its silence: not by calls, whose deadline leaves the connection
// as it is.  The least that grpc-go allows; servers take pings 1.25 s apart.
var pings = keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}

// By itself gRPC waits for up to two minutes between attempts, as an outage lasts.
var attempts = grpc.ConnectParams{MinConnectTimeout: 5 * time.Second, Backoff: backoff.Config{
	BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond}}

// To connects to host:port when something is called, and again after a connection broke.
func To(address string) (*grpc.ClientConn, error) {
	transport, err := transport()
	if err != nil {
		return nil, err
	}
	return grpc.NewClient(address, grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(pings), grpc.WithConnectParams(attempts), grpc.WithUnaryInterceptor(read),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytes)))
}

// Refusal is a call that failed, and what the server says of it.
type Refusal struct {
	Said   *pb.Error
	status *status.Status
}

func (r *Refusal) Error() string { return r.Said.Code.String() + ": " + r.Said.Message }

// GRPCStatus has status.Code say what gRPC says.
func (r *Refusal) GRPCStatus() *status.Status { return r.status }

// read has calls fail with a Refusal where a server said why.  Any other failure is gRPC's own.
func read(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, call grpc.UnaryInvoker,
	options ...grpc.CallOption) error {
	var trailer metadata.MD
	err := call(ctx, method, request, answer, conn, append(options, grpc.Trailer(&trailer))...)
	said := &pb.Error{}
	if text := trailer.Get("duemq-error-bin"); err == nil || len(text) != 1 || proto.Unmarshal([]byte(text[0]), said) != nil {
		return err
	}
	return &Refusal{said, status.Convert(err)}
}

// transport is TLS if DUEMQ_TLS_CA names whom to trust.  DUEMQ_TLS_CERT and DUEMQ_TLS_KEY are shown where certificates
// are asked for: by their names servers know who calls, and what they may do.
func transport() (credentials.TransportCredentials, error) {
	authority := os.Getenv("DUEMQ_TLS_CA")
	if authority == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return nil, fmt.Errorf("DUEMQ_TLS_CA: %w", err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, errors.New("DUEMQ_TLS_CA: no certificate in " + authority)
	}
	if mine := os.Getenv("DUEMQ_TLS_CERT"); mine != "" {
		pair, err := tls.LoadX509KeyPair(mine, os.Getenv("DUEMQ_TLS_KEY"))
		if err != nil {
			return nil, fmt.Errorf("DUEMQ_TLS_CERT, DUEMQ_TLS_KEY: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

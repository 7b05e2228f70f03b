// Package dial connects to the servers of a cluster: to be copied with what needs it.
package dial

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

const answerBytes = 16 << 20 // a pull answers up to 8 MiB; gRPC alone takes 4

// To connects to host:port when something is called, and again after a connection broke.
func To(address string) (*grpc.ClientConn, error) {
	transport, err := transport()
	if err != nil {
		return nil, err
	}
	return grpc.NewClient(address, grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(answerBytes)))
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

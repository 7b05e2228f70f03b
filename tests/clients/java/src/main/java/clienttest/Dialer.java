package clienttest;

import com.google.protobuf.InvalidProtocolBufferException;
import duemq.v1.Error;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.util.concurrent.TimeUnit;

/** Connects to the servers of a cluster: to be copied with what needs it. */
final class Dialer {
    private static final int ANSWER_BYTES = 16 << 20; // a pull answers up to 8 MiB; gRPC alone takes 4
    // A server that vanished without a word is noticed by its silence: not by calls, whose deadline leaves the
    // connection as it is. The least that grpc-java allows; servers take pings 1.25 s apart.
    private static final int PING_S = 10;
    private static final int PING_TIMEOUT_S = 10;

    private static final Metadata.Key<byte[]> REFUSAL =
            Metadata.Key.of("duemq-error-bin", Metadata.BINARY_BYTE_MARSHALLER);

    private Dialer() {}

    /**
     * Connects to host:port when something is called, and again after a connection broke. By itself gRPC waits for up
     * to two minutes between attempts, as an outage lasts: call {@code resetConnectBackoff} before a repeated call.
     */
    static ManagedChannel dial(String address) throws IOException {
        return Grpc.newChannelBuilder(address, credentials()).maxInboundMessageSize(ANSWER_BYTES)
                .keepAliveTime(PING_S, TimeUnit.SECONDS).keepAliveTimeout(PING_TIMEOUT_S, TimeUnit.SECONDS)
                .keepAliveWithoutCalls(true).build();
    }

    /** What a server says of a call that failed; null where the failure is gRPC's own. */
    static Error refusal(StatusRuntimeException failure) {
        byte[] trailer = failure.getTrailers() == null ? null : failure.getTrailers().get(REFUSAL);
        if (trailer == null) return null;
        try {
            return Error.parseFrom(trailer);
        } catch (InvalidProtocolBufferException e) {
            return null;
        }
    }

    /**
     * TLS if DUEMQ_TLS_CA names whom to trust. DUEMQ_TLS_CERT and DUEMQ_TLS_KEY are shown where certificates are asked
     * for: by their names servers know who calls, and what they may do.
     */
    private static ChannelCredentials credentials() throws IOException {
        if (!isSet("DUEMQ_TLS_CA")) return InsecureChannelCredentials.create();
        var tls = TlsChannelCredentials.newBuilder().trustManager(file("DUEMQ_TLS_CA"));
        if (isSet("DUEMQ_TLS_CERT")) tls.keyManager(file("DUEMQ_TLS_CERT"), file("DUEMQ_TLS_KEY"));
        return tls.build();
    }

    private static boolean isSet(String variable) {
        String value = System.getenv(variable);
        return value != null && !value.isEmpty();
    }

    private static File file(String variable) throws IOException {
        if (!isSet(variable)) throw new IOException(variable + " is not set");
        return new File(System.getenv(variable));
    }
}

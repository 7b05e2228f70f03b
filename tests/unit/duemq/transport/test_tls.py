"""What a client says of its certificates, and what it makes of their files."""

import pytest

from duemq.errors import InvalidArgument
from duemq.settings import ClientSettings, Tls, default_tls
from duemq.transport import channel
from duemq.transport.blocking_client import BlockingClient
from duemq.transport.tls import Certificates, credentials
from tests.certificates import authority, certificate, needs_openssl, openssl


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("", "_CA", "_CERT", "_KEY"):
        monkeypatch.delenv(f"DUEMQ_TLS{name}", raising=False)


def test_without_a_word_connections_have_no_tls():
    assert default_tls() is None
    assert ClientSettings().tls is None


@pytest.mark.parametrize(
    ("environment", "tls"),
    [
        ({"DUEMQ_TLS": "1"}, Tls()),
        ({"DUEMQ_TLS": "0", "DUEMQ_TLS_CA": "ca.pem"}, None),
        ({"DUEMQ_TLS_CA": "ca.pem"}, Tls(ca="ca.pem")),
        ({"DUEMQ_TLS_CERT": "c", "DUEMQ_TLS_KEY": "k"}, Tls(cert="c", key="k")),
    ],
)
def test_the_environment_may_say_it(monkeypatch, environment, tls):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_tls() == tls
    assert ClientSettings().tls == tls


@pytest.mark.parametrize(
    ("given", "field"),
    [({"cert": "c"}, "tls_key"), ({"key": "k"}, "tls_cert"), ({"ca": b"PEM"}, "tls_ca")],
)
def test_what_does_not_go_together_is_refused(given, field):
    with pytest.raises(InvalidArgument) as refused:
        Tls(**given)
    assert refused.value.field == field


def test_a_wrong_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("DUEMQ_TLS", "yes")
    with pytest.raises(InvalidArgument, match="DUEMQ_TLS: 'yes' is not allowed: 0 or 1"):
        ClientSettings()


def test_files_that_are_of_no_use_are_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"tls_ca: .*no.pem.*\(No such file or directory\)"):
        channel.check(Tls(ca=str(tmp_path / "no.pem")))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InvalidArgument, match=r"tls_ca: .*text.*certificates in PEM"):
        channel.check(Tls(ca=str(tmp_path / "text")))


@needs_openssl
def test_a_key_of_another_certificate_is_refused(tmp_path):
    ca = authority(tmp_path)
    one, other = certificate(ca, "one"), certificate(ca, "other")
    channel.check(one)
    with pytest.raises(InvalidArgument, match=r"tls_cert: .*one\.pem"):
        channel.check(Tls(ca=one.ca, cert=one.cert, key=other.key))


@needs_openssl
def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path):
    tls = certificate(authority(tmp_path), "mine")
    openssl("ec", "-in", tls.key, "-aes256", "-passout", "pass:secret", "-out", tmp_path / "locked")
    with pytest.raises(InvalidArgument, match=r"tls_cert: .*mine\.pem"):
        channel.check(Tls(ca=tls.ca, cert=tls.cert, key=str(tmp_path / "locked")))


@needs_openssl
def test_blocking_calls_use_new_certificates(tmp_path):
    tls = certificate(authority(tmp_path), "mine")
    with BlockingClient("127.0.0.1:1", 1, tls) as client:
        before = client._channel("127.0.0.1:1")
        assert client._channel("127.0.0.1:1") is before
        certificate(tmp_path / "ca.pem", "mine")
        assert client._channel("127.0.0.1:1") is not before


@needs_openssl
def test_a_new_certificate_is_taken_and_a_bad_one_is_not(tmp_path, caplog):
    tls = certificate(authority(tmp_path), "mine")
    credentials(tls)
    files = Certificates(tls)
    before = files.pems
    assert not files.renew()
    certificate(tmp_path / "ca.pem", "mine")
    assert files.renew()
    assert files.pems != before
    assert not files.renew()

    good = files.pems
    (tmp_path / "mine.pem").write_text("half of")
    assert not files.renew()
    assert files.pems == good
    assert "the certificates of before stay in use" in caplog.text
    credentials(tls)  # who connects just then goes on, too


@needs_openssl
def test_a_file_that_goes_between_its_check_and_its_reading_changes_nothing(tmp_path, monkeypatch):
    """Who replaces them one after the other ends nothing that connects just then."""
    tls = certificate(authority(tmp_path), "mine")
    files = Certificates(tls)
    before = files.pems
    certificate(tmp_path / "ca.pem", "mine")

    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    with monkeypatch.context() as replaced:
        replaced.setattr("duemq.transport.tls._content", gone)
        assert not files.renew()
    assert files.pems == before
    certificate(tmp_path / "ca.pem", "mine")
    assert files.renew()


@needs_openssl
def test_what_could_not_be_read_is_read_when_it_can(tmp_path, monkeypatch):
    """And not with the next certificate, when this process's is of the day before yesterday."""
    files = Certificates(certificate(authority(tmp_path), "mine"))
    certificate(tmp_path / "ca.pem", "mine")

    def refused(path):
        raise OSError(24, "Too many open files", path)

    monkeypatch.setattr("duemq.transport.tls.AGAIN_S", 0.0)
    with monkeypatch.context() as replaced:
        replaced.setattr("duemq.transport.tls._content", refused)
        assert not files.renew()
    assert files.renew()
    assert not files.renew()

# One image: duemq-nameserver, duemq-broker, duemq-timer-service, and duemq to look at them.
# `helm/kind-prepare.sh` fills wheelhouse/; the build itself needs no network.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
COPY requirements/server.txt /build/requirements.txt
COPY wheelhouse /build/wheelhouse
RUN python3 -m venv /opt/duemq \
 && /opt/duemq/bin/python -m pip install --no-cache-dir --disable-pip-version-check -q \
      --no-index --find-links /build/wheelhouse --require-hashes -r /build/requirements.txt \
 && /opt/duemq/bin/python -m pip install --no-cache-dir --disable-pip-version-check -q \
      --no-index --no-deps /build/wheelhouse/duemq*.whl \
 && /opt/duemq/bin/python -m pip uninstall --disable-pip-version-check -q -y pip setuptools wheel

# Spark over the traces: docker build --target traces, after helm/traces-prepare.sh.  Fetches a JRE, unless BASE_IMAGE has one.
FROM ${BASE_IMAGE} AS traces
RUN { command -v java >/dev/null || { apt-get update -q && apt-get install -yq --no-install-recommends default-jre-headless; }; } \
 && rm -rf /var/lib/apt/lists/* \
 # Hadoop asks for the user's name.
 && echo 'duemq:x:10001:10001::/tmp:/usr/sbin/nologin' >>/etc/passwd
COPY wheelhouse-traces /build/wheelhouse
RUN python3 -m venv /opt/duemq \
 && /opt/duemq/bin/python -m pip install --no-cache-dir --disable-pip-version-check -q \
      --no-index --no-deps --find-links /build/wheelhouse /build/wheelhouse/*.whl \
 && rm -rf /build
ENV PATH=/opt/duemq/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MPLCONFIGDIR=/tmp
USER 10001:10001
WORKDIR /
CMD ["python", "-m", "duemq_analytics", "--help"]

FROM ${BASE_IMAGE}
COPY --from=build /opt/duemq /opt/duemq
ENV PATH=/opt/duemq/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# No process needs root, a writable root file system or a home.
USER 10001:10001
WORKDIR /
# gRPC and metrics of nameserver, broker, timer service.
EXPOSE 9876 9870 9872 9886 9880 9882
CMD ["duemq", "--help"]

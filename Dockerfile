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

# tightship's two services in one image: `docker build .`, or by docker-compose.yml. `--target test` adds the tests.
#
# Wheels come from wheelhouse/ where it has any (tools/wheelhouse.sh fills it), and then nothing is fetched.
# Works with BuildKit and with the builder before it; any Debian-like BASE with Python 3.11 or newer, venv and pip does.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY tools/pip-install.sh /usr/local/bin/pip-install
COPY wheelhous[e] pyproject.toml README.md LICENSE ./
RUN python3 -m venv /opt/tightship && mkdir -p /wheelhouse services/tightship clients/tightship \
    && find . -maxdepth 1 -name '*.whl' -exec mv -t /wheelhouse {} + \
    && pip-install .
COPY services services
COPY clients clients
RUN pip-install --no-deps --force-reinstall .

FROM build AS test
RUN pip-install '.[dev]'
COPY protos protos
COPY tests tests
COPY examples examples
COPY docs docs
ENV PATH=/opt/tightship/bin:$PATH PYTHONUNBUFFERED=1 GRPC_ENABLE_FORK_SUPPORT=0
CMD ["python", "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/e2e"]

FROM build AS bare
RUN /opt/tightship/bin/python -m pip uninstall --quiet --yes pip setuptools \
    && find /opt/tightship -name '*.pyi' -delete

FROM ${BASE}
RUN groupadd --system --gid 950 tightship \
    && useradd --system --uid 950 --gid 950 --no-create-home --home-dir /nonexistent tightship \
    && install -d -m 0750 -o tightship -g tightship /run/tightship \
    && install -d -m 1777 /run/failpoints
COPY --from=bare /opt/tightship /opt/tightship
ENV PATH=/opt/tightship/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER tightship
CMD ["python", "-m", "tightship.switchboard"]

# SPDX-License-Identifier: Apache-2.0
# The CPU cell: a base and exactly what its locks pin. `nox -s containers -- build cpu` gives what stands in ARG,
# the locks and the code that installs them as the context, and two secrets that are in no layer: `ca`, the host's CA
# bundle, and `index`, where packages come from. Sessions run in it as `afd`, without a network.
ARG BASE
FROM ${BASE}
ARG SOURCE_DATE_EPOCH
RUN useradd --no-log-init --uid 1000 --create-home --shell /bin/bash afd \
 && install -d -o afd -g afd /opt/afd /srv/checkout \
 && rm -f /etc/passwd- /etc/shadow- /etc/group- /etc/gshadow- /etc/subuid- /etc/subgid-
USER afd
COPY --chown=afd:afd . /opt/afd/recipe/
RUN --mount=type=secret,id=index,uid=1000 --mount=type=secret,id=ca,uid=1000 \
    --mount=type=cache,target=/opt/afd/downloads,uid=1000 \
    set -eu; cd /opt/afd/recipe; . /run/secrets/index; \
    if [ -s /run/secrets/ca ]; then \
        export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca REQUESTS_CA_BUNDLE=/run/secrets/ca; fi; \
    export AFD_ENV_DIR=/opt/afd/envs PYTHONDONTWRITEBYTECODE=1; \
    export UV_CACHE_DIR=/opt/afd/downloads/uv PIP_CACHE_DIR=/opt/afd/downloads/pip UV_LINK_MODE=copy; \
    python3 -m venv /tmp/boot; \
    cell=$(/tmp/boot/bin/python -m qualify.environment --image | tee /dev/stderr | tail -n 1); \
    ln -s "$cell" /opt/afd/cell; rm -rf /tmp/boot /tmp/uv-* /opt/afd/envs/uv*
ENV AFD_ENV_DIR=/opt/afd/envs PATH=/opt/afd/cell/bin:/usr/local/bin:/usr/bin:/bin
WORKDIR /srv/checkout

# SPDX-License-Identifier: Apache-2.0
# The CUDA cells (h200x1, h200x2): a base and exactly what their lock pins. UNVALIDATED: an image has been built from it,
# but none has run on a GPU. Context and secrets are those of cpu.Dockerfile; the driver comes from the host, through
# NVIDIA's container toolkit. Sessions run in it as `afd`.
ARG BASE
FROM ${BASE}
ARG SOURCE_DATE_EPOCH
LABEL org.afd-plugin.validated="no"
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
    export PIP_CACHE_DIR=/opt/afd/downloads/pip PYTHONDONTWRITEBYTECODE=1; \
    python3 -m venv /opt/afd/cell; \
    /opt/afd/cell/bin/python -m pip install --no-deps --require-hashes --progress-bar off \
        --requirement containers/cuda/requirements.lock; \
    /opt/afd/cell/bin/python -m pip check
ENV PATH=/opt/afd/cell/bin:/usr/local/bin:/usr/bin:/bin
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /srv/checkout

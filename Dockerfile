# The suite as an image. LOCK=cuda (default) brings torch with CUDA, LOCK=cpu torch for the CPU; see README, "In a container".
# A base by digest: scripts/pin_images writes it here where a registry is reached.
ARG PYTHON_IMAGE=python:3.12-slim-trixie

# What Debian provides, for every later stage.
FROM ${PYTHON_IMAGE} AS base
RUN --mount=type=bind,source=docker/system_packages.sh,target=/system_packages.sh sh /system_packages.sh
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# Python packages, all by hash: from wheelhouse/ where it was filled for this lock and interpreter, else from the index.
FROM base AS packages
ARG LOCK=cuda
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/venv
RUN --mount=type=bind,source=docker/install_lock.sh,target=/install_lock.sh \
    --mount=type=bind,source=locks,target=/locks \
    --mount=type=bind,source=wheelhouse,target=/wheelhouse \
    sh /install_lock.sh python build && sh /install_lock.sh python "$LOCK"

# Test tools, apart from what is measured.
FROM packages AS test-packages
RUN --mount=type=bind,source=docker/install_lock.sh,target=/install_lock.sh \
    --mount=type=bind,source=locks,target=/locks \
    --mount=type=bind,source=wheelhouse,target=/wheelhouse \
    sh /install_lock.sh python test --target /opt/test-tools

FROM packages AS suite
WORKDIR /opt/unilab-repro
COPY LICENSE NOTICE README.md pyproject.toml source_stamp.jso[n] ./
COPY locks locks
COPY docker docker
COPY unilab unilab
COPY repro repro
COPY docker/10_nvidia.json /usr/share/glvnd/egl_vendor.d/10_nvidia.json
RUN python -m pip install --quiet --no-cache-dir --no-deps --no-index --no-build-isolation --editable . \
    && python -m compileall -q unilab repro docker \
    && mkdir -m 755 reports && chown 10001:10001 reports && mkdir -m 1777 /var/cache/unilab

# Labels are given before a build and checked in it: a value that is not what was installed stops the build.
ARG PYTHON_IMAGE
ARG LOCK=cuda
ARG REVISION=unknown
ARG SOURCE_SHA256=unknown
ARG CUDA_VERSION=13.0.96
ARG CUDNN_VERSION=9.20.0.48
ARG NCCL_VERSION=2.29.7
RUN python docker/image_facts.py
LABEL org.opencontainers.image.title="unilab-repro" \
      org.opencontainers.image.description="Benchmark and reproduction suite for off-policy robot RL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      unilab-repro.lock="${LOCK}" \
      unilab-repro.source-sha256="${SOURCE_SHA256}" \
      unilab-repro.cuda="${CUDA_VERSION}" \
      unilab-repro.cudnn="${CUDNN_VERSION}" \
      unilab-repro.nccl="${NCCL_VERSION}"

# Graphics beside compute, for EGL on the GPU. One machine: ranks meet on the loopback interface.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
STOPSIGNAL SIGINT
# A number without a name: reports then hold no user's name.
USER 10001:10001
ENTRYPOINT ["/opt/unilab-repro/docker/entrypoint.sh"]
CMD ["run", "--matrix", "auto", "--require-gpu"]

FROM suite AS test
COPY --from=test-packages /opt/test-tools /opt/test-tools
COPY .dockerignore CHANGELOG.md CONTRIBUTING.md Dockerfile Makefile compose.yaml ./
COPY .ci .ci
COPY docs docs
COPY scripts scripts
COPY tests tests
ENV PYTHONPATH=/opt/test-tools HOME=/tmp HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
ENTRYPOINT ["python", "-m", "pytest", "-p", "no:cacheprovider"]
CMD ["-m", "not docker and not gpu"]

# The default target is what runs, not what tests it.
FROM suite

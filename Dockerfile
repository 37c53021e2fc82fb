# Paceline in a container, for CPUs or for NVIDIA GPUs:
#
#   docker build -t paceline:0.1-cuda .                                    # torch as pip finds it: with CUDA on x86_64
#   docker build -t paceline:0.1 --build-arg TORCH_INDEX="$INDEX" .        # the index of torch's wheels for CPUs: small
#   docker run --gpus all --ipc=host -it -v "$PWD/runs:/workspace/runs" paceline:0.1-cuda
#
# torch's wheels have the CUDA libraries in them: the host needs NVIDIA's driver and container toolkit alone.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=
WORKDIR /source
RUN python3 -m venv /opt/paceline
# What changes seldom comes first: packages are installed anew only when these two files change.
COPY requirements.txt constraints.txt ./
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --disable-pip-version-check \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY src src
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt --no-deps . \
    && touch /opt/paceline/ready

FROM ${BASE}
# hadolint ignore=DL3008  # Debian's mirrors keep the newest version of a package alone: a pinned one breaks the build
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 paceline \
    && useradd --uid 10001 --gid 10001 --create-home paceline \
    && mkdir -p /workspace/runs \
    && chown -R paceline:paceline /workspace
COPY --from=build /opt/paceline /opt/paceline
WORKDIR /workspace
COPY --chown=10001:10001 Makefile pyproject.toml constraints.txt ./
COPY --chown=10001:10001 configs configs
# `make run` finds the virtual environment where it looks for it, and takes it as it is.
RUN ln -s /opt/paceline .venv && touch /opt/paceline/ready
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
HEALTHCHECK --interval=30s --timeout=15s --start-period=30s --retries=3 \
    CMD ["python", "-m", "paceline.launch.pod", "alive"]
CMD ["paceline", "train", "configs/digits.yaml"]

# Replicax with the versions of requirements.lock, for one kind of hardware:
#
#     docker build --tag replicax .                                 # CPUs
#     docker build --tag replicax:cuda --build-arg JAX=cuda13 .     # NVIDIA GPUs; or tpu
#
# EXTRAS are those of pyproject.toml: --build-arg EXTRAS=all,ray,wandb

ARG PYTHON=3.12
ARG JAX=cpu

FROM python:${PYTHON}-slim AS cpu
FROM cpu AS tpu
FROM cpu AS cuda13
# The libraries of CUDA come with jax; the driver is the host's, which NVIDIA's toolkit adds.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${JAX}
ARG JAX
ARG EXTRAS=all
WORKDIR /opt/replicax
COPY pyproject.toml hatch_build.py requirements.lock README.md LICENSE ./
COPY src ./src
# With hashes, pip would ask for those of every package, also of the extras that are not in the lock.
RUN sed -n 's/^\([a-z].*\) \\$/\1/p' requirements.lock >constraints.txt \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" "jax[${JAX}]"

RUN useradd --create-home --uid 1000 replicax
USER 1000
WORKDIR /home/replicax
CMD ["replicax", "doctor"]

# The `megatron-ddrp` command on CPUs: preprocessing, pre-training, export and evaluation.
#
#   docker build --tag megatron-ddrp .
#   docker run --rm --shm-size 1g --user "$(id -u):$(id -g)" --volume "$PWD:/data" megatron-ddrp --help
#
# The folder /data is where commands run, so paths are those of your current folder.
#
#   PYTHON        Python of the image, 3.10 or newer
#   TORCH         the torch to install, as pip takes it
#   TORCH_INDEX   where its build comes from: PyTorch's wheels without CUDA; empty for PyPI's, which carry CUDA
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"

# For compiled layers and Triton, which build small parts when they first run.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "$TORCH" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}

COPY . /src
RUN pip install --no-cache-dir --constraint /src/requirements-lock.txt "/src[hf,glue,plots,compare,sentences,parquet]"

# Any user may run it (--user): compiled parts and caches go to a home that everybody can write.
RUN useradd --create-home megatron && chmod 1777 /home/megatron
ENV HOME=/home/megatron USER=megatron
USER megatron
WORKDIR /data
ENTRYPOINT ["megatron-ddrp"]

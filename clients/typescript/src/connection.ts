/** Connections of gRPC, one for each stream. */

import { Buffer } from "node:buffer";

import * as grpc from "@grpc/grpc-js";

const MOST_MESSAGE = 80 << 20;

/** Certificates for `https://` addresses, in PEM. */
export interface StreamTls {
  ca?: string | Uint8Array | undefined;
  cert?: string | Uint8Array | undefined;
  key?: string | Uint8Array | undefined;
}

/** A connection to an address, which begins with its first call. */
export function connectionTo(address: string, tls: StreamTls = {}): grpc.Client {
  const { target, isSecure } = targetOf(address);
  const pem = (part: string | Uint8Array | undefined): Buffer | null => (part === undefined ? null : Buffer.from(part));
  const credentials = isSecure
    ? grpc.credentials.createSsl(pem(tls.ca), pem(tls.key), pem(tls.cert))
    : grpc.credentials.createInsecure();
  return new grpc.Client(target, credentials, {
    "grpc.max_receive_message_length": MOST_MESSAGE,
    // A connection of its own for each stream: one that is half open is of no use for the next.
    "grpc.use_local_subchannel_pool": 1,
    // Without a buffer for retries a write ends when the connection has taken it, and the source opens streams again
    // by itself.
    "grpc.per_rpc_retry_buffer_size": 0,
  });
}

/** Reads an address. */
export function targetOf(text: string): { target: string; isSecure: boolean } {
  const url = URL.canParse(text) ? new URL(text) : undefined;
  if (url?.protocol !== "http:" && url?.protocol !== "https:") {
    throw new TypeError(`url: ${JSON.stringify(text)} is no address; write "http://127.0.0.1:7601"`);
  }
  const isSecure = url.protocol === "https:";
  return { target: `${url.hostname}:${url.port === "" ? (isSecure ? "443" : "80") : url.port}`, isSecure };
}

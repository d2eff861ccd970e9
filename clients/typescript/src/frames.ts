/** The messages of `Tasks.StreamTasks`, as `@grpc/proto-loader` reads them, and their forms in this package. */

import { Buffer } from "node:buffer";

import { milliseconds } from "./duration.js";
import type { Extension, Report } from "./source.js";
import type { Encoding, ItemAnswer, ItemStatus, LeasedTask, Priority } from "./types.js";
import type { Json } from "./wire.js";

interface Timestamp {
  seconds: number;
  nanos: number;
}

interface ItemResult {
  id: string;
  status: string;
  error: string;
  lease_expires_at: Timestamp | null;
}

/** What a worker sends. An absent field is none. */
export interface WorkerFrame {
  open?: Json;
  number?: number;
  completions?: Json[];
  rejections?: Json[];
  extensions?: Json[];
  started?: string[];
  surrender?: boolean;
  want?: number;
  close?: boolean;
}

export interface SessionOpened {
  session: string;
  resumed: boolean;
  granted: number;
  max_tasks: number;
  heartbeat: Timestamp | null;
  timeout: Timestamp | null;
}

export interface FrameAnswer {
  number: number;
  completions: ItemResult[];
  rejections: ItemResult[];
  extensions: ItemResult[];
  granted: number;
}

interface PbTask {
  id: string;
  queue: string;
  key: Buffer;
  payload: Buffer;
  headers: Record<string, string>;
  traceparent: string;
  lease_token: string;
  lease_expires_at: Timestamp | null;
  attempt: number;
  replicas: number;
  priority: string;
  payload_encoding: string;
  limit_key: string;
}

/** What taskd sends. */
export interface TaskdFrame {
  opened: SessionOpened | null;
  tasks: PbTask[];
  answer: FrameAnswer | null;
  ended: ItemResult[];
  closing: { reason: string } | null;
}

export function millisecondsOf(time: Timestamp | null): number {
  return time === null ? 0 : time.seconds * 1000 + time.nanos / 1e6;
}

/** A time, or a length of time, as protobuf has it. */
export function timeOf(ms: number): Timestamp {
  if (!Number.isFinite(ms)) throw new TypeError("this is no time");
  return { seconds: Math.floor(ms / 1000), nanos: Math.round((ms % 1000) * 1e6) };
}

/** Reads a task. `lease` is the length that the session asked for: the clock here may not be taskd's. */
export function taskOf(pb: PbTask, lease: number): LeasedTask {
  const encoding = pb.payload_encoding.replace("ENCODING_", "").toLowerCase();
  const key = pb.key.toString();
  return {
    id: pb.id,
    queue: pb.queue,
    key,
    ...(Buffer.from(key).equals(pb.key) ? {} : { keyBytes: new Uint8Array(pb.key) }),
    ...valueOf(pb.payload, encoding),
    headers: pb.headers,
    traceparent: pb.traceparent,
    leaseToken: pb.lease_token,
    leaseExpiresAt: new Date(millisecondsOf(pb.lease_expires_at)),
    leaseLeft: lease,
    isInSession: true,
    attempt: pb.attempt,
    replicas: pb.replicas,
    priority: pb.priority.replace("PRIORITY_", "").toLowerCase() as Priority,
    ...(pb.limit_key === "" ? {} : { limitKey: pb.limit_key }),
  };
}

/** A payload as it was inserted. One whose encoding nobody said is what it looks like, as over HTTP. */
function valueOf(bytes: Buffer, encoding: string): { payload: unknown; payloadEncoding?: Encoding } {
  if (bytes.length === 0) return { payload: null };
  if (encoding === "bytes") return { payload: new Uint8Array(bytes), payloadEncoding: "bytes" };
  const text = bytes.toString();
  if (encoding === "text") return { payload: text, payloadEncoding: "text" };
  try {
    return { payload: JSON.parse(text), payloadEncoding: "json" };
  } catch {
    const isText = Buffer.from(text).equals(bytes);
    if (isText) return { payload: text, payloadEncoding: "text" };
    return { payload: new Uint8Array(bytes), payloadEncoding: "bytes" };
  }
}

export function answerOf({ id, status, error, lease_expires_at: at }: ItemResult): ItemAnswer {
  return {
    id,
    status: status.replace("ITEM_STATUS_", "") as ItemStatus,
    ...(error === "" ? {} : { error }),
    ...(at === null ? {} : { leaseExpiresAt: new Date(millisecondsOf(at)) }),
  };
}

export function extensionOf({ id, leaseToken, by }: Extension): Json {
  return { id, lease_token: leaseToken, by: timeOf(by) };
}

/** A rejection out of its JSON. */
export function rejectionOf({ text }: Report): Json {
  const { delay, limit, ...rest } = JSON.parse(text) as { delay?: string; limit?: Json };
  return { ...rest, ...(delay === undefined ? {} : { delay: durationOf(delay) }), ...limitOf(limit) };
}

/**
 * A completion out of its JSON. Undefined if it has fields or values that this package does not know: HTTP takes them,
 * or says what is wrong.
 */
export function completionOf({ text }: Report): Json | undefined {
  type Completion = Json & { discovered?: Json[]; limit?: Json };
  const { id, lease_token, discovered = [], limit, ...rest } = JSON.parse(text) as Completion;
  try {
    const found = discovered.map((one) => newTaskOf(one));
    return { id, lease_token, ...bytesOf(rest, "result"), discovered: found, ...limitOf(limit) };
  } catch {
    return undefined;
  }
}

const same = (value: unknown): unknown => value;
const duration = (value: unknown): unknown => durationOf(String(value));
const count = (value: unknown): unknown => known(value, Number.isSafeInteger(value) && Number(value) >= 0);
const oneOf = (prefix: string, names: readonly string[]) => (value: unknown) => {
  const name = String(value).toUpperCase();
  return known(`${prefix}_${name}`, names.includes(name));
};

/** The fields of a new task in JSON, and their values in protobuf. */
const FIELDS: Readonly<Record<string, (value: unknown) => unknown>> = {
  queue: same,
  port: same,
  key: (value) => Buffer.from(String(value)),
  replicas: count,
  priority: oneOf("PRIORITY", ["HIGH", "MEDIUM", "LOW"]),
  delay: duration,
  not_before: (value) => timeOf(new Date(String(value)).getTime()),
  deadline: (value) => timeOf(new Date(String(value)).getTime()),
  finish_within: duration,
  lease_duration: duration,
  max_attempts: count,
  headers: same,
  traceparent: same,
  idempotency_key: same,
  limit_key: same,
  sequence: same,
  on_dead: oneOf("ON_DEAD", ["NEXT", "HOLD"]),
  tree: (value) => treeOf(value as string | Json),
  backoff: (value) => fieldsOf(value as Json, BACKOFF),
};

const BACKOFF: Readonly<Record<string, (value: unknown) => unknown>> = {
  kind: oneOf("BACKOFF_KIND", ["CONSTANT", "LINEAR", "EXPONENTIAL"]),
  initial: duration,
  maximum: duration,
  jitter: same,
  give_up_after: duration,
};

const TREE: Readonly<Record<string, (value: unknown) => unknown>> = {
  then: same,
  timeout: duration,
  on_dead: oneOf("TREE_ON_DEAD", ["COUNT", "IGNORE", "HOLD"]),
};

function treeOf(tree: string | Json): Json {
  if (typeof tree !== "string") {
    return fieldsOf(tree, TREE);
  }
  return tree === "new" ? {} : { id: tree };
}

const LIMIT: Readonly<Record<string, (value: unknown) => unknown>> = { hold: duration, pace: duration };

function limitOf(limit: Json | undefined): Json {
  return limit === undefined ? {} : { limit: fieldsOf(limit, LIMIT) };
}

function newTaskOf({ payload, payload_base64, ...rest }: Json): Json {
  return { ...bytesOf({ payload, payload_base64 }, "payload"), ...fieldsOf(rest, FIELDS) };
}

function fieldsOf(read: Json, fields: Readonly<Record<string, (value: unknown) => unknown>>): Json {
  return Object.fromEntries(
    Object.entries(read).map(([name, value]) => {
      const field = Object.hasOwn(fields, name) ? fields[name] : undefined;
      return [name, known(field, field !== undefined)?.(value)];
    }),
  );
}

function known<T>(value: T, isKnown: boolean): T {
  if (!isKnown) throw new TypeError("this has no form in protobuf");
  return value;
}

/** A payload or a result with its encoding. */
function bytesOf(read: Json, name: "payload" | "result"): Json {
  const [value, base64] = [read[name], read[`${name}_base64`]];
  const encoded = (bytes: Buffer, encoding: string): Json => ({
    [name]: bytes,
    [`${name}_encoding`]: `ENCODING_${encoding}`,
  });
  if (typeof base64 === "string") return encoded(Buffer.from(base64, "base64"), "BYTES");
  if (value === undefined) return {};
  return typeof value === "string"
    ? encoded(Buffer.from(value), "TEXT")
    : encoded(Buffer.from(JSON.stringify(value)), "JSON");
}

function durationOf(text: string): Timestamp {
  return timeOf(milliseconds(text, "a duration"));
}

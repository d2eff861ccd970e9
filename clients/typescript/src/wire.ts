import { Buffer } from "node:buffer";

import { durationText } from "./duration.js";
import type { DiscoveredTask, Encoding, LimitReport, NewRecord, NewTask, NewTree, TaskBackoff } from "./types.js";

export type Json = Record<string, unknown>;

function bytesOf(value: unknown): Uint8Array | undefined {
  if (value instanceof ArrayBuffer) return new Uint8Array(value);
  if (ArrayBuffer.isView(value)) return new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
  return undefined;
}

/** Writes a value as JSON. The error says which value has no form in JSON. */
function jsonText(value: unknown, name: string): string {
  let text: unknown;
  try {
    text = JSON.stringify(value);
  } catch (error) {
    throw new TypeError(`${name} cannot be written as JSON: ${String(error)}`, { cause: error });
  }
  if (typeof text !== "string") throw new TypeError(`${name} cannot be written as JSON: it is a ${typeof value}`);
  const flaw = flawOf(value);
  if (flaw !== undefined) throw new TypeError(`${name} cannot be written as JSON: ${name}${flaw}`);
  return text;
}

/** Types of which JSON writes nothing but `{}`. */
const EMPTIED = new Set(["Map", "Set", "WeakMap", "WeakSet", "RegExp", "Promise", "ArrayBuffer", "SharedArrayBuffer"]);

/**
 * The first part of a value that `JSON.stringify` changes without an error, for example ".sizes[2] has the type Map".
 * `undefined`, functions and symbols are left out of objects, as everywhere in JavaScript.
 */
function flawOf(value: unknown): string | undefined {
  if (typeof value === "number") return Number.isFinite(value) ? undefined : ` is ${String(value)}`;
  // An object with `toJSON` says itself what it is in JSON.
  if (typeof value !== "object" || value === null || "toJSON" in value) return undefined;
  const kind = Object.prototype.toString.call(value).slice(8, -1);
  if (EMPTIED.has(kind) || value instanceof Error || ArrayBuffer.isView(value)) return ` has the type ${kind}`;
  if (Array.isArray(value)) {
    for (const [place, inner] of value.entries()) {
      const flaw = flawOf(inner);
      if (flaw !== undefined) return `[${String(place)}]${flaw}`;
    }
    return undefined;
  }
  for (const name of Object.keys(value)) {
    const flaw = flawOf((value as Json)[name]);
    if (flaw !== undefined) return `.${name}${flaw}`;
  }
  return undefined;
}

/** A payload or a result as a member of a JSON object; "" if there is none. */
function valueMember(name: "payload" | "result" | "value", value: unknown): string {
  if (value === undefined || value === null) return "";
  const bytes = bytesOf(value);
  if (bytes !== undefined) {
    return `"${name}_base64":"${Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("base64")}"`;
  }
  return `"${name}":${jsonText(value, name)}`;
}

const plain = (wire: string) => (value: unknown) => `"${wire}":${jsonText(value, wire)}`;
const duration = (wire: string) => (value: unknown) => `"${wire}":"${durationText(value as number | string, wire)}"`;

/** Each field of a backoff, and how taskd reads it. */
const BACKOFF: Readonly<Record<keyof TaskBackoff, (value: unknown) => string>> = {
  kind: plain("kind"),
  initial: duration("initial"),
  maximum: duration("maximum"),
  jitter: plain("jitter"),
  giveUpAfter: duration("give_up_after"),
};

/** Each field of a new tree, and how taskd reads it. */
const TREE: Readonly<Record<keyof NewTree, (value: unknown) => string>> = {
  then: plain("then"),
  timeout: duration("timeout"),
  onDead: plain("on_dead"),
};

/** Each field of a new task, and how taskd reads it. */
const MEMBERS: Readonly<Record<keyof NewTask | "port", (value: unknown) => string>> = {
  queue: plain("queue"),
  port: plain("port"),
  key: plain("key"),
  payload: (value) => valueMember("payload", value),
  replicas: plain("replicas"),
  priority: plain("priority"),
  delay: duration("delay"),
  notBefore: plain("not_before"),
  deadline: plain("deadline"),
  finishWithin: duration("finish_within"),
  leaseDuration: duration("lease_duration"),
  maxAttempts: plain("max_attempts"),
  headers: plain("headers"),
  traceparent: plain("traceparent"),
  idempotencyKey: plain("idempotency_key"),
  limitKey: plain("limit_key"),
  sequence: plain("sequence"),
  onDead: plain("on_dead"),
  tree: (value) => treeText(value as string | object),
  backoff: (value) => `"backoff":${objectText("a backoff", BACKOFF, value as object)}`,
  fields: (value) =>
    Object.entries(value as object)
      .map(([name, field]) => `${JSON.stringify(name)}:${jsonText(field, name)}`)
      .join(","),
};

function treeText(tree: string | object): string {
  const text = typeof tree === "string" ? JSON.stringify(tree) : objectText("a tree", TREE, tree);
  return `"tree":${text}`;
}

/** An object as JSON, by the fields that it may have. Throws if it has another one. */
function objectText(
  what: string,
  fields: Readonly<Record<string, (value: unknown) => string>>,
  object: object,
  first: string[] = [],
): string {
  const members = first;
  for (const [name, value] of Object.entries(object)) {
    if (value === undefined) continue;
    const write = Object.hasOwn(fields, name) ? fields[name] : undefined;
    if (write === undefined) {
      throw new TypeError(`${what} has no field ${JSON.stringify(name)}; it has ${Object.keys(fields).join(", ")}`);
    }
    const member = write(value);
    if (member !== "") members.push(member);
  }
  return `{${members.join(",")}}`;
}

/** A new task as JSON. Throws if a part of it has no form in JSON, or is no part of a task. */
export function taskText(task: NewTask | DiscoveredTask, queue?: string): string {
  const isOutput = "port" in task && task.port !== undefined;
  const first = task.queue === undefined && !isOutput && queue !== undefined ? [MEMBERS.queue(queue)] : [];
  return objectText("a task", MEMBERS, task, first);
}

/** Each field of a record, and how taskd reads it. */
const RECORD: Readonly<Record<keyof NewRecord, (value: unknown) => string>> = {
  value: (value) => valueMember("value", value),
  key: plain("key"),
  attributes: plain("attributes"),
  id: plain("id"),
};

/** A record to publish as JSON. Throws if a part of it has no form in JSON, or is no part of a record. */
export function recordText(record: NewRecord): string {
  return objectText("a record", RECORD, record);
}

/** A completion as JSON. `discovered` has tasks that are JSON already. */
export function completionText(
  id: string,
  leaseToken: string,
  result: unknown,
  discovered: readonly string[],
  limit?: LimitReport,
): string {
  const members = [`"id":${JSON.stringify(id)}`, `"lease_token":${JSON.stringify(leaseToken)}`];
  const value = valueMember("result", result);
  if (value !== "") members.push(value);
  if (discovered.length > 0) members.push(`"discovered":[${discovered.join(",")}]`);
  if (limit !== undefined) members.push(`"limit":${JSON.stringify(limit)}`);
  return `{${members.join(",")}}`;
}

/** True for an object that is neither null nor a list. */
export function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function fromBase64(text: unknown): Uint8Array {
  return new Uint8Array(Buffer.from(String(text), "base64"));
}

const DATES = new Set(["not_before", "from", "until"]);

/**
 * Reads an object of taskd: names in camelCase, times as `Date`, a payload or a result as what it was. It changes the
 * names of this object only, so the payload keeps its own.
 */
export function fromWire<T>(read: Json): T {
  const made: Json = {};
  for (const [name, value] of Object.entries(read)) {
    if (name === "payload_base64") made["payload"] = fromBase64(value);
    else if (name === "result_base64") made["result"] = fromBase64(value);
    else if (name === "key_base64") made["keyBytes"] = fromBase64(value);
    else if (typeof value === "string" && (name.endsWith("_at") || DATES.has(name)))
      made[camel(name)] = new Date(value);
    else made[camel(name)] = value;
  }
  return made as T;
}

/** The same for an object with a payload or a result: `null` without one. */
export function withValue<T>(read: Json, name: "payload" | "result"): T {
  return fromWire<T>({ [name]: null, ...read });
}

function camel(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

/** The kind of a value, as taskd tells it. */
export function encodingOf(value: unknown): Encoding | undefined {
  if (value === undefined || value === null) return undefined;
  if (bytesOf(value) !== undefined) return "bytes";
  return typeof value === "string" ? "text" : "json";
}

import { backoff, milliseconds, pause, LONGEST_TIMER, type Duration } from "./duration.js";
import {
  ConnectionError,
  InvalidAnswerError,
  Problem,
  TaskdError,
  TimeoutError,
  isTransient,
  problemOf,
} from "./errors.js";
import { isObject, type Json } from "./wire.js";

/** Where taskd is, and how to reach it. */
export interface ConnectionOptions {
  /** The address of taskd's HTTP, or several: if one does not answer, the next one is tried. */
  url?: string | readonly string[] | undefined;
  /** The access token, or a function that knows it. It is asked for each call, so a new token needs no restart. */
  token?: string | (() => string | Promise<string>) | undefined;
  /** The time for one try of a call ("30s"). A call that waits for tasks has this beside its wait. */
  timeout?: Duration | undefined;
  /** How long a call is tried again after transient errors ("1m"). Workers try for ever. */
  retryFor?: Duration | undefined;
  /** A header for each call. */
  headers?: Readonly<Record<string, string>> | undefined;
  /** In place of the global `fetch`, for example that of undici. */
  fetch?: typeof globalThis.fetch | undefined;
  /** undici's dispatcher, for example an `Agent` with a certificate authority and a client's certificate. */
  dispatcher?: unknown;
  /** More options for each `fetch`: `client` of Deno, `tls` of Bun. */
  fetchOptions?: Readonly<Record<string, unknown>> | undefined;
}

export interface Call {
  method: "GET" | "POST" | "PUT" | "DELETE";
  path: string;
  body?: string | undefined;
  /** "application/json" if absent. */
  contentType?: string;
  /** The list that an answer must have. Without it, something else than taskd has answered. */
  list?: string;
  /** Time that this call takes on purpose, in milliseconds. */
  wait?: number;
  /** The time for one try beside `wait`, in milliseconds, in place of the client's `timeout`. */
  timeout?: number;
  /** Headers of this call. */
  headers?: Readonly<Record<string, string>>;
  signal?: AbortSignal | undefined;
  /** The signal counts only until the answer begins: what it brings is not lost. */
  keepBegunAnswer?: boolean;
}

export interface Retries {
  /** Milliseconds; `Infinity`: for ever. */
  for: number;
  /** Hears of each failed try. */
  onFailure?: (error: unknown, wait: number) => void;
}

/** An answer of taskd. */
export interface Answer {
  status: number;
  text: string;
  /** The text, read as JSON; empty for lines. */
  json: Json;
  /** The end of the answer is missing: the connection broke. */
  cut?: Error;
  /** taskd's clock at the answer, in milliseconds since 1970, rounded down to a second. */
  date: number | undefined;
}

/** An answer whose body comes as it is made. */
export interface OpenAnswer {
  status: number;
  headers: Headers;
  body: AsyncIterable<Uint8Array> | null;
  /** Ends the connection, with the error that whoever reads the body then meets. */
  close: (reason: Error) => void;
  /** What a failure of the body means. */
  explain: (error: unknown) => unknown;
  /** The next call goes to another address, if there is one; then true. */
  moveOn: () => boolean;
}

/** Calls taskd: tries again, at the next address if one does not answer. */
export class Transport {
  readonly #addresses: readonly string[];
  readonly #options: ConnectionOptions;
  readonly #timeout: number;
  readonly retryFor: number;
  /** The address that answered last. */
  #current = 0;

  constructor(options: ConnectionOptions) {
    const urls = typeof options.url === "string" ? [options.url] : (options.url ?? ["http://127.0.0.1:7600"]);
    if (urls.length === 0) throw new TypeError("url: there is no address");
    this.#addresses = urls.map(addressOf);
    this.#options = options;
    this.#timeout = milliseconds(options.timeout ?? "30s", "timeout");
    this.retryFor = milliseconds(options.retryFor ?? "1m", "retryFor");
  }

  /** Calls until taskd answers. Throws the last error when the time for tries is over, and a final one at once. */
  async call(call: Call, retries: Retries = { for: this.retryFor }): Promise<Answer> {
    const begun = performance.now();
    for (let failures = 1; ; failures += 1) {
      const address = this.#current;
      try {
        return await this.#once(this.#addresses[address] ?? "", call);
      } catch (error) {
        if (!isTransient(error)) throw error;
        const moved = this.#moveOn(address, error);
        // A round over all addresses counts as one failure.
        const wait =
          moved && failures % this.#addresses.length !== 0
            ? 0
            : Math.max(backoff(Math.ceil(failures / this.#addresses.length)), retryAfterOf(error));
        // Each address has a try. Those that are silent take too long for that.
        const isFree = wait === 0 && !(error instanceof TimeoutError);
        if (!isFree && performance.now() - begun + wait > retries.for) throw error;
        retries.onFailure?.(error, wait);
        await pause(wait, call.signal);
        call.signal?.throwIfAborted();
      }
    }
  }

  /** Calls, and reads the answer as a JSON object. */
  async json(call: Call, retries?: Retries): Promise<Json> {
    return (await this.call(call, retries)).json;
  }

  /** Calls, and reads a list in the answer. */
  async list(call: Call & { list: string }, retries?: Retries): Promise<Json[]> {
    return listOf(await this.json(call, retries), call.list);
  }

  /** Goes to the next address, unless a concurrent call has done so. A busy taskd is no reason: all share its queues. */
  #moveOn(from: number, error?: unknown): boolean {
    if (this.#addresses.length === 1 || (error instanceof Problem && error.status === 429)) return false;
    if (this.#current === from) this.#current = (from + 1) % this.#addresses.length;
    return true;
  }

  /** Begins to read an answer that goes on. It tries once; the next call goes to another address if that fails. */
  async open(call: Call): Promise<OpenAnswer> {
    const address = this.#current;
    const attempt = new Attempt(this.#addresses[address] ?? "", call, this.#timeout);
    try {
      const response = await this.#fetch(attempt, call);
      if (!response.ok)
        throw problemOf(attempt.what, response.status, await response.text(), retryAfter(response.headers));
      attempt.stopClock();
      return {
        status: response.status,
        headers: response.headers,
        body: response.body as unknown as AsyncIterable<Uint8Array> | null,
        close: (reason) => {
          attempt.abort(reason);
        },
        explain: (error) => attempt.explain(error),
        moveOn: () => this.#moveOn(address),
      };
    } catch (error) {
      const explained = attempt.explain(error);
      attempt.end();
      if (isTransient(explained)) this.#moveOn(address, explained);
      throw explained;
    }
  }

  async #once(address: string, call: Call): Promise<Answer> {
    const attempt = new Attempt(address, call, this.#timeout);
    try {
      const response = await this.#fetch(attempt, call);
      if (call.keepBegunAnswer === true) attempt.detach();
      const answer = await read(response, call);
      if (response.ok || response.status === 422) return checked(answer, call);
      throw problemOf(attempt.what, response.status, answer.text, retryAfter(response.headers));
    } catch (error) {
      throw attempt.explain(error);
    } finally {
      attempt.end();
    }
  }

  async #fetch(attempt: Attempt, call: Call): Promise<Response> {
    const { token, headers, fetch = globalThis.fetch, dispatcher, fetchOptions } = this.#options;
    const secret = typeof token === "function" ? await attempt.orAbort(token()) : token;
    const init = {
      ...fetchOptions,
      ...(dispatcher === undefined ? {} : { dispatcher }),
      method: call.method,
      headers: {
        ...headers,
        ...call.headers,
        ...(call.body === undefined ? {} : { "content-type": call.contentType ?? "application/json" }),
        ...(secret === undefined ? {} : { authorization: `Bearer ${secret}` }),
      },
      ...(call.body === undefined ? {} : { body: call.body }),
      // taskd never redirects, and a token must not follow one.
      redirect: "manual",
      signal: attempt.signal,
    };
    return fetch(attempt.url, init as RequestInit);
  }
}

/** One try of a call: it ends in time, or when the caller's signal is aborted. */
class Attempt {
  readonly what: string;
  readonly url: string;
  readonly #controller = new AbortController();
  readonly #outer: AbortSignal | undefined;
  readonly #timer: NodeJS.Timeout;
  readonly #onAbort = (): void => {
    this.#controller.abort(this.#outer?.reason);
  };

  constructor(address: string, call: Call, timeout: number) {
    call.signal?.throwIfAborted();
    this.url = address + call.path;
    this.what = `${call.method} ${this.url}`;
    const limit = (call.timeout ?? timeout) + (call.wait ?? 0);
    this.#timer = setTimeout(
      () => {
        this.abort(new TimeoutError(`${this.what}: no answer within ${String(limit)} ms`));
      },
      Math.min(limit, LONGEST_TIMER),
    );
    this.#outer = call.signal;
    this.#outer?.addEventListener("abort", this.#onAbort, { once: true });
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  abort(reason: Error): void {
    this.#controller.abort(reason);
    this.end();
  }

  /** The caller's signal counts no more. */
  detach(): void {
    this.#outer?.removeEventListener("abort", this.#onAbort);
  }

  stopClock(): void {
    clearTimeout(this.#timer);
  }

  end(): void {
    this.detach();
    this.stopClock();
  }

  /** Waits for something that knows no signals. */
  async orAbort<T>(value: T | Promise<T>): Promise<T> {
    const { signal } = this.#controller;
    let onAbort = (): void => undefined;
    const aborted = new Promise<never>((_, reject) => {
      onAbort = () => {
        reject(signal.reason);
      };
      signal.addEventListener("abort", onAbort, { once: true });
    });
    try {
      return await Promise.race([value, aborted]);
    } finally {
      signal.removeEventListener("abort", onAbort);
    }
  }

  /** What a failure means. */
  explain(error: unknown): unknown {
    const { signal } = this.#controller;
    if (signal.aborted && signal.reason instanceof TaskdError) return signal.reason;
    if (error instanceof TaskdError) return error;
    if (this.#outer?.aborted === true) return this.#outer.reason;
    return new ConnectionError(`${this.what}: ${reasonOf(error)}`, { cause: error });
  }
}

/** Reads an answer. Of lines, those before a break of the connection count. */
async function read(response: Response, call: Call): Promise<Answer> {
  const date = Date.parse(response.headers.get("date") ?? "");
  const answer: Answer = { status: response.status, text: "", json: {}, date: Number.isNaN(date) ? undefined : date };
  if (call.contentType === undefined || response.body === null) {
    answer.text = await response.text();
    return answer;
  }
  const decoder = new TextDecoder();
  try {
    for await (const chunk of response.body as unknown as AsyncIterable<Uint8Array>) {
      answer.text += decoder.decode(chunk, { stream: true });
    }
  } catch (error) {
    answer.cut = error instanceof Error ? error : new Error(String(error));
  }
  return answer;
}

/** Reads the JSON of an answer, so that garbage of a proxy is tried again. Lines are read one by one later. */
function checked(answer: Answer, call: Call): Answer {
  if (call.contentType !== undefined) return answer;
  const json = objectOf(answer.text, `${call.method} ${call.path}`);
  if (call.list !== undefined) listOf(json, call.list);
  return { ...answer, text: "", json };
}

/** Reads text as a JSON object. */
export function objectOf(text: string, call: string): Json {
  let read: unknown;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new InvalidAnswerError(`${call}: the answer is not JSON`, { cause: error });
  }
  if (!isObject(read)) throw new InvalidAnswerError(`${call}: the answer is no JSON object`);
  return read;
}

/** A list of objects in an answer. */
export function listOf(json: Json, name: string): Json[] {
  const list = json[name];
  if (Array.isArray(list) && list.every(isObject)) return list;
  throw new InvalidAnswerError(`the answer has no list ${JSON.stringify(name)}`);
}

function addressOf(text: string): string {
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw new TypeError(`url: ${JSON.stringify(text)} is no address; write "http://127.0.0.1:7600"`);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw new TypeError(`url: ${JSON.stringify(text)} begins neither with http:// nor with https://`);
  }
  return url.origin + url.pathname.replace(/\/+$/, "");
}

/** `Retry-After` in milliseconds: seconds, or a date. */
function retryAfter(headers: Headers): number | undefined {
  const text = headers.get("retry-after");
  if (text === null) return undefined;
  const ms = /^\d+$/.test(text) ? Number(text) * 1000 : Date.parse(text) - Date.now();
  return Number.isNaN(ms) ? undefined : Math.min(Math.max(ms, 0), 60_000);
}

/** How long taskd asks to wait, in milliseconds. */
export function retryAfterOf(error: unknown): number {
  return error instanceof Problem ? (error.retryAfter ?? 0) : 0;
}

/** The cause of a failed `fetch`, which itself says only "fetch failed". */
export function reasonOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  const { cause } = error;
  if (cause instanceof AggregateError) return cause.errors.map(reasonOf).join("; ");
  const reason = cause instanceof Error && cause.message !== "" ? cause.message : error.message;
  // The other side does not speak HTTP/1.1.
  const isOther = cause instanceof Error && cause.name === "HTTPParserError";
  return isOther ? `${reason}; is this taskd's HTTP port? 7600 by default` : reason;
}

import { backoff, pause } from "./duration.js";
import { ConnectionError, InvalidAnswerError, TimeoutError, isTransient } from "./errors.js";
import { EventReader, type ServerEvent } from "./sse.js";
import { objectOf, retryAfterOf, type OpenAnswer, type Transport } from "./transport.js";
import type { QueueEvent, TaskEvent, TaskStatus, WatchGap } from "./types.js";

export interface WatchOptions {
  /** Goes on behind this event: `eventId` of one that the caller has seen. */
  lastEventId?: string | undefined;
  signal?: AbortSignal | undefined;
}

/** taskd sends something at least every 15 s. After so long without, in milliseconds, a connection is dead. */
const SILENCE = 45_000;
/** A connection that lived so long was good, in milliseconds. */
const GOOD = 5000;
const LONGEST_RETRY = 30_000;

const FINAL: readonly TaskStatus[] = ["COMPLETED", "DEAD", "CANCELLED"];

/** True if nothing happens to the task any more. */
export function isFinal(status: TaskStatus): boolean {
  return FINAL.includes(status);
}

/** The events of a task, to its final status. */
export async function* watchTask(
  transport: Transport,
  id: string,
  options: WatchOptions,
): AsyncGenerator<TaskEvent, void, undefined> {
  const watch = new Watch(transport, `/v1/tasks/${encodeURIComponent(id)}/events`, options);
  for await (const event of watch.events()) {
    if (event.type === "gap") continue;
    yield event;
    if (isFinal(event.status)) return;
  }
}

/** The events of a queue, without an end. */
export async function* watchQueue(
  transport: Transport,
  queue: string,
  options: WatchOptions,
): AsyncGenerator<QueueEvent, void, undefined> {
  const watch = new Watch(transport, `/v1/events?${new URLSearchParams({ queue }).toString()}`, options);
  yield* watch.events();
}

/** A stream of events over as many connections as it takes. */
class Watch {
  readonly #transport: Transport;
  readonly #path: string;
  readonly #signal: AbortSignal | undefined;
  #last: string | undefined;
  #wasOpen = false;
  /** Failures in a row, and the time of the first of them. */
  #failures = 0;
  #failingSince = 0;
  /** How long taskd asks to wait before a new connection. */
  #retry = 0;

  constructor(transport: Transport, path: string, options: WatchOptions) {
    this.#transport = transport;
    this.#path = path;
    this.#signal = options.signal;
    this.#last = options.lastEventId;
  }

  /** Ends only when taskd says that nothing more comes. */
  async *events(): AsyncGenerator<QueueEvent, void, undefined> {
    for (;;) {
      const connection = new Connection(this.#signal);
      let error: unknown;
      try {
        const answer = await connection.open(this.#transport, this.#path, this.#last);
        if (answer.status === 204) return;
        // Without an event to go on behind, nobody knows what happened between two connections.
        if (this.#wasOpen && this.#last === undefined) yield { type: "gap" };
        this.#wasOpen = true;
        for await (const event of connection.events(answer)) {
          if (event.retry !== undefined) this.#retry = Math.min(event.retry, LONGEST_RETRY);
          else if (event.name !== "end") this.#failures = 0;
          if (event.isComment) continue;
          // A taskd that stops sends its watchers away, and one whose token changed says so to the next call.
          if (event.name === "end") break;
          const read = eventOf(event);
          if (read === undefined) continue;
          if (read.type === "status") this.#last = read.eventId;
          yield read;
        }
        error = new ConnectionError(`GET ${this.#path}: the stream of events ended`);
        if (answer.moveOn()) this.#retry = 0;
      } catch (failure) {
        this.#signal?.throwIfAborted();
        if (!isTransient(failure)) throw failure;
        error = failure;
      } finally {
        connection.close();
      }
      await this.#pause(error, connection.age);
    }
  }

  /** Waits before the next connection, or throws if there was none for too long. */
  async #pause(error: unknown, age: number): Promise<void> {
    const now = performance.now();
    if (age > GOOD) this.#failures = 0;
    if (this.#failures === 0) this.#failingSince = now;
    this.#failures += 1;
    const wait = Math.max(backoff(this.#failures), this.#retry, retryAfterOf(error));
    if (now - this.#failingSince + wait > this.#transport.retryFor) throw error;
    await pause(wait, this.#signal);
    this.#signal?.throwIfAborted();
  }
}

/** One connection of a watch. */
class Connection {
  readonly #signal: AbortSignal | undefined;
  #answer: OpenAnswer | undefined;
  #opened = 0;

  constructor(signal: AbortSignal | undefined) {
    this.#signal = signal;
  }

  /** How long it has been open, in milliseconds. */
  get age(): number {
    return this.#opened === 0 ? 0 : performance.now() - this.#opened;
  }

  async open(transport: Transport, path: string, last: string | undefined): Promise<OpenAnswer> {
    const headers = { accept: "text/event-stream", ...(last === undefined ? {} : { "last-event-id": last }) };
    const answer = await transport.open({ method: "GET", path, headers, signal: this.#signal });
    this.#answer = answer;
    const type = answer.headers.get("content-type") ?? "";
    if (answer.status !== 204 && (!type.startsWith("text/event-stream") || answer.body === null)) {
      answer.moveOn();
      throw new InvalidAnswerError(`GET ${path}: the answer is no stream of events, but ${JSON.stringify(type)}`);
    }
    this.#opened = performance.now();
    return answer;
  }

  /** The events until the connection ends. A time without any sign of taskd is a failure. */
  async *events({ body, close, explain }: OpenAnswer): AsyncGenerator<ServerEvent, void, undefined> {
    const [decoder, reader] = [new TextDecoder(), new EventReader()];
    const chunks = (body ?? emptyBody())[Symbol.asyncIterator]();
    for (;;) {
      // The clock runs only while this waits for taskd, and not while its caller takes time.
      const timer = setTimeout(() => {
        close(new TimeoutError(`there was no event and no sign of taskd for ${String(SILENCE)} ms`));
      }, SILENCE);
      let chunk: IteratorResult<Uint8Array>;
      try {
        chunk = await chunks.next();
      } catch (error) {
        throw explain(error);
      } finally {
        clearTimeout(timer);
      }
      if (chunk.done === true) return;
      yield* reader.read(decoder.decode(chunk.value, { stream: true }));
    }
  }

  close(): void {
    this.#answer?.close(new ConnectionError("the watch has ended"));
  }
}

async function* emptyBody(): AsyncGenerator<Uint8Array> {
  // Nothing.
}

/** Reads an event; undefined for one of a newer taskd. */
function eventOf(event: ServerEvent): TaskEvent | WatchGap | undefined {
  if (event.name === "gap") return { type: "gap" };
  if (event.name !== "status") return undefined;
  const { id, queue, status, at } = objectOf(event.data, "an event");
  const time = new Date(String(at));
  if (typeof id !== "string" || typeof queue !== "string" || typeof status !== "string" || event.id === undefined) {
    throw new InvalidAnswerError(`an event lacks its id, queue or status: ${event.data.slice(0, 200)}`);
  }
  return { type: "status", eventId: event.id, id, queue, status: status as TaskStatus, at: time };
}

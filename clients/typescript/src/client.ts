import { Buffer } from "node:buffer";

import { durationText, milliseconds, type Duration } from "./duration.js";
import { InvalidAnswerError, RejectedError, TaskdError, isAboutBody } from "./errors.js";
import { insertAnswerOf, insertStream, type StreamOptions } from "./insert.js";
import { Transport, listOf, type ConnectionOptions } from "./transport.js";
import type {
  Attempt,
  IndexedInsertAnswer,
  InsertAnswer,
  ItemAnswer,
  NewRecord,
  NewTask,
  Priority,
  Published,
  QueueEvent,
  QueueView,
  TaskBackoff,
  TaskEvent,
  TaskFile,
  TaskFilter,
  TaskPage,
  TaskResult,
  TaskView,
} from "./types.js";
import { insertAndWait } from "./waiting.js";
import { watchQueue, watchTask, type WatchOptions } from "./watch.js";
import { fromWire, isObject, recordText, taskText, withValue, type Json } from "./wire.js";

interface CallOptions {
  signal?: AbortSignal | undefined;
}

/** With `wait`, an insert answers when its tasks are final, or when so much time is over. It needs the role `read`. */
interface WaitOptions extends CallOptions {
  wait?: Duration | undefined;
}

/** taskd takes so many records in a call, … */
const MOST_RECORDS = 1000;
/** … and 32 MiB, unless its settings say less. A call with more bytes than this has one record. */
const MOST_RECORD_BYTES = 4 << 20;

/** Calls taskd for programs that insert tasks and look after them. */
export class Client {
  readonly transport: Transport;

  constructor(options: ConnectionOptions = {}) {
    this.transport = new Transport(options);
  }

  /**
   * Inserts one task. A duplicate is no error; a rejected task throws `RejectedError`.
   *
   * A call whose answer is lost is repeated. taskd then answers `DUPLICATE`, with the id of the stored task; a task with
   * an `idempotencyKey` is `CREATED` again. With `wait` the answer has `taskStatus`, and the `results` of a completed
   * task; a duplicate waits for the task that has the key.
   */
  async insert<R = unknown>(task: NewTask, options: WaitOptions = {}): Promise<InsertAnswer<R>> {
    const [answer] = await this.#insert<R>(task, options);
    if (answer === undefined) throw new InvalidAnswerError("POST /v1/tasks: there is no answer about the task");
    if (answer.status === "REJECTED") throw new RejectedError(answer.error ?? "the task is rejected");
    return answer;
  }

  /**
   * Inserts tasks of a list, and answers for each in its order. It throws only if a call fails as a whole. With `wait`
   * it takes at most 1,000 tasks, which go in one call.
   */
  async insertBatch<R = unknown>(
    tasks: readonly NewTask[],
    options: StreamOptions & WaitOptions = {},
  ): Promise<IndexedInsertAnswer<R>[]> {
    const { wait, signal } = options;
    if (wait !== undefined) {
      const answers = await insertAndWait<R>(this.transport, tasks, milliseconds(wait, "wait"), signal);
      return answers.map((answer, index) => ({ index, ...answer }));
    }
    const answers: IndexedInsertAnswer<R>[] = [];
    for await (const answer of this.insertStream(tasks, options)) answers.push(answer as IndexedInsertAnswer<R>);
    return answers;
  }

  /**
   * Inserts tasks of any number in bounded memory, and yields an answer for each, in order. It reads from `tasks` only
   * as fast as taskd stores and the caller takes answers.
   */
  insertStream(
    tasks: Iterable<NewTask> | AsyncIterable<NewTask>,
    options?: StreamOptions,
  ): AsyncGenerator<IndexedInsertAnswer, void, undefined> {
    return insertStream(this.transport, tasks, options);
  }

  /** A task with its payload and history. Throws `NotFoundError` if taskd has none with this id. */
  async getTask<P = unknown>(id: string, options: CallOptions = {}): Promise<TaskFile<P>> {
    const read = await this.transport.json({ method: "GET", path: taskPath(id), list: "history", ...options });
    const file = withValue<TaskFile<P>>(read, "payload");
    if (isObject(read["backoff"])) file.backoff = fromWire<TaskBackoff>(read["backoff"]);
    file.history = listOf(read, "history").map((attempt) => fromWire<Attempt>(attempt));
    return file;
  }

  /** One page of a list of tasks, the newest first. */
  async listPage(filter: TaskFilter, page: { limit?: number; cursor?: string } & CallOptions = {}): Promise<TaskPage> {
    const { signal, ...of } = page;
    const path = `/v1/tasks?${query(filter, of)}`;
    const read = await this.transport.json({ method: "GET", path, list: "tasks", signal });
    return { ...fromWire<TaskPage>(read), tasks: listOf(read, "tasks").map((task) => fromWire<TaskView>(task)) };
  }

  /** All tasks of a filter, the newest first, page by page. */
  async *listTasks(filter: TaskFilter, options: CallOptions = {}): AsyncGenerator<TaskView, void, undefined> {
    let cursor: string | undefined;
    do {
      const page = await this.listPage(filter, { ...options, ...(cursor === undefined ? {} : { cursor }) });
      yield* page.tasks;
      cursor = page.cursor;
    } while (cursor !== undefined);
  }

  /**
   * Watches a task: its status now, then each change, in order, to `COMPLETED`, `DEAD` or `CANCELLED`. Throws
   * `NotFoundError` if there is no such task. A broken connection is made again, behind the last event.
   */
  watchTask(id: string, options: WatchOptions = {}): AsyncGenerator<TaskEvent, void, undefined> {
    return watchTask(this.transport, id, options);
  }

  /**
   * Watches all tasks of a queue, from now on, without an end: `break`, or the `signal`, ends it. After a `gap` events
   * may be missing.
   */
  watchQueue(queue: string, options: WatchOptions = {}): AsyncGenerator<QueueEvent, void, undefined> {
    return watchQueue(this.transport, queue, options);
  }

  /**
   * Publishes records to a topic, in calls of up to 1,000 and about 4 MiB, and answers for each in its order. A call whose
   * answer is lost is repeated, so a record may be there twice: give it an `id` by which readers can tell.
   *
   * After a call with a `TRY_LATER` no other one is made, and all further records are `TRY_LATER`: so records of a key
   * keep their order if you publish those again. An error after the first call is the `error` of these answers; before,
   * it is thrown.
   */
  async publish(topic: string, records: readonly NewRecord[], options: CallOptions = {}): Promise<Published[]> {
    const path = `/v1/topics/${encodeURIComponent(topic)}/records`;
    const texts = records.map(recordText);
    const published: Published[] = [];
    let most = MOST_RECORDS;
    let failure: string | undefined;
    while (published.length < texts.length && failure === undefined) {
      const some = firstOf(texts.slice(published.length, published.length + most));
      const call = { method: "POST", path, body: `[${some.join(",")}]`, list: "results", ...options } as const;
      try {
        const answers = (await this.transport.list(call)).map((answer) => fromWire<Published>(answer));
        if (answers.length !== some.length)
          throw new InvalidAnswerError(`POST ${path}: not all records have an answer`);
        published.push(...answers);
        if (answers.some(({ status }) => status === "TRY_LATER")) failure = "a record before it was not stored";
      } catch (error) {
        if (isAboutBody(error) && some.length > 1) {
          // taskd takes fewer at once, or one of them is to blame.
          most = Math.floor(some.length / 2);
        } else if (published.length === 0 || options.signal?.aborted === true || !(error instanceof TaskdError)) {
          throw error;
        } else if (isAboutBody(error)) {
          published.push({ status: "REJECTED", error: error.detail });
          most = MOST_RECORDS;
        } else failure = error.message;
      }
    }
    const missing = texts.slice(published.length);
    return [...published, ...missing.map((): Published => ({ status: "TRY_LATER", error: failure ?? "" }))];
  }

  /** The results that workers reported for a task. */
  async results<R = unknown>(id: string, options: CallOptions = {}): Promise<TaskResult<R>[]> {
    const path = `${taskPath(id)}/results`;
    const read = await this.transport.list({ method: "GET", path, list: "results", ...options });
    return read.map((result) => withValue<TaskResult<R>>(result, "result"));
  }

  /** Cancels unfinished tasks, at most 1,000. `OK`: no worker is credited for the task any more. */
  async cancel(ids: readonly string[], options?: CallOptions): Promise<ItemAnswer[]> {
    return this.#change("cancel", { ids }, options);
  }

  /** Sends dead and cancelled tasks again, at most 1,000. */
  async retry(ids: readonly string[], options?: CallOptions): Promise<ItemAnswer[]> {
    return this.#change("retry", { ids }, options);
  }

  /** Gives unfinished tasks another priority or another number of workers. */
  async change(
    ids: readonly string[],
    to: { priority?: Priority; replicas?: number },
    options?: CallOptions,
  ): Promise<ItemAnswer[]> {
    return this.#change("change", { ids, ...to }, options);
  }

  /** Offers live tasks anew: to all workers, away from one, or only to one. */
  async requeue(
    ids: readonly string[],
    whom: { to?: string; awayFrom?: string; reservedFor?: Duration } = {},
    options?: CallOptions,
  ): Promise<ItemAnswer[]> {
    const { to, awayFrom, reservedFor } = whom;
    const reserved = reservedFor === undefined ? undefined : durationText(reservedFor, "reservedFor");
    return this.#change("requeue", { ids, to, away_from: awayFrom, reserved_for: reserved }, options);
  }

  /** The open queues with their counts. */
  async queues(options: CallOptions = {}): Promise<QueueView[]> {
    const read = await this.transport.list({ method: "GET", path: "/v1/queues", list: "queues", ...options });
    return read.map((queue) => fromWire<QueueView>(queue));
  }

  /** Any other operation of `docs/api.md`, with JSON as taskd writes it. */
  async call(
    method: "GET" | "POST" | "PUT" | "DELETE",
    path: string,
    body?: unknown,
    options: CallOptions = {},
  ): Promise<Json> {
    const text = body === undefined ? undefined : JSON.stringify(body);
    return this.transport.json({ method, path, body: text, ...options });
  }

  async #insert<R>(task: NewTask, { wait, signal }: WaitOptions): Promise<InsertAnswer<R>[]> {
    if (wait !== undefined) return insertAndWait<R>(this.transport, [task], milliseconds(wait, "wait"), signal);
    const body = taskText(task);
    const read = await this.transport.list({ method: "POST", path: "/v1/tasks", body, list: "results", signal });
    return read.map((answer) => insertAnswerOf<R>(answer));
  }

  async #change(what: string, body: Json, options?: CallOptions): Promise<ItemAnswer[]> {
    const call = { method: "POST", path: `/v1/tasks:${what}`, body: JSON.stringify(body), list: "results" } as const;
    return (await this.transport.list({ ...call, ...options })).map((answer) => fromWire<ItemAnswer>(answer));
  }
}

/** The first of these texts that one call takes, at least one. */
function firstOf(texts: readonly string[]): readonly string[] {
  let bytes = 0;
  const end = texts.findIndex((text, place) => {
    bytes += Buffer.byteLength(text) + 1;
    return place > 0 && bytes > MOST_RECORD_BYTES;
  });
  return end < 0 ? texts : texts.slice(0, end);
}

function taskPath(id: string): string {
  return `/v1/tasks/${encodeURIComponent(id)}`;
}

function query(filter: TaskFilter, page: { limit?: number; cursor?: string }): string {
  const text = (value: unknown): string => (value instanceof Date ? value.toISOString() : String(value));
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...filter, ...page })) {
    if (value === undefined) continue;
    if (name === "keyPrefix") parameters.set("key_prefix", text(value));
    else if (name === "headers") {
      for (const [header, is] of Object.entries(value as object)) parameters.set(`header.${header}`, String(is));
    } else parameters.set(name, Array.isArray(value) ? value.join(",") : text(value));
  }
  return parameters.toString();
}

import { durationText, milliseconds, type Duration } from "./duration.js";
import { InvalidAnswerError, RejectedError } from "./errors.js";
import { insertAnswerOf, insertStream, type StreamOptions } from "./insert.js";
import { Transport, listOf, type ConnectionOptions } from "./transport.js";
import type {
  Attempt,
  IndexedInsertAnswer,
  InsertAnswer,
  ItemAnswer,
  NewTask,
  Priority,
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
import { fromWire, isObject, taskText, withValue, type Json } from "./wire.js";

interface CallOptions {
  signal?: AbortSignal | undefined;
}

/** With `wait`, an insert answers when its tasks are final, or when so much time is over. It needs the role `read`. */
interface WaitOptions extends CallOptions {
  wait?: Duration | undefined;
}

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
    method: "GET" | "POST" | "DELETE",
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

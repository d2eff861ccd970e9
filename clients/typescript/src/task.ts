import { Buffer } from "node:buffer";

import { milliseconds, type Duration } from "./duration.js";
import { TaskdError } from "./errors.js";
import type { DiscoveredTask, LeasedTask, LimitReport, Priority } from "./types.js";
import { taskText } from "./wire.js";

/** The most bytes of the tasks that one handler may discover. They wait in memory until it ends. */
const MOST_DISCOVERED_BYTES = 256 << 20;
/** The longest hold or pace that taskd takes, in milliseconds. */
const LONGEST_LIMIT = 3_600_000;

/** A task in the hands of its handler. */
export class Task<P = unknown> {
  readonly id: string;
  readonly queue: string;
  readonly key: string;
  /** The key, if it is not UTF-8; `key` is then only near it. */
  readonly keyBytes: Uint8Array | undefined;
  /** JSON, a string, or a `Uint8Array`, as it was inserted; `null` without one. */
  readonly payload: P;
  readonly headers: Readonly<Record<string, string>>;
  /** The context for the handler's own spans, as W3C writes it. */
  readonly traceparent: string;
  /** The first attempt is 1. */
  readonly attempt: number;
  readonly replicas: number;
  readonly priority: Priority;
  /** What the task shares its limits with, such as a host; "" if it has no limits. */
  readonly limitKey: string;
  /** The name of the worker. */
  readonly worker: string;
  /**
   * Aborted when the worker does not hold the task any more (`LeaseLostError`), after `taskTimeout`
   * (`TaskTimeoutError`), or when the worker stops without waiting (`WorkerStoppedError`). Give it to `fetch`.
   */
  readonly signal: AbortSignal;
  readonly #held: Held;

  constructor(held: Held, payload: P, worker: string) {
    const { task } = held;
    this.id = task.id;
    this.queue = task.queue;
    this.key = task.key;
    this.keyBytes = task.keyBytes;
    this.headers = task.headers;
    this.traceparent = task.traceparent;
    this.attempt = task.attempt;
    this.replicas = task.replicas;
    this.priority = task.priority;
    this.limitKey = task.limitKey ?? "";
    this.payload = payload;
    this.worker = worker;
    this.signal = held.controller.signal;
    this.#held = held;
  }

  /**
   * Reports tasks that the handler found, any number of them. taskd inserts them when the task is completed, and drops
   * known ones. A task that is wrong costs only itself: the worker logs it, or taskd keeps it as a dead letter.
   */
  discover(...tasks: DiscoveredTask[]): void {
    this.#held.discover(tasks);
  }

  /**
   * Nothing of the task's limit key starts for this long, at whichever worker, such as a Retry-After. taskd learns it when
   * the handler ends, however it ends, and takes at most an hour. Without a `limitKey` it does nothing. Together with
   * `PutOff` the attempt costs nothing.
   */
  hold(hold: Duration): void {
    this.#held.learn("hold", hold);
  }

  /** Starts of the task's limit key are at least so far apart, such as a Crawl-delay. taskd keeps it for an hour. */
  pace(pace: Duration): void {
    this.#held.learn("pace", pace);
  }

  /**
   * Prolongs the lease now, to `by` from now. The worker does so by itself before it ends; this is for a much longer
   * lease, for example before code that blocks the process. The worker then does not make the lease shorter. On a stream
   * the lease outlives the `timeout` of the source, but only this one: the other tasks of the process do not.
   */
  async extend(by?: Duration): Promise<void> {
    await this.#held.extend(by);
  }
}

/** A lease that the worker has not reported yet. */
export class Held {
  readonly controller = new AbortController();
  readonly discovered: string[] = [];
  discoveredBytes = 0;
  /** How many discovered tasks cannot be sent, and what is wrong with the first. */
  notStored = { count: 0, first: "" };
  /** What the handler has learnt of the task's limit key. */
  limit?: LimitReport;
  /** The handler has learnt something of a limit key that the task does not have. */
  hasLearntInVain = false;
  /** The worker puts the task off. */
  isPutOff = false;
  /** The length of the lease, in milliseconds. */
  lease = 0;
  /** The time of the next extension by the worker itself. All times here are those of `performance.now()`. */
  extendAt = 0;
  /** The time until which the handler asked to have the lease. */
  askedUntil = 0;
  /** The lease belongs to a session whose stream has not broken. */
  isInSession = false;
  /** An extension that is under way. */
  call: Promise<void> | undefined;
  /** The failures of extensions in a row. */
  failures = 0;
  /** How many leases may share a call with this one. */
  share = Infinity;
  /** taskd has refused an extension of this lease. */
  isRefused = false;
  /** No handler began with the task before the worker stopped. */
  isReturned = false;
  /** The worker has said how the task ended, or does not hold it any more. */
  isOver = false;

  readonly task: LeasedTask;
  readonly extend: (by?: Duration) => Promise<void>;

  constructor(task: LeasedTask, extend: (by?: Duration) => Promise<void>) {
    this.task = task;
    this.extend = extend;
  }

  discover(tasks: readonly DiscoveredTask[]): void {
    if (this.isOver) throw new TaskdError("the task is over: a handler discovers tasks before it ends");
    for (const task of tasks) {
      let text: string;
      try {
        text = taskText(task, this.task.queue);
      } catch (error) {
        this.addNotStored(error instanceof Error ? error.message : String(error));
        continue;
      }
      this.discoveredBytes += Buffer.byteLength(text) + 1;
      if (this.discoveredBytes > MOST_DISCOVERED_BYTES) {
        throw new RangeError("the discovered tasks take too much memory; insert some of them by worker.client");
      }
      this.discovered.push(text);
    }
  }

  /** Notes what taskd is to learn of the limit key. It would refuse the whole report of a task without one. */
  learn(what: keyof LimitReport, time: Duration): void {
    const ms = Math.min(milliseconds(time, what), LONGEST_LIMIT);
    if (this.task.limitKey === undefined) this.hasLearntInVain = true;
    else this.limit = { ...this.limit, [what]: `${String(ms)}ms` };
  }

  /** Counts a discovered task that is wrong. */
  addNotStored(why: string): void {
    if (this.notStored.count === 0) this.notStored.first = why;
    this.notStored.count += 1;
  }

  /** Ends the handler's right to the task. */
  lose(reason: Error): void {
    this.isOver = true;
    this.controller.abort(reason);
  }
}

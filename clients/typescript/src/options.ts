import type { Duration } from "./duration.js";
import type { Schema } from "./schema.js";
import type { Source } from "./source.js";
import type { Task } from "./task.js";
import type { ConnectionOptions } from "./transport.js";
import type { Logger } from "./types.js";

export interface WorkerOptions extends ConnectionOptions {
  /** The queue, or several: priorities are strict over all of them, unless there are `weights`. */
  queue: string | readonly string[];
  /**
   * How several queues share the tasks, from 1 to 1000 each: with `{ a: 3, b: 1 }` three of four are of `a` while both
   * have some. A queue that is absent has 1. Priorities then order the tasks of each queue only.
   */
  weights?: Readonly<Record<string, number>> | undefined;
  /**
   * The worker's name (that of the host). taskd never credits a name twice for a task, and takes two workers of one
   * name for one: a second worker of the host and queue without a name does not start.
   */
  name?: string | undefined;
  /** How many handlers run at a time (10). */
  concurrency?: number | undefined;
  /** How many tasks wait here beyond those at work (0). At a stop they go back, at no cost. */
  prefetch?: number | undefined;
  /** How long taskd holds a call that finds no task ("30s"). */
  wait?: Duration | undefined;
  /**
   * The lease of each task; absent: as the task or its queue says, and on a stream 30 s. The worker extends leases while
   * handlers run.
   */
  leaseDuration?: Duration | undefined;
  /** The longest run of a handler. Then `task.signal` is aborted and the attempt has failed. */
  taskTimeout?: Duration | undefined;
  /** How long a stop waits for handlers and reports ("25s"). */
  drainTimeout?: Duration | undefined;
  /** The most reports of one call (100), their bytes (4 MiB), and how long a report waits for others (0). */
  reports?: { maxItems?: number; maxBytes?: number; linger?: Duration } | undefined;
  /** The largest report (32 MiB): taskd's `max_request_bytes`. */
  maxRequestBytes?: number | undefined;
  /** The signals at which the process stops (SIGTERM and SIGINT); `false`: none. */
  signals?: readonly string[] | false | undefined;
  logger?: Logger | undefined;
  /** In place of polls: `StreamSource`, or `MockSource` in tests. */
  source?: Source | undefined;
}

export interface HandleOptions<P> {
  /** Checks each payload before the handler. A payload that does not fit is not tried again. */
  schema?: Schema<P> | undefined;
}

/** Does a task. The result is JSON, a string or bytes; `undefined` is none. An error is a failed attempt. */
export type Handler<P = unknown> = (task: Task<P>) => unknown;

/** Runs around a handler: `call` runs the handler, or the next hook, and returns the result of the task. */
export type Around = (task: Task, call: () => Promise<unknown>) => unknown;

/** What a worker has done. */
export interface WorkerStats {
  taken: number;
  completed: number;
  rejected: number;
  /** Tasks that went back by a report, at no cost: no handler had begun when the worker stopped, or it put them off. */
  returned: number;
  /** Reports that did not count: the lease had ended, or the task was cancelled. */
  lost: number;
  extended: number;
  running: number;
  waiting: number;
  /** Reports without an answer. */
  unreported: number;
}

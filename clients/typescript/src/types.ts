import type { Duration } from "./duration.js";

export type Priority = "high" | "medium" | "low";

/** A task to insert, or to discover. */
export interface NewTask<P = unknown> {
  queue: string;
  /** The name of the task in its queue, for ever. Absent: the hash of the payload. */
  key?: string | undefined;
  /** Bytes stay bytes, text stays text, and any other value is written as JSON. `null` is no payload. */
  payload?: P | undefined;
  /** How many distinct workers must complete the task. */
  replicas?: number | undefined;
  priority?: Priority | undefined;
  /** The wait before the first attempt. */
  delay?: Duration | undefined;
  /** The time of the first attempt, in place of `delay`. */
  notBefore?: Date | string | undefined;
  /** The task is dead if it is not completed by then. */
  deadline?: Date | string | undefined;
  /** The task is dead if it is not completed within this time from its insert. In place of `deadline`. */
  finishWithin?: Duration | undefined;
  leaseDuration?: Duration | undefined;
  /** Failures until the task is dead. */
  maxAttempts?: number | undefined;
  headers?: Readonly<Record<string, string>> | undefined;
  /** The caller's trace, as W3C writes it. */
  traceparent?: string | undefined;
  /** An insert that is sent again with the same key is answered as the first time (at most 256 bytes). */
  idempotencyKey?: string | undefined;
  /** The waits between its attempts, in place of those of its queue. */
  backoff?: TaskBackoff | undefined;
  /**
   * What the task shares its limits with: a host, a tenant, an account. Only in queues with a `limit_by`; absent: what
   * that says.
   */
  limitKey?: string | undefined;
  /** The tasks of a queue with one sequence go one after the other, in the order of their inserts. */
  sequence?: string | undefined;
  /** When the task dies, the next ones of its sequence go on, or wait until it is sent again or purged. */
  onDead?: "next" | "hold" | undefined;
  /**
   * `"new"` or a `NewTree`: the task is the root of a tree. The id of a tree: it joins this one, which must be open.
   * Discovered tasks are in the trees of their parents anyway.
   */
  tree?: string | NewTree | undefined;
  /** Fields of a newer taskd, with the names and values of `docs/api.md`. */
  fields?: Readonly<Record<string, unknown>> | undefined;
}

/** A new tree, for its root. */
export interface NewTree {
  /** The queue that gets one task when the tree has ended, with its counts. */
  then?: string | undefined;
  /** All tasks of the tree must be completed within this time; otherwise they are dead then. */
  timeout?: Duration | undefined;
  /** Dead tasks make the tree fail (`count`), mean nothing, or keep it open until they are sent again or purged. */
  onDead?: "count" | "ignore" | "hold" | undefined;
}

/** The waits of a task between its attempts. Without a `kind` it has those of its queue, and only `giveUpAfter`. */
export interface TaskBackoff {
  /** Always `initial`, `initial` more after each failure, or twice as long after each. */
  kind?: "constant" | "linear" | "exponential" | undefined;
  /** The wait after the first failure. */
  initial?: Duration | undefined;
  /** The longest wait: at most, and if absent, a day. */
  maximum?: Duration | undefined;
  /** The share by which a wait is longer or shorter at random, 0 to 1 (0.2). */
  jitter?: number | undefined;
  /** The task is dead when its next attempt would begin later than this after its insert, or after `notBefore`. */
  giveUpAfter?: Duration | undefined;
}

/**
 * A task that a handler discovers. Without a queue it goes to that of its parent. It needs no idempotency key: taskd
 * takes a completion that is repeated once.
 */
export type DiscoveredTask<P = unknown> = Omit<NewTask<P>, "queue" | "idempotencyKey"> & {
  queue?: string | undefined;
  /** The port of the stage to which it is sent, in place of a queue: the topology says which queues get it. */
  port?: string | undefined;
};

export type InsertStatus = "CREATED" | "DUPLICATE" | "REJECTED" | "TRY_LATER";

/** The answer about one task of an insert. `R` is the type of the results. */
export interface InsertAnswer<R = unknown> {
  status: InsertStatus;
  /** The id of the task: the new one, or that of the duplicate. */
  id?: string;
  /** The reason, if taskd did not store the task. */
  error?: string;
  /** With `wait`: the status of the task at the end of the wait; absent if taskd could not read it. */
  taskStatus?: TaskStatus;
  /** The tree that the task is in, if the insert named one. That of a duplicate is the one that had it first. */
  tree?: string;
  /** With `wait`: the results of a completed task. An answer has at most 32 MiB of them. */
  results?: TaskResult<R>[];
}

/** The answer about one task of a list, with its place in the list. */
export interface IndexedInsertAnswer<R = unknown> extends InsertAnswer<R> {
  index: number;
}

/** A record to publish to a topic. */
export interface NewRecord {
  /** Bytes as they are, everything else as JSON; a string is its text. */
  value?: unknown;
  /** Records with the same key keep their order. */
  key?: string;
  /** Texts by name; a name may have several. */
  attributes?: Record<string, string | readonly string[]>;
  /** What tells a repeat from another record. */
  id?: string;
}

export type PublishStatus = "STORED" | "REJECTED" | "TRY_LATER";

/** The answer about one record. The topic has a stored one; one to try later may be stored or not. */
export interface Published {
  status: PublishStatus;
  partition?: number;
  offset?: string;
  /** The reason, if it is not stored. */
  error?: string;
}

export type ItemStatus =
  "OK" | "LEASE_LOST" | "ALREADY_COMPLETED" | "UNKNOWN_TASK" | "CANCELLED" | "INVALID" | "TRY_LATER";

/** The answer about one task of a report or a change. */
export interface ItemAnswer {
  id: string;
  status: ItemStatus;
  error?: string;
  /** After an extension. */
  leaseExpiresAt?: Date;
}

export type Encoding = "json" | "text" | "bytes";

/** A task that a worker has leased. */
export interface LeasedTask {
  id: string;
  queue: string;
  key: string;
  /** The key, if it is not UTF-8; `key` is then only near it. */
  keyBytes?: Uint8Array;
  /** JSON, a string, or a `Uint8Array`, as it was inserted; `null` without one. */
  payload: unknown;
  payloadEncoding?: Encoding;
  headers: Record<string, string>;
  traceparent: string;
  leaseToken: string;
  leaseExpiresAt: Date;
  /** What is left of the lease at the time of the answer, in milliseconds. */
  leaseLeft?: number;
  /** The lease belongs to the worker's session: at its end taskd takes back what no handler has begun, at no cost. */
  isInSession?: boolean;
  attempt: number;
  replicas: number;
  priority: Priority;
  /** What the task shares its limits with, such as a host; absent if it has no limits. */
  limitKey?: string;
}

/** What a handler has learnt of the limit key of its task. */
export interface LimitReport {
  /** Nothing of the limit key starts for this long, such as "30000ms". */
  hold?: string;
  /** Starts of the limit key are at least so far apart. */
  pace?: string;
}

export type TaskStatus = "PENDING" | "QUEUED" | "ASSIGNED" | "DELAYED" | "COMPLETED" | "DEAD" | "CANCELLED";

/** A task as a list shows it. */
export interface TaskView {
  id: string;
  queue: string;
  key: string;
  keyBytes?: Uint8Array;
  status: TaskStatus;
  replicas: number;
  completed: number;
  leased: number;
  attempts: number;
  priority: Priority;
  createdAt: Date;
  updatedAt: Date;
  notBefore?: Date;
  reason?: string;
}

/** An attempt in the history of a task. */
export interface Attempt {
  worker: string;
  state: string;
  from?: Date;
  until?: Date;
  leaseExpiresAt?: Date;
  attempt?: number;
  reason?: string;
  surplus?: boolean;
}

/** A task with its payload and its history. */
export interface TaskFile<P = unknown> extends TaskView {
  payload: P;
  payloadEncoding?: Encoding;
  headers: Record<string, string>;
  traceparent: string;
  /** Its own, if it has one. */
  backoff?: TaskBackoff;
  history: Attempt[];
  acts: { id: string; at: string; who: string; what: string }[];
  results: number;
}

/** The result that a worker reported. */
export interface TaskResult<R = unknown> {
  worker: string;
  attempt: number;
  completedAt: Date;
  /** The task had all its replicas before. */
  surplus: boolean;
  result: R;
  resultEncoding?: Encoding;
}

/** A task took on a status. */
export interface TaskEvent {
  type: "status";
  /** Names the event: a watch can go on behind it. */
  eventId: string;
  id: string;
  queue: string;
  status: TaskStatus;
  at: Date;
}

/** Events of a queue before this point may be missing: read the tasks if you need all of them. */
export interface WatchGap {
  type: "gap";
}

export type QueueEvent = TaskEvent | WatchGap;

/** Which tasks a list shows: all parts must fit. */
export interface TaskFilter {
  queue?: string | undefined;
  status?: TaskStatus | "UNFINISHED" | readonly (TaskStatus | "UNFINISHED")[] | undefined;
  key?: string | undefined;
  keyPrefix?: string | undefined;
  headers?: Readonly<Record<string, string>> | undefined;
  worker?: string | undefined;
  since?: Date | string | undefined;
  until?: Date | string | undefined;
}

/** A page of a list of tasks. With a `cursor` there may be more. */
export interface TaskPage {
  tasks: TaskView[];
  cursor?: string;
  lookedAt?: number;
}

/** The counts of an open queue. */
export interface QueueView {
  queue: string;
  pending: number;
  waiting: number;
  assigned: number;
  delayed: number;
  leases: number;
  paused: boolean;
  [count: string]: unknown;
}

/** A place for messages; `console` is one. */
export interface Logger {
  info(message: string): void;
  warn(message: string): void;
  error(message: string): void;
}

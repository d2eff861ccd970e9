/** For tests of handlers without a server: `import { runHandler } from "@taskd/client/testing"`. */

import { pause } from "./duration.js";
import type { HandleOptions, Handler, WorkerOptions } from "./options.js";
import type { GetRequest, Report, Source } from "./source.js";
import type { DiscoveredTask, ItemAnswer, ItemStatus, LeasedTask, LimitReport, Logger } from "./types.js";
import { encodingOf, isObject, taskText, withValue } from "./wire.js";
import { Worker } from "./worker.js";

/** A task for a handler; all parts have defaults. */
export type MockTask<P = unknown> = Partial<Omit<LeasedTask, "payload" | "leaseToken">> & { payload?: P };

/** How a task ended, as taskd would have read it. */
export type Outcome =
  | { task: LeasedTask; status: "completed"; result: unknown; discovered: DiscoveredTask[]; limit?: LimitReport }
  | {
      task: LeasedTask;
      status: "rejected";
      reason: string;
      retry: boolean;
      delay: string | undefined;
      limit?: LimitReport;
    }
  | { task: LeasedTask; status: "put_off"; reason: string; delay: string; limit?: LimitReport };

/** A rejection as the worker sends it. */
interface Rejected {
  reason: string;
  retry: boolean;
  delay?: string;
  not_started?: boolean;
  limit?: LimitReport;
}

export interface MockOptions {
  /** How often a task that asks for it, or that is put off, is offered at all (1: never again). */
  attempts?: number;
  /** Offers discovered tasks with new keys, too. */
  follow?: boolean;
  /** The lease that the worker sees, in milliseconds (30,000). */
  lease?: number;
}

/** A taskd in memory, with the calls of workers only. */
export class MockSource implements Source {
  /** How the tasks ended, in order. A task that is tried again has an outcome for each attempt. */
  readonly outcomes: Outcome[] = [];
  readonly #options: Required<MockOptions>;
  readonly #offered: LeasedTask[] = [];
  readonly #leased = new Map<string, LeasedTask>();
  readonly #known = new Set<string>();
  readonly #lost = new Map<string, ItemStatus>();
  /** How often tasks were put off. */
  readonly #putOff = new Map<string, number>();
  #changed = new AbortController();
  #made = 0;

  constructor(tasks: Iterable<MockTask> = [], options: MockOptions = {}) {
    this.#options = { attempts: 1, follow: false, lease: 30_000, ...options };
    for (const task of tasks) this.add(task);
  }

  /** Offers a task to the worker. */
  add(task: MockTask = {}): LeasedTask {
    this.#made += 1;
    // The payload goes the way over JSON, as it does with taskd.
    const { payload } = readBack(taskText({ queue: "q", payload: task.payload }), "payload");
    const encoding = encodingOf(task.payload);
    const made: LeasedTask = {
      id: `task-${String(this.#made)}`,
      queue: "test",
      key: `key-${String(this.#made)}`,
      headers: {},
      traceparent: "",
      attempt: 1,
      replicas: 1,
      priority: "medium",
      ...task,
      ...(encoding === undefined ? {} : { payloadEncoding: encoding }),
      payload,
      leaseToken: `token-${String(this.#made)}`,
      leaseExpiresAt: new Date(Date.now() + this.#options.lease),
      leaseLeft: this.#options.lease,
    };
    this.#known.add(JSON.stringify([made.queue, made.key]));
    this.#offered.push(made);
    this.#notify();
    return made;
  }

  /** Ends the lease of a task: the worker hears of it when it extends the lease or reports the task. */
  endLease(id: string, status: "LEASE_LOST" | "CANCELLED" = "LEASE_LOST"): void {
    this.#lost.set(id, status);
  }

  /** Waits until all tasks have ended. */
  async settled(): Promise<void> {
    while (this.#offered.length + this.#leased.size > 0) {
      this.#changed = new AbortController();
      await pause(60_000, this.#changed.signal);
    }
  }

  async get(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]> {
    const deadline = Date.now() + request.wait;
    while (this.#offered.length === 0 && !signal.aborted && Date.now() < deadline) {
      await pause(Math.min(deadline - Date.now(), 5), signal);
    }
    const tasks = signal.aborted ? [] : this.#offered.splice(0, request.maxTasks);
    for (const task of tasks) this.#leased.set(task.id, task);
    return tasks;
  }

  async complete(_worker: string, reports: readonly Report[]): Promise<ItemAnswer[]> {
    return Promise.resolve(
      reports.map(({ id, text }) =>
        this.#end(id, (task) => {
          const read = readBack(text, "result");
          const wire = Array.isArray(read["discovered"]) ? read["discovered"].filter(isObject) : [];
          const discovered = wire.map((found) => withValue<DiscoveredTask>(found, "payload"));
          const limit = read["limit"] as LimitReport | undefined;
          const learnt = limit === undefined ? {} : { limit };
          this.outcomes.push({ task, status: "completed", result: read["result"], discovered, ...learnt });
          if (this.#options.follow) this.#follow(task, discovered);
        }),
      ),
    );
  }

  async reject(_worker: string, reports: readonly Report[]): Promise<ItemAnswer[]> {
    return Promise.resolve(
      reports.map(({ id, text }) =>
        this.#end(id, (task) => {
          const { reason, retry, delay, ...read } = JSON.parse(text) as Rejected;
          const learnt = read.limit === undefined ? {} : { limit: read.limit };
          // A worker that stops gives back with a delay of 0.
          if (read.not_started === true && delay !== "0ms") {
            this.outcomes.push({ task, status: "put_off", reason, delay: delay ?? "0ms", ...learnt });
            const times = (this.#putOff.get(id) ?? 0) + 1;
            this.#putOff.set(id, times);
            if (times < this.#options.attempts) this.#offered.push(task);
            return;
          }
          if (read.not_started === true) {
            this.#offered.unshift(task);
            return;
          }
          this.outcomes.push({ task, status: "rejected", reason, retry, delay, ...learnt });
          if (retry && task.attempt < this.#options.attempts) {
            this.#offered.push({ ...task, attempt: task.attempt + 1 });
          }
        }),
      ),
    );
  }

  async extend(...[, extensions]: Parameters<Source["extend"]>): Promise<ItemAnswer[]> {
    return Promise.resolve(
      extensions.map(({ id }): ItemAnswer => {
        const status = this.#lost.get(id) ?? (this.#leased.has(id) ? "OK" : "LEASE_LOST");
        if (status !== "OK") this.#leased.delete(id);
        if (status !== "OK") this.#notify();
        return { id, status };
      }),
    );
  }

  #end(id: string, effect: (task: LeasedTask) => void): ItemAnswer {
    const task = this.#leased.get(id);
    const lost = this.#lost.get(id);
    this.#leased.delete(id);
    if (task !== undefined && lost === undefined) effect(task);
    this.#notify();
    return { id, status: lost ?? (task === undefined ? "LEASE_LOST" : "OK") };
  }

  #follow(parent: LeasedTask, discovered: readonly DiscoveredTask[]): void {
    for (const { queue = parent.queue, key, payload, headers = {} } of discovered) {
      const name = key ?? JSON.stringify(payload);
      if (!this.#known.has(JSON.stringify([queue, name]))) this.add({ queue, key: name, payload, headers });
    }
  }

  #notify(): void {
    this.#changed.abort();
  }
}

const SILENT: Logger = { info: () => undefined, warn: () => undefined, error: () => undefined };

/** Runs a handler on one task, as a worker does, and says how the task ended. */
export async function runHandler<P = unknown>(
  handler: Handler<P>,
  task: MockTask<P> = {},
  options: HandleOptions<P> & Pick<WorkerOptions, "taskTimeout" | "logger"> = {},
): Promise<Outcome> {
  const { schema, taskTimeout, logger = SILENT } = options;
  const source = new MockSource([task]);
  const queue = task.queue ?? "test";
  const worker = new Worker({ queue, source, taskTimeout, logger, signals: false });
  const running = worker.handle(handler, { schema }).run();
  await source.settled();
  await worker.stop();
  await running;
  const [outcome] = source.outcomes;
  if (outcome === undefined) throw new Error("the task did not end");
  return outcome;
}

function readBack(text: string, name: "payload" | "result"): Record<string, unknown> {
  return withValue<Record<string, unknown>>(JSON.parse(text) as Record<string, unknown>, name);
}

import { Buffer } from "node:buffer";
import { setMaxListeners } from "node:events";
import process from "node:process";
import { inspect } from "node:util";

import { Client } from "./client.js";
import { LONGEST_TIMER, backoff, milliseconds, pause, type Duration } from "./duration.js";
import { TaskTimeoutError, UnreportedError, WorkerStoppedError, isTransient } from "./errors.js";
import { insertLines } from "./insert.js";
import { Leases } from "./leases.js";
import { defaultName, takeName } from "./name.js";
import { PutOff, Reject, Retry, Throttle } from "./rejections.js";
import { Reports } from "./reports.js";
import { PayloadError, checkPayload } from "./schema.js";
import { ANSWER_COMES, HttpSource, type GetRequest, type Source } from "./source.js";
import { Held, Task } from "./task.js";
import type { Around, HandleOptions, Handler, WorkerOptions, WorkerStats } from "./options.js";
import type { LeasedTask, Logger } from "./types.js";
import { completionText } from "./wire.js";

/** The most bytes of reports without an answer, before a worker takes no more tasks. */
const MOST_UNREPORTED_BYTES = 64 << 20;
/** How long no report asks for tasks after one that was refused for it, or that took too long, in milliseconds. */
const ASKS_NOT_FOR = 1000;
/** The least time from one call that brings no task to the next one, in milliseconds. */
const SHORTEST_ROUND = 100;
/** The most tasks that a completion may discover, … */
const MOST_DISCOVERED = 10_000;
/** … and their bytes. taskd takes 8 MiB, with the result. */
const MOST_DISCOVERED_BYTES = 2 << 20;
/** The tasks of one call that inserts others. */
const SURPLUS_AT_ONCE = 1000;
/** Why tasks go back that wait in a throttled worker, or come to it. */
const THROTTLED = "the worker takes no tasks for a while";
/** The time for the last reports after a hard stop. */
const LAST_REPORTS = 5000;

/** Takes tasks from taskd, hands them to a handler, and reports how they end. */
export class Worker {
  /** For handlers that insert tasks themselves. */
  readonly client: Client;
  readonly name: string;
  readonly #options: WorkerOptions;
  readonly #queues: readonly string[];
  readonly #log: Logger;
  readonly #source: Source;
  readonly #leases: Leases;
  readonly #reports: Reports;
  readonly #concurrency: number;
  readonly #prefetch: number;
  readonly #maxBytes: number;
  readonly #wait: number;
  readonly #leaseDuration: number | undefined;
  readonly #taskTimeout: number | undefined;
  readonly #drainTimeout: number;
  /** Takes no more tasks. */
  readonly #stop = new AbortController();
  /** The end of polls: a moment behind the stop. */
  readonly #pollsEnd = new AbortController();
  /** Waits for no handler. */
  readonly #hardStop = new AbortController();
  /** Ends all calls. */
  readonly #end = new AbortController();
  readonly #waiting: Held[] = [];
  #running = 0;
  /** A poll is under way. */
  #polls = false;
  /** When a report may ask for tasks again. */
  #reportsAsk = 0;
  /** When the worker may take tasks again, after a handler has throttled it. */
  #throttledUntil = 0;
  #handler: ((held: Held) => Promise<unknown>) | undefined;
  readonly #around: Around[] = [];
  #ended: Promise<void> | undefined;
  #changed = new AbortController();
  #fatal: { error: unknown } | undefined;
  #counts = { taken: 0, completed: 0, rejected: 0, returned: 0, lost: 0 };

  constructor(options: WorkerOptions) {
    this.#options = options;
    this.#queues = typeof options.queue === "string" ? [options.queue] : options.queue;
    if (this.#queues.length === 0 || this.#queues.includes("")) {
      throw new TypeError('queue: there is none; give the name of one, for example "pages"');
    }
    this.name = options.name ?? defaultName();
    this.#concurrency = count(options.concurrency ?? 10, "concurrency", 1);
    this.#prefetch = count(options.prefetch ?? 0, "prefetch", 0);
    this.#maxBytes = count(options.maxRequestBytes ?? 32 << 20, "maxRequestBytes", 1024);
    const { taskTimeout, leaseDuration, reports = {} } = options;
    this.#wait = milliseconds(options.wait ?? "30s", "wait");
    this.#leaseDuration = leaseDuration === undefined ? undefined : milliseconds(leaseDuration, "leaseDuration");
    this.#taskTimeout = taskTimeout === undefined ? undefined : milliseconds(taskTimeout, "taskTimeout");
    this.#drainTimeout = milliseconds(options.drainTimeout ?? "25s", "drainTimeout");
    this.#log = options.logger ?? console;
    // Each call that is under way listens to the end, and each throttle to the stop. A worker has more of them than
    // Node.js expects.
    setMaxListeners(0, this.#end.signal, this.#stop.signal);
    this.client = new Client(options);
    this.#source = options.source ?? new HttpSource(this.client, this.#log);
    this.#leases = new Leases(this.#source, this.name, this.#leaseDuration, this.#log, this.#end.signal);
    const limits = {
      maxItems: Math.min(count(reports.maxItems ?? 100, "reports.maxItems", 1), 1000),
      maxBytes: Math.min(count(reports.maxBytes ?? 4 << 20, "reports.maxBytes", 1), this.#maxBytes),
      linger: milliseconds(reports.linger ?? 0, "reports.linger"),
    };
    this.#reports = new Reports(this.#source, this.name, limits, this.#end.signal);
    this.#listen();
  }

  /** Sets the handler. `P` is the type of the payload; a schema makes sure of it. */
  handle<P = unknown>(handler: Handler<P>, options: HandleOptions<P> = {}): this {
    const { schema } = options;
    this.#handler = async (held) => {
      const { payload } = held.task;
      const checked = schema === undefined ? (payload as P) : await checkPayload(schema, payload);
      const task = new Task(held, checked, this.name);
      if (this.#around.length === 0) return handler(task);
      // The last hook is the innermost.
      const call = async (place: number): Promise<unknown> => {
        const hook = this.#around[place];
        return hook === undefined ? await handler(task) : await hook(task, async () => call(place + 1));
      };
      return call(0);
    };
    return this;
  }

  /**
   * Runs a function around each handler, for what happens before and after it; the first one is the outermost. It returns
   * `await call()`, or another result of the task.
   */
  around(hook: Around): this {
    this.#around.push(hook);
    return this;
  }

  get stats(): WorkerStats {
    const [running, waiting, unreported] = [this.#running, this.#waiting.length, this.#reports.pending];
    return { ...this.#counts, extended: this.#leases.extended, running, waiting, unreported };
  }

  /**
   * Works until a stop, and then until the handlers have ended and taskd has their reports. It waits for a taskd that
   * is away. It throws when taskd refuses the worker for good: its token, its name, or a queue's name; and at the end
   * `UnreportedError` if taskd did not take the last reports.
   */
  async run(options: { signal?: AbortSignal } = {}): Promise<void> {
    if (this.#handler === undefined) throw new TypeError("the worker has no handler: call worker.handle first");
    if (this.#ended !== undefined) throw new TypeError("a worker runs once: make a new one");
    this.#ended = this.#run(options.signal);
    return this.#ended;
  }

  /**
   * Stops: takes no more tasks, gives back those that have not begun, and waits for the handlers, at most
   * `drainTimeout`. With `hard` it does not wait: it aborts the handlers' signals and rejects their tasks.
   */
  async stop(options: { hard?: boolean } = {}): Promise<void> {
    this.#stop.abort();
    if (options.hard === true) this.#hardStop.abort();
    await this.#ended?.catch(() => undefined);
  }

  async #run(signal: AbortSignal | undefined): Promise<void> {
    const { name, source } = this.#options;
    // A source without an address is that of a test.
    const hasDefaultName = name === undefined && (source === undefined || source.address !== undefined);
    const giveBackName = hasDefaultName ? await takeName(this.name, this.#queues) : undefined;
    this.#greet();
    const removeSignals = this.#onSignals();
    const stop = (): void => {
      this.#stop.abort();
    };
    if (signal?.aborted === true) stop();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      this.#openSource();
      const leases = this.#leases.run().catch((error: unknown) => {
        this.#fail(error);
      });
      await this.#takeTasks().catch((error: unknown) => {
        this.#fail(error);
      });
      await this.#drain();
      this.#end.abort();
      await leases;
      await this.#source.close?.();
    } finally {
      removeSignals();
      giveBackName?.();
      signal?.removeEventListener("abort", stop);
    }
    if (this.#fatal !== undefined) throw this.#fatal.error;
  }

  /** Says from where the tasks come, so that a worker without tasks shows that it lives. */
  #greet(): void {
    const { url = "http://127.0.0.1:7600", source } = this.#options;
    const from = source === undefined ? [url].flat().join(", ") : source.address;
    if (from === undefined) return;
    this.#log.info(`worker ${this.name} takes tasks of ${this.#queues.join(", ")} from ${from}`);
  }

  #openSource(): void {
    this.#source.open?.({
      worker: this.name,
      queues: this.#queues,
      weights: this.#options.weights,
      leaseDuration: this.#leaseDuration,
      token: this.#options.token,
      client: this.client,
      logger: this.#log,
      holding: () => this.#leases.all().map(({ task }) => task.id),
      onArrived: () => {
        this.#notify();
      },
      onEnded: (answers) => {
        this.#leases.lose(answers);
      },
      onAlone: () => {
        if (!this.#end.signal.aborted) this.#giveBackReturned();
        this.#leases.leaveSession();
        this.#leases.extendAll();
      },
      onMoved: () => {
        this.#leases.extendAll();
      },
    });
  }

  /** Stops after an error that no other try would mend. */
  #fail(error: unknown): void {
    this.#fatal ??= { error };
    this.#stop.abort();
    this.#hardStop.abort();
    this.#end.abort();
  }

  /** Listens to the first signal for a stop, and to the second for a hard one. */
  #onSignals(): () => void {
    const { signals = ["SIGTERM", "SIGINT"] } = this.#options;
    if (signals === false) return () => undefined;
    const onSignal = (name: string): void => {
      if (this.#stop.signal.aborted) this.#hardStop.abort();
      else this.#log.info(`${name}: waiting for ${String(this.#running)} tasks; once more stops at once`);
      this.#stop.abort();
    };
    for (const name of signals) process.on(name, onSignal);
    return () => {
      for (const name of signals) process.off(name, onSignal);
    };
  }

  #listen(): void {
    for (const controller of [this.#stop, this.#hardStop, this.#end]) {
      controller.signal.addEventListener("abort", () => {
        this.#notify();
      });
    }
    this.#stop.signal.addEventListener("abort", () => {
      const end = (): void => {
        this.#pollsEnd.abort();
      };
      if (this.#source.mayBeAnswering?.() === true) setTimeout(end, ANSWER_COMES);
      else end();
    });
    this.#hardStop.signal.addEventListener("abort", () => {
      this.#pollsEnd.abort();
    });
    this.#leases.onLost = (held) => {
      this.#counts.lost += 1;
      this.#log.warn(`task ${held.task.id}: ${String(held.controller.signal.reason)}`);
      this.#notify();
    };
    this.#reports.onAnswer = (held, kind, status, error) => {
      // A refused completion becomes a rejection.
      if (kind === "reject" || status !== "INVALID") this.#leases.release(held);
      const ended = held.isReturned || held.isPutOff ? "returned" : "rejected";
      if (status === "OK") {
        this.#counts[kind === "complete" ? "completed" : ended] += 1;
        // taskd names the discovered tasks that it does not store.
        if (error !== undefined) this.#log.warn(`task ${held.task.id}: ${error}`);
      } else {
        if (kind === "reject" || status !== "INVALID") this.#counts.lost += 1;
        this.#log.warn(
          `task ${held.task.id}: ${kind} was answered ${status}${error === undefined ? "" : `: ${error}`}`,
        );
      }
      this.#notify();
    };
    this.#reports.next = () => this.#next();
    this.#reports.onTasks = (tasks) => {
      if (tasks === undefined) this.#reportsAsk = performance.now() + ASKS_NOT_FOR;
      for (const task of tasks ?? []) this.#accept(task);
      if (this.#stop.signal.aborted) this.#giveBack();
      this.#notify();
    };
    this.#reports.onFatal = (error) => {
      this.#fail(error);
    };
  }

  #notify(): void {
    this.#changed.abort();
    this.#source.room?.(this.#stop.signal.aborted ? 0 : Math.max(this.#free(), 0));
  }

  /** Waits until something has changed, at most so long. */
  async #change(most = LONGEST_TIMER): Promise<void> {
    this.#changed = new AbortController();
    await pause(most, this.#changed.signal);
  }

  async #takeTasks(): Promise<void> {
    while (!this.#stop.signal.aborted) {
      const free = this.#free();
      const { isAsking, isAboutToAsk } = this.#reports;
      if (free <= 0 || isAsking || (isAboutToAsk && this.#next() !== undefined)) {
        // No call takes these. Kept until the throttle ends, they would be withheld from all other workers.
        if (this.#isThrottled()) for (const task of this.#source.takeArrived?.() ?? []) this.#accept(task);
        await this.#change();
        continue;
      }
      const begun = performance.now();
      this.#polls = true;
      const tasks = await this.#source.get(this.#request(free, this.#wait), this.#pollsEnd.signal);
      this.#polls = false;
      for (const task of tasks) this.#accept(task);
      // A taskd that is about to stop does not wait, nor does one that is not asked to.
      const rest = SHORTEST_ROUND - (performance.now() - begun);
      if (tasks.length === 0 && rest > 0) await pause(rest, this.#stop.signal);
    }
  }

  #request(maxTasks: number, wait: number): GetRequest {
    const { weights } = this.#options;
    return { worker: this.name, queues: this.#queues, weights, maxTasks, wait, leaseDuration: this.#leaseDuration };
  }

  /** What a report may ask for: where it brings tasks, it saves a poll. */
  #next(): GetRequest | undefined {
    const mayAsk = !this.#polls && !this.#stop.signal.aborted && performance.now() >= this.#reportsAsk;
    const free = mayAsk && this.#source.completeAndGet !== undefined ? this.#free() : 0;
    return free > 0 ? this.#request(free, 0) : undefined;
  }

  /** How many tasks the worker may take now. Reports that taskd does not take hold it up. */
  #free(): number {
    if (this.#isThrottled()) return 0;
    const { pending, pendingBytes } = this.#reports;
    const room = this.#concurrency + this.#prefetch;
    if (pendingBytes > MOST_UNREPORTED_BYTES || pending > Math.max(room, 1000)) return 0;
    return Math.min(room - this.#running - this.#waiting.length, 1000);
  }

  #isThrottled(): boolean {
    return performance.now() < this.#throttledUntil;
  }

  /** Takes no tasks for so many milliseconds. Those that wait here go to other workers. */
  #throttle(wait: number): void {
    this.#throttledUntil = Math.max(this.#throttledUntil, performance.now() + wait);
    for (const held of this.#waiting.splice(0)) if (!held.isOver) this.#reports.giveBack(held, THROTTLED);
    // The stop ends the pause; a little later, so that the time is over then.
    void pause(Math.min(wait, LONGEST_TIMER) + 1, this.#stop.signal).then(() => {
      this.#notify();
    });
  }

  #accept(task: LeasedTask): void {
    const held: Held = new Held(task, async (by) => this.#leases.extendNow(held, by));
    this.#counts.taken += 1;
    this.#leases.keep(held);
    if (this.#isThrottled()) {
      this.#reports.giveBack(held, THROTTLED);
      return;
    }
    this.#waiting.push(held);
    this.#begin();
  }

  #begin(): void {
    while (this.#running < this.#concurrency && !this.#stop.signal.aborted) {
      const held = this.#waiting.shift();
      if (held === undefined) return;
      // The lease was lost before the task could begin.
      if (!held.isOver) void this.#do(held);
    }
  }

  async #do(held: Held): Promise<void> {
    this.#running += 1;
    let timer: NodeJS.Timeout | undefined;
    const sayNoMore = this.#sayThatItRuns(held);
    try {
      if (this.#source.started !== undefined) await this.#source.started(held.task.id);
      // Meanwhile the lease may be lost, or a hard stop has said how the task ended.
      const handling = held.isOver ? undefined : this.#handler?.(held);
      const result = await Promise.race([
        handling,
        new Promise<never>((_, reject) => {
          if (this.#taskTimeout === undefined) return;
          const late = new TaskTimeoutError(`the handler took longer than ${String(this.#taskTimeout)} ms`);
          timer = setTimeout(
            () => {
              reject(late);
              // A hard stop has said already how the task ended.
              held.controller.abort(late);
            },
            Math.min(this.#taskTimeout, LONGEST_TIMER),
          );
        }),
      ]);
      const [own, surplus] = this.#source.isTaskd === true ? divide(held.discovered) : [held.discovered, []];
      if (surplus.length > 0 && !held.isOver) {
        // If the result cannot be written, the attempt fails, and nothing is inserted.
        completionText(held.task.id, held.task.leaseToken, result, []);
        await this.#insertSurplus(held, surplus);
      }
      this.#sayInVain(held);
      // With no await in between, the report asks for the next task in the place of this one.
      if (!held.isOver) this.#complete(held, result, own);
    } catch (error) {
      this.#sayInVain(held);
      if (!held.isOver) this.#reject(held, error);
    } finally {
      clearTimeout(timer);
      sayNoMore();
      this.#running -= 1;
      this.#begin();
      this.#notify();
    }
  }

  /** Says that a handler still runs: when half of a lease is over, and again when it has run twice as long. */
  #sayThatItRuns(held: Held): () => void {
    const began = performance.now();
    let timer: NodeJS.Timeout;
    const sayAfter = (ms: number): void => {
      const wait = Math.min(began + ms - performance.now(), LONGEST_TIMER);
      timer = setTimeout(() => {
        const seconds = Math.round((performance.now() - began) / 100) / 10;
        this.#log.info(`task ${held.task.id} (${held.task.key}): the handler still runs, after ${String(seconds)} s`);
        sayAfter(2 * ms);
      }, wait).unref();
    };
    sayAfter(Math.max(held.lease / 2, 100));
    return () => {
      clearTimeout(timer);
    };
  }

  #sayInVain(held: Held): void {
    if (!held.hasLearntInVain || held.isOver) return;
    held.hasLearntInVain = false;
    const why = "it has no limit key, so hold and pace do nothing: its queue had no limit_by at its insert";
    this.#log.warn(`task ${held.task.id} (${held.task.key}): ${why}`);
  }

  #complete(held: Held, result: unknown, own: readonly string[]): void {
    const { id, leaseToken } = held.task;
    const { count: wrong, first } = held.notStored;
    if (wrong > 0) {
      const what = wrong === 1 ? "1 discovered task is not stored" : `${String(wrong)} discovered tasks are not stored`;
      this.#log.warn(`task ${id}: ${what}${wrong === 1 ? "" : "; the first"}: ${first}`);
    }
    const text = completionText(id, leaseToken, result, own, held.limit);
    if (Buffer.byteLength(text) > this.#maxBytes - 1024) {
      throw new RangeError(`the result has more than ${String(this.#maxBytes)} bytes (maxRequestBytes)`);
    }
    this.#reports.complete(held, text, own.length);
  }

  /**
   * Inserts the discovered tasks that are too many for a completion. A task that is inserted twice is a duplicate, so an
   * attempt that fails after this loses nothing. It goes on while taskd is away, for as long as the worker has the lease.
   */
  async #insertSurplus(held: Held, texts: readonly string[]): Promise<void> {
    const { signal } = held.controller;
    const isOver = (): boolean => held.isOver;
    for (let at = 0; at < texts.length && !isOver(); at += SURPLUS_AT_ONCE) {
      const lines = texts.slice(at, at + SURPLUS_AT_ONCE).map((text) => ({ text }));
      for (let failures = 1; !isOver(); failures += 1) {
        try {
          const answers = await insertLines(this.client.transport, lines, signal);
          for (const { status, error } of answers) if (status === "REJECTED") held.addNotStored(error ?? status);
          if (answers.every(({ status }) => status !== "TRY_LATER")) break;
        } catch (error) {
          if (isOver()) return;
          if (!isTransient(error)) {
            const why = error instanceof Error ? error.message : String(error);
            throw new Reject(
              `it discovered more tasks than a completion has, and taskd takes no insert of them: ${why}`,
              { cause: error },
            );
          }
          this.#log.warn(`task ${held.task.id}: taskd takes no discovered tasks, trying again: ${String(error)}`);
        }
        await pause(backoff(failures), signal);
      }
    }
  }

  #reject(held: Held, error: unknown): void {
    const reason = textOf(() => (error instanceof Error ? error.message : shown(error)));
    const about = `task ${held.task.id} (${held.task.key})`;
    if (error instanceof PutOff) this.#log.info(`${about}: put off: ${reason}`);
    else if (error instanceof Retry || error instanceof Reject || error instanceof PayloadError) {
      this.#log.warn(`${about}: rejected: ${reason}`);
    }
    if (error instanceof Retry) {
      const delay = delayOf(error.after);
      this.#reports.reject(held, reason, delay === undefined ? {} : { delay });
    } else if (error instanceof PutOff) {
      const delay = delayOf(error.after) ?? 0;
      // Before the report, which would ask for tasks.
      if (error instanceof Throttle) this.#throttle(delay);
      this.#reports.putOff(held, reason, delay);
    } else if (error instanceof Reject) {
      this.#reports.reject(held, reason, { retry: false });
    } else if (error instanceof PayloadError) {
      this.#reports.reject(held, `the payload does not fit: ${reason}`, { retry: false });
    } else {
      const isError = error instanceof Error;
      this.#reports.reject(held, isError ? `${textOf(() => error.name)}: ${reason}` : reason);
      const trace = isError ? textOf(() => error.stack ?? reason) : reason;
      this.#log.error(`${about}: ${trace}`);
    }
  }

  /** Gives back what has not begun. */
  #giveBack(): void {
    for (const held of this.#waiting.splice(0)) {
      if (held.isOver) continue;
      // Those of a session go back with its end.
      if (held.isInSession) held.isOver = held.isReturned = true;
      else this.#reports.giveBack(held);
    }
  }

  /** Gives back what was to go back with the end of a session, whose stream broke before. */
  #giveBackReturned(): void {
    for (const held of this.#leases.all()) if (held.isInSession && held.isReturned) this.#reports.giveBack(held);
  }

  async #drain(): Promise<void> {
    this.#giveBack();
    const deadline = performance.now() + this.#drainTimeout;
    const isDone = (): boolean => this.#running === 0 && this.#reports.pending === 0;
    while (!isDone() && !this.#hardStop.signal.aborted && performance.now() < deadline) {
      await this.#change(deadline - performance.now());
    }
    if (isDone()) return;
    this.#hardStop.abort();
    for (const held of this.#leases.all()) {
      if (held.isOver) continue;
      held.lose(new WorkerStoppedError("the worker stopped"));
      this.#reports.reject(held, "the worker stopped");
    }
    const last = performance.now() + LAST_REPORTS;
    while (this.#reports.pending > 0 && !this.#end.signal.aborted && performance.now() < last) {
      await this.#change(last - performance.now());
    }
    if (this.#reports.pending > 0) {
      const error = new UnreportedError(this.#reports.pending, this.#reports.lastFailure);
      this.#log.error(error.message);
      this.#fatal ??= { error };
    }
  }
}

/** The tasks that fit into a completion, and the others. */
function divide(texts: readonly string[]): [string[], string[]] {
  const [own, surplus]: [string[], string[]] = [[], []];
  let bytes = 0;
  for (const text of texts) {
    bytes += Buffer.byteLength(text) + 1;
    const isTooMuch = own.length >= MOST_DISCOVERED || bytes > MOST_DISCOVERED_BYTES;
    // Only taskd knows the queue of an output, and refuses a completion with too many of them.
    const isSurplus = isTooMuch && !("port" in (JSON.parse(text) as object));
    (isSurplus ? surplus : own).push(text);
  }
  return [own, surplus];
}

/** A part of an error as text. What a handler throws may be anything, also something that throws when it is read. */
function textOf(read: () => unknown): string {
  try {
    return String(read());
  } catch {
    return "the handler has thrown something that has no text";
  }
}

/** A thing that was thrown and is no error. */
function shown(thrown: unknown): string {
  return typeof thrown === "string" ? thrown : inspect(thrown, { depth: 1, breakLength: Infinity });
}

/** A wait that the handler has changed into none is left to taskd. */
function delayOf(after: Duration | undefined): number | undefined {
  try {
    return after === undefined ? undefined : milliseconds(after, "after");
  } catch {
    return undefined;
  }
}

function count(value: number, name: string, least: number): number {
  if (Number.isSafeInteger(value) && value >= least) return value;
  throw new TypeError(`${name}: ${String(value)} is not a whole number from ${String(least)} on`);
}

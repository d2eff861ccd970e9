import { backoff, milliseconds, pause, type Duration } from "./duration.js";
import { LeaseLostError, Problem, TaskdError, TimeoutError, isAboutBody, isTransient } from "./errors.js";
import type { Extension, Source } from "./source.js";
import type { Held } from "./task.js";
import type { ItemAnswer, Logger } from "./types.js";

/** The longest time between two extensions: a clock of taskd's that is wrong does not end leases. */
const LONGEST = 10_000;
const SHORTEST = 50;
/** The time to the next extension, if nobody knows what is left of the lease, or taskd's clocks disagree. */
const UNKNOWN = 250;
/** The length of a lease, if nobody knows it: that of queues without settings. */
const DEFAULT_LEASE = 30_000;
const MOST_ITEMS = 1000;
/** The most calls at a time. */
const MOST_CALLS = 8;
/** The bounds of the time of one call: a quarter of the lease, so that there is time for another one. */
const SHORTEST_CALL = 500;
const LONGEST_CALL = 30_000;
/** Leases that are due within this time go with those that are due now. */
const SOON = 500;

/** Extends the leases of a worker, each when half of it is over. */
export class Leases {
  readonly #source: Source;
  readonly #worker: string;
  readonly #by: number | undefined;
  readonly #log: Logger;
  readonly #held = new Map<string, Held>();
  readonly #end: AbortSignal;
  #changed = new AbortController();
  /** The loop sleeps until this time. */
  #wakeAt = 0;
  #calls = 0;
  #fatal: { error: unknown } | undefined;
  /** How many extensions taskd has granted. */
  extended = 0;
  /** Hears of each lease that is lost. */
  onLost: (held: Held) => void = () => undefined;

  constructor(source: Source, worker: string, by: number | undefined, log: Logger, end: AbortSignal) {
    this.#source = source;
    this.#worker = worker;
    this.#by = by;
    this.#log = log;
    this.#end = end;
    end.addEventListener("abort", () => {
      this.#changed.abort();
    });
  }

  get size(): number {
    return this.#held.size;
  }

  /** Keeps a lease until `release`. */
  keep(held: Held): void {
    const { leaseLeft: left = 0, isInSession = false } = held.task;
    held.isInSession = isInSession;
    held.extendAt = next(left);
    // What is left of a new lease is its length, except for the way here.
    held.lease = this.#by ?? (left > 0 ? Math.ceil(left / 1000) * 1000 : DEFAULT_LEASE);
    this.#held.set(held.task.leaseToken + held.task.id, held);
    if (held.extendAt < this.#wakeAt) this.#changed.abort();
  }

  /** No lease belongs to a session any more. */
  leaveSession(): void {
    for (const held of this.#held.values()) held.isInSession = false;
  }

  /**
   * Extends all leases at once. The session that had them leaves those alone whose ends it does not know, and another
   * session learns of them.
   */
  extendAll(): void {
    for (const held of this.#held.values()) {
      // The answer to a call under way sets the time of the next one.
      void (held.call ?? Promise.resolve()).then(() => {
        // One that goes back needs its lease only if taskd does not take the report soon.
        held.extendAt = held.isReturned ? next(0) : 0;
        this.#changed.abort();
      });
    }
  }

  /** taskd says by itself that leases have ended. */
  lose(answers: readonly ItemAnswer[]): void {
    const ended = new Map(answers.map(({ id, status }) => [id, status]));
    for (const held of this.all()) {
      const status = ended.get(held.task.id);
      if (status !== undefined && !held.isOver) this.#lose(held, status);
    }
  }

  release(held: Held): void {
    this.#held.delete(held.task.leaseToken + held.task.id);
  }

  /** All leases. */
  all(): Held[] {
    return [...this.#held.values()];
  }

  /**
   * Extends until the end. Each call ends in a quarter of its leases, or in half of them if a stream does not answer.
   * Calls do not wait for each other: a lease whose extension is not answered does not hold up those of other calls.
   */
  async run(): Promise<void> {
    while (!this.#end.aborted && this.#fatal === undefined) {
      const now = performance.now();
      const due = this.#calls < MOST_CALLS ? this.#due(now) : [];
      for (const batch of batchesOf(due).slice(0, MOST_CALLS - this.#calls)) this.#begin(batch);
      if (due.length > 0) continue;
      const waiting = this.#calls < MOST_CALLS ? this.#idle() : [];
      this.#wakeAt = waiting.reduce((first, { extendAt }) => Math.min(first, extendAt), now + LONGEST);
      this.#changed = new AbortController();
      await pause(this.#wakeAt - now, this.#changed.signal);
    }
    if (this.#fatal !== undefined) throw this.#fatal.error;
  }

  /**
   * Extends one lease at once, and throws if the worker does not hold it any more. While taskd does not answer, it tries
   * again for as long as a call may take.
   */
  async extendNow(held: Held, by?: Duration): Promise<void> {
    const asked = by === undefined ? undefined : milliseconds(by, "by");
    // Two calls about a lease may overtake each other, and the last one counts.
    while (held.call !== undefined) await held.call;
    const deadline = performance.now() + LONGEST_CALL;
    for (let failures = 1; ; failures += 1) {
      if (held.isOver) throw overError(held);
      const [answer, error] = await this.#alone(held, asked);
      if (answer?.status === "OK") return;
      if (answer?.status === "INVALID") {
        throw new TaskdError(`the lease is not extended: ${answer.error ?? answer.status}`);
      }
      if (answer !== undefined && answer.status !== "TRY_LATER") throw new LeaseLostError(answer.status);
      const wait = backoff(failures);
      if (performance.now() + wait > deadline || this.#end.aborted) {
        throw new TaskdError(`the lease is not extended: ${answer?.error ?? String(error)}`, { cause: error });
      }
      await pause(wait, this.#end);
    }
  }

  #idle(): Held[] {
    return this.all().filter(({ call }) => call === undefined);
  }

  /** The leases to extend now. */
  #due(now: number): Held[] {
    const idle = this.#idle();
    return idle.some(({ extendAt }) => extendAt <= now) ? idle.filter(({ extendAt }) => extendAt <= now + SOON) : [];
  }

  /** Extends leases by their length, or by what the handlers asked for. It never throws. */
  #begin(batch: readonly Held[]): void {
    const done = this.#ask(batch).then((outcome) => {
      if (outcome.error !== undefined) this.#failed(batch, outcome.error);
      else
        batch.forEach((held, nth) => {
          this.#settle(held, outcome.answers[nth], held.lease);
        });
    });
    this.#calls += 1;
    this.#track(batch, done, () => {
      this.#calls -= 1;
    });
  }

  /** Extends one lease as its handler asked. */
  async #alone(held: Held, by: number | undefined): Promise<[ItemAnswer | undefined, unknown]> {
    const begun = performance.now();
    const asking = this.#ask([held], by);
    this.#track(
      [held],
      asking.then(() => undefined),
    );
    const { answers, error } = await asking;
    const answer = isAboutBody(error)
      ? { id: held.task.id, status: "INVALID" as const, error: error.detail }
      : answers[0];
    if (error !== undefined && answer === undefined && !isTransient(error)) this.#fail(error);
    // A refusal is about what the handler asked for, and the worker goes on as before.
    if (answer === undefined || answer.status === "INVALID") return [answer, error];
    if (answer.status === "OK" && by !== undefined) held.askedUntil = begun + by;
    this.#settle(held, answer, by ?? held.lease);
    return [answer, error];
  }

  #track(batch: readonly Held[], done: Promise<void>, onEnd: () => void = () => undefined): void {
    const call = done.then(() => {
      onEnd();
      for (const held of batch) held.call = undefined;
      this.#changed.abort();
    });
    for (const held of batch) held.call = call;
  }

  async #ask(batch: readonly Held[], by?: number): Promise<{ answers: ItemAnswer[]; error?: unknown }> {
    const now = performance.now();
    const extensions = batch.map(({ task: { id, leaseToken }, lease, askedUntil }): Extension => ({
      id,
      leaseToken,
      by: by ?? Math.max(lease, Math.ceil(askedUntil - now)),
      isAsked: by !== undefined || askedUntil > now,
    }));
    const limit = Math.min(...batch.map(limitOf));
    try {
      return { answers: await this.#source.extend(this.#worker, extensions, this.#end, limit) };
    } catch (error) {
      return { answers: [], error };
    }
  }

  /** A call failed as a whole. */
  #failed(batch: readonly Held[], error: unknown): void {
    if (this.#end.aborted) return;
    if (isAboutBody(error)) {
      for (const held of batch) {
        held.share = 1;
        held.extendAt = performance.now();
        if (batch.length === 1) this.#settle(held, { id: held.task.id, status: "INVALID", error: error.detail }, 0);
      }
      return;
    }
    if (!isTransient(error)) {
      this.#fail(error);
      return;
    }
    // One of them may be the reason: fewer go together the next time.
    const isSlow = error instanceof TimeoutError || (error instanceof Problem && error.status >= 500);
    for (const held of batch) {
      if (isSlow) held.share = Math.max(1, Math.ceil(batch.length / MOST_CALLS));
      this.#delay(held);
    }
  }

  #fail(error: unknown): void {
    this.#fatal ??= { error };
    this.#changed.abort();
  }

  #delay(held: Held): void {
    held.failures += 1;
    held.extendAt = performance.now() + Math.min(backoff(held.failures), limitOf(held));
  }

  #settle(held: Held, answer: ItemAnswer | undefined, left: number): void {
    const { status, error } = answer ?? { status: "TRY_LATER" as const, error: undefined };
    if (status === "OK") {
      this.extended += 1;
      held.failures = 0;
      held.share *= MOST_CALLS;
      held.extendAt = next(left);
    } else if (status === "TRY_LATER") {
      this.#delay(held);
    } else if (status === "INVALID") {
      this.#shorten(held, error);
    } else if (!held.isOver) {
      // A task that is over is on its way to taskd: its report is answered.
      this.#lose(held, status);
    } else {
      held.extendAt = Infinity;
    }
  }

  #lose(held: Held, status: ItemAnswer["status"]): void {
    this.release(held);
    held.lose(new LeaseLostError(status));
    this.onLost(held);
  }

  /** Goes on after a refusal: the lease may be longer than taskd's `max_lease`. */
  #shorten(held: Held, error: string | undefined): void {
    if (!held.isRefused) this.#log.error(`task ${held.task.id}: the lease cannot be extended: ${error ?? ""}`);
    held.isRefused = true;
    held.askedUntil = 0;
    held.extendAt = performance.now() + (held.lease > 1000 ? UNKNOWN : LONGEST);
    held.lease = Math.max(Math.ceil(held.lease / 2), Math.min(held.lease, 1000));
  }
}

/** The time of the next extension of a lease that has so much left. */
function next(left: number): number {
  return performance.now() + Math.max(left <= 0 ? UNKNOWN : Math.min(left / 2, LONGEST), SHORTEST);
}

/** The longest time of a call about this lease. */
function limitOf({ lease }: Held): number {
  return Math.min(Math.max(lease / 4, SHORTEST_CALL), LONGEST_CALL);
}

/** Leases that go together: about as long, so that a short one does not end the call about long ones. */
function batchesOf(due: readonly Held[]): Held[][] {
  const groups = new Map<string, Held[]>();
  for (const held of due) {
    const name = `${String(Math.floor(Math.log2(limitOf(held))))} ${String(held.share)}`;
    const group = groups.get(name);
    if (group === undefined) groups.set(name, [held]);
    else group.push(held);
  }
  const batches: Held[][] = [];
  for (const group of groups.values()) {
    const size = Math.min(group[0]?.share ?? MOST_ITEMS, MOST_ITEMS);
    for (let begin = 0; begin < group.length; begin += size) batches.push(group.slice(begin, begin + size));
  }
  return batches;
}

function overError(held: Held): unknown {
  const { reason } = held.controller.signal as { reason: unknown };
  return reason ?? new TaskdError("the task is over: its lease cannot be extended");
}

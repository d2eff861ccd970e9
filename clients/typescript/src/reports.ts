import { Buffer } from "node:buffer";
import { setImmediate as immediate } from "node:timers/promises";

import { backoff, pause } from "./duration.js";
import { TaskdError, isAboutBody, isTransient } from "./errors.js";
import type { GetRequest, Report, Source } from "./source.js";
import type { Held } from "./task.js";
import type { ItemAnswer, ItemStatus, LeasedTask } from "./types.js";
import type { Json } from "./wire.js";

type Kind = "complete" | "reject";

interface Entry extends Report {
  held: Held;
  bytes: number;
  /** A call with others was refused as a whole, so this one goes alone. */
  isAlone: boolean;
}

export interface ReportLimits {
  /** The most reports of one call. */
  maxItems: number;
  /** The bytes of one call, about. A larger report goes alone. */
  maxBytes: number;
  /** How long a report waits for others, in milliseconds. */
  linger: number;
}

/** taskd takes at most 50,000 discovered tasks in a call. */
const MOST_DISCOVERED = 50_000;

/** How long a report may ask for tasks, in milliseconds. Then it goes anew without that, so that the worker can poll. */
const ASKS_FOR = 1000;

/** The longest wait of new reports after a call that failed, in milliseconds: they may be for another part of taskd. */
const SHORT = 500;
const RETURNED = "the worker stopped before it began";
/** taskd refuses a longer reason of a rejection, in bytes, … */
const LONGEST_REASON = 4000;
/** … and a longer delay, in milliseconds: 365 days. */
const LONGEST_DELAY = 365 * 86_400_000;

/** Reports of one kind that go one call after the other. */
interface Lane {
  readonly kind: Kind;
  /** Reports that taskd did not take before. New ones do not wait for these, nor share a call with them. */
  readonly isAgain: boolean;
  readonly entries: Entry[];
  isBusy: boolean;
  isCalling: boolean;
  /** The failures in a row. */
  failures: number;
}

/** Sends completions and rejections in batches: reports that come while a call is under way share the next one. */
export class Reports {
  readonly #source: Source;
  readonly #worker: string;
  readonly #limits: ReportLimits;
  readonly #end: AbortSignal;
  readonly #new: Record<Kind, Lane> = { complete: laneOf("complete"), reject: laneOf("reject") };
  readonly #again: Record<Kind, Lane> = { complete: laneOf("complete", true), reject: laneOf("reject", true) };
  /** The reports without an answer, and their bytes. */
  pending = 0;
  pendingBytes = 0;
  /** Why taskd did not take the last report that it did not take. */
  lastFailure: unknown;
  /** Hears how each report ended. */
  onAnswer: (held: Held, kind: Kind, status: ItemStatus, error: string | undefined) => void = () => undefined;
  /** What a call with completions asks for; `undefined`: no tasks. */
  next: () => GetRequest | undefined = () => undefined;
  /** Hears of the tasks that such a call has brought; `undefined`: it was refused, failed, or took too long. */
  onTasks: (tasks: readonly LeasedTask[] | undefined) => void = () => undefined;
  /** The call that asks for tasks. */
  #asking: AbortController | undefined;
  /** Hears of the error after which no report can be sent. */
  onFatal: (error: unknown) => void = () => undefined;

  constructor(source: Source, worker: string, limits: ReportLimits, end: AbortSignal) {
    this.#source = source;
    this.#worker = worker;
    this.#limits = limits;
    this.#end = end;
    end.addEventListener("abort", () => {
      this.stopAsking();
    });
  }

  complete(held: Held, text: string, discovered: number): void {
    this.#add("complete", held, text, discovered);
  }

  /** Gives back a task that no handler began, at no cost. */
  giveBack(held: Held, why = RETURNED): void {
    held.isReturned = true;
    this.#reject(held, why, { delay: "0ms", not_started: true });
  }

  /** Puts a task off, at no cost: it comes again after `delay` milliseconds. */
  putOff(held: Held, reason: string, delay: number): void {
    held.isPutOff = true;
    const wait = delay === 0 ? undefined : `${String(Math.min(delay, LONGEST_DELAY))}ms`;
    this.#reject(held, reason, { delay: wait, not_started: true });
  }

  /** Rejects a task; `delay` is in milliseconds. */
  reject(held: Held, reason: string, options: { retry?: boolean; delay?: number | undefined } = {}): void {
    const { retry = true, delay } = options;
    const wait = delay === undefined ? undefined : `${String(Math.min(delay, LONGEST_DELAY))}ms`;
    this.#reject(held, reason, { retry, delay: wait });
  }

  /** A call that asks for tasks is under way. */
  get isAsking(): boolean {
    return this.#asking !== undefined;
  }

  /** From now on the call that is under way only reports. */
  stopAsking(): void {
    this.#asking?.abort();
  }

  /** Completions go in a moment, and their call may ask for tasks. */
  get isAboutToAsk(): boolean {
    const { entries, isCalling, failures } = this.#new.complete;
    return entries.length > 0 && !isCalling && failures === 0 && this.#limits.linger === 0;
  }

  #reject(held: Held, reason: string, more: Json): void {
    const { id, leaseToken } = held.task;
    const { limit } = held;
    const rejection = { id, lease_token: leaseToken, reason: shorten(reason), ...more, limit };
    this.#add("reject", held, JSON.stringify(rejection), 0);
  }

  #add(kind: Kind, held: Held, text: string, discovered: number): void {
    held.isOver = true;
    const bytes = Buffer.byteLength(text) + 1;
    this.pending += 1;
    this.pendingBytes += bytes;
    this.#push(this.#new[kind], [{ id: held.task.id, text, discovered, held, bytes, isAlone: false }]);
  }

  #push(lane: Lane, entries: readonly Entry[]): void {
    lane.entries.push(...entries);
    void this.#pump(lane);
  }

  async #pump(lane: Lane): Promise<void> {
    if (lane.isBusy) return;
    lane.isBusy = true;
    try {
      if (lane.isAgain || this.#limits.linger > 0)
        await pause(lane.isAgain ? backoff(1) : this.#limits.linger, this.#end);
      // Handlers that end together are reported together.
      else await immediate();
      while (lane.entries.length > 0 && !this.#end.aborted) {
        const isTaken = await this.#send(lane, this.#take(lane.entries));
        lane.failures = isTaken ? 0 : lane.failures + 1;
        if (isTaken) continue;
        const wait = backoff(lane.failures);
        await pause(lane.isAgain ? wait : Math.min(wait, SHORT), this.#end);
      }
    } catch (error) {
      if (!this.#end.aborted) this.onFatal(error);
    } finally {
      lane.isBusy = false;
    }
  }

  /** The first reports that go together. */
  #take(queue: Entry[]): Entry[] {
    let [count, bytes, discovered] = [0, 0, 0];
    for (const entry of queue) {
      bytes += entry.bytes;
      discovered += entry.discovered;
      const isFull = count >= this.#limits.maxItems || bytes > this.#limits.maxBytes || discovered > MOST_DISCOVERED;
      if (count > 0 && (isFull || entry.isAlone)) break;
      count += 1;
      if (entry.isAlone) break;
    }
    return queue.splice(0, count);
  }

  /** Sends reports, and keeps those for later that taskd does not take now. False if it took none of them. */
  async #send(lane: Lane, batch: readonly Entry[]): Promise<boolean> {
    let answers: ItemAnswer[];
    lane.isCalling = true;
    try {
      answers = await this.#call(lane, batch);
    } catch (error) {
      if (isTransient(error)) {
        this.lastFailure = error;
        this.#push(this.#again[lane.kind], batch);
        return false;
      }
      if (!isAboutBody(error)) throw error;
      if (batch.length > 1) {
        lane.entries.unshift(...batch.map((entry) => ({ ...entry, isAlone: true })));
        return true;
      }
      answers = batch.map(({ id }) => ({ id, status: "INVALID", error: error.detail }));
    } finally {
      lane.isCalling = false;
    }
    const later: Entry[] = [];
    batch.forEach((entry, nth) => {
      const { status, error } = answers[nth] ?? { status: "TRY_LATER" as const, error: "there is no answer" };
      if (status === "TRY_LATER") {
        this.lastFailure = new TaskdError(error ?? status);
        later.push(entry);
      } else this.#settle(lane.kind, entry, status, error);
    });
    if (later.length > 0) this.#push(this.#again[lane.kind], later);
    return later.length < batch.length;
  }

  async #call(lane: Lane, batch: readonly Entry[]): Promise<ItemAnswer[]> {
    const next = lane === this.#new.complete ? this.next() : undefined;
    if (next !== undefined && this.#source.completeAndGet !== undefined) {
      let tasks: LeasedTask[] | undefined;
      const asking = new AbortController();
      this.#asking = asking;
      const timer = setTimeout(() => {
        asking.abort();
      }, ASKS_FOR);
      try {
        const completed = await this.#source.completeAndGet(next, batch, asking.signal);
        tasks = completed.tasks;
        return completed.answers;
      } catch (error) {
        // taskd takes back at no cost what it has not delivered, and a report counts once. A refusal may be about `next`.
        if (this.#end.aborted || (isTransient(error) && !asking.signal.aborted)) throw error;
      } finally {
        clearTimeout(timer);
        this.#asking = undefined;
        this.onTasks(tasks);
      }
    }
    return this.#source[lane.kind](this.#worker, batch, this.#end);
  }

  #settle(kind: Kind, entry: Entry, status: ItemStatus, error: string | undefined): void {
    this.pending -= 1;
    this.pendingBytes -= entry.bytes;
    // taskd would refuse the same completion again. The lease is still there, and ends as a failure with the reason.
    if (kind === "complete" && status === "INVALID") {
      delete entry.held.limit;
      this.reject(entry.held, `taskd refuses the completion: ${error ?? ""}`);
    }
    this.onAnswer(entry.held, kind, status, error);
  }
}

function laneOf(kind: Kind, isAgain = false): Lane {
  return { kind, isAgain, entries: [], isBusy: false, isCalling: false, failures: 0 };
}

/** A reason that taskd takes: text, since half a character is none, and not longer than it may be. */
function shorten(reason: string): string {
  const bytes = Buffer.from(reason);
  if (bytes.length <= LONGEST_REASON) return bytes.toString();
  const more = "…";
  let end = LONGEST_REASON - Buffer.byteLength(more);
  // The second and further bytes of a character begin with the bits 10.
  while (end > 0 && ((bytes[end] ?? 0) & 0xc0) === 0x80) end -= 1;
  return bytes.toString("utf8", 0, end) + more;
}

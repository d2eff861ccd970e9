import { Buffer } from "node:buffer";

import { backoff, pause } from "./duration.js";
import { ForbiddenError, NotFoundError, Problem, UnauthenticatedError } from "./errors.js";
import type { Report, Source } from "./source.js";
import type { Held } from "./task.js";
import type { ItemAnswer, ItemStatus } from "./types.js";

type Kind = "complete" | "reject";

interface Entry extends Report {
  held: Held;
  bytes: number;
  tries: number;
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

/** Sends completions and rejections in batches: reports that come while a call is under way share the next one. */
export class Reports {
  readonly #source: Source;
  readonly #worker: string;
  readonly #limits: ReportLimits;
  readonly #end: AbortSignal;
  readonly #queues: Record<Kind, Entry[]> = { complete: [], reject: [] };
  readonly #isBusy: Record<Kind, boolean> = { complete: false, reject: false };
  /** The reports without an answer, and their bytes. */
  pending = 0;
  pendingBytes = 0;
  /** Hears how each report ended. */
  onAnswer: (held: Held, kind: Kind, status: ItemStatus, error: string | undefined) => void = () => undefined;
  /** Hears of the error after which no report can be sent. */
  onFatal: (error: unknown) => void = () => undefined;

  constructor(source: Source, worker: string, limits: ReportLimits, end: AbortSignal) {
    this.#source = source;
    this.#worker = worker;
    this.#limits = limits;
    this.#end = end;
  }

  complete(held: Held, text: string): void {
    this.#add("complete", held, text, held.discovered.length);
  }

  reject(held: Held, reason: string, options: { retry?: boolean; delay?: string | undefined } = {}): void {
    const { id, leaseToken } = held.task;
    const { retry = true, delay } = options;
    this.#add(
      "reject",
      held,
      JSON.stringify({ id, lease_token: leaseToken, reason: shorten(reason), retry, delay }),
      0,
    );
  }

  #add(kind: Kind, held: Held, text: string, discovered: number): void {
    held.isOver = true;
    const bytes = Buffer.byteLength(text) + 1;
    this.pending += 1;
    this.pendingBytes += bytes;
    this.#queues[kind].push({ id: held.task.id, text, discovered, held, bytes, tries: 0, isAlone: false });
    void this.#pump(kind);
  }

  async #pump(kind: Kind): Promise<void> {
    if (this.#isBusy[kind]) return;
    this.#isBusy[kind] = true;
    const queue = this.#queues[kind];
    try {
      await pause(this.#limits.linger, this.#end);
      while (queue.length > 0 && !this.#end.aborted) await this.#send(kind, this.#take(queue));
    } catch (error) {
      if (!this.#end.aborted) this.onFatal(error);
    } finally {
      this.#isBusy[kind] = false;
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

  async #send(kind: Kind, batch: Entry[]): Promise<void> {
    let answers: ItemAnswer[];
    try {
      answers = await this.#source[kind](this.#worker, batch, this.#end);
    } catch (error) {
      if (!isAboutBody(error)) throw error;
      if (batch.length > 1) {
        this.#queues[kind].unshift(...batch.map((entry) => ({ ...entry, isAlone: true })));
        return;
      }
      answers = batch.map(({ id }) => ({ id, status: "INVALID", error: error.detail }));
    }
    batch.forEach((entry, nth) => {
      const { status, error } = answers[nth] ?? { status: "TRY_LATER" as const, error: "there is no answer" };
      this.#settle(kind, entry, status, error);
    });
  }

  #settle(kind: Kind, entry: Entry, status: ItemStatus, error: string | undefined): void {
    if (status === "TRY_LATER") {
      entry.tries += 1;
      void pause(backoff(entry.tries), this.#end).then(() => {
        this.#queues[kind].push(entry);
        void this.#pump(kind);
      });
      return;
    }
    this.pending -= 1;
    this.pendingBytes -= entry.bytes;
    // taskd would refuse the same completion again. The lease is still there, and ends as a failure with the reason.
    if (kind === "complete" && status === "INVALID") {
      this.reject(entry.held, `taskd refuses the completion: ${error ?? ""}`);
    }
    this.onAnswer(entry.held, kind, status, error);
  }
}

/** True for a refusal that another body would not meet. */
function isAboutBody(error: unknown): error is Problem {
  const isAboutCaller =
    error instanceof UnauthenticatedError || error instanceof ForbiddenError || error instanceof NotFoundError;
  return error instanceof Problem && !isAboutCaller && (error.status === 400 || error.status === 413);
}

/** taskd keeps 1,024 bytes of a reason in a history, and refuses more than 4,096. Half a character is no text. */
function shorten(reason: string): string {
  const short = reason.length <= 1000 ? reason : `${reason.slice(0, 999)}…`;
  return short.replace(/\p{Surrogate}/gu, "\uFFFD");
}

import { milliseconds, pause, type Duration } from "./duration.js";
import { LeaseLostError, TaskdError } from "./errors.js";
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

/** Extends the leases of a worker, each when half of it is over. */
export class Leases {
  readonly #source: Source;
  readonly #worker: string;
  readonly #by: number | undefined;
  readonly #log: Logger;
  readonly #held = new Map<string, Held>();
  readonly #end: AbortSignal;
  #changed = new AbortController();
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
    const { leaseLeft: left = 0 } = held.task;
    held.extendAt = next(left);
    // What is left of a new lease is its length, except for the way here.
    held.lease = this.#by ?? (left > 0 ? Math.ceil(left / 1000) * 1000 : DEFAULT_LEASE);
    this.#held.set(held.task.leaseToken + held.task.id, held);
    this.#changed.abort();
  }

  release(held: Held): void {
    this.#held.delete(held.task.leaseToken + held.task.id);
  }

  /** All leases. */
  all(): Held[] {
    return [...this.#held.values()];
  }

  /** Extends until the end. */
  async run(): Promise<void> {
    while (!this.#end.aborted) {
      const now = Date.now();
      const first = Math.min(...this.all().map((held) => held.extendAt), now + LONGEST);
      if (first > now) {
        this.#changed = new AbortController();
        await pause(first - now, this.#changed.signal);
        continue;
      }
      // Those that are due soon go with them.
      const due = this.all().filter((held) => held.extendAt <= now + 500);
      for (let begin = 0; begin < due.length; begin += MOST_ITEMS) {
        await this.#extend(due.slice(begin, begin + MOST_ITEMS));
      }
    }
  }

  /** Extends one lease at once, and throws if the worker does not hold it any more. */
  async extendNow(held: Held, by?: Duration): Promise<void> {
    const [answer] = await this.#ask([held], by === undefined ? undefined : milliseconds(by, "by"));
    if (answer === undefined || answer.status === "OK") return;
    if (answer.status === "INVALID" || answer.status === "TRY_LATER") {
      throw new TaskdError(`the lease is not extended: ${answer.error ?? answer.status}`);
    }
    throw new LeaseLostError(answer.status);
  }

  async #extend(due: readonly Held[]): Promise<void> {
    try {
      await this.#ask(due);
    } catch (error) {
      if (!this.#end.aborted) throw error;
    }
  }

  /** Extends leases by this time, or by their own length. */
  async #ask(due: readonly Held[], by?: number): Promise<ItemAnswer[]> {
    const extensions = due.map(({ task: { id, leaseToken }, lease }): Extension => ({
      id,
      leaseToken,
      by: by ?? lease,
    }));
    const answers = await this.#source.extend(this.#worker, extensions, this.#end);
    due.forEach((held, nth) => {
      const answer = answers[nth];
      if (answer !== undefined) this.#settle(held, answer, by ?? held.lease);
    });
    return answers;
  }

  #settle(held: Held, answer: ItemAnswer, left: number): void {
    const { status } = answer;
    if (status === "OK") {
      this.extended += 1;
      held.extendAt = next(left);
    } else if (status === "TRY_LATER") {
      held.extendAt = Date.now() + UNKNOWN;
    } else if (status === "INVALID") {
      this.#log.error(`task ${held.task.id}: the lease cannot be extended: ${answer.error ?? ""}`);
      held.extendAt = Infinity;
    } else if (!held.isOver) {
      // A task that is over is on its way to taskd: its report is answered.
      this.release(held);
      held.lose(new LeaseLostError(status));
      this.onLost(held);
    } else {
      held.extendAt = Infinity;
    }
  }
}

/** The time of the next extension of a lease that has so much left. */
function next(left: number): number {
  return Date.now() + Math.max(left <= 0 ? UNKNOWN : Math.min(left / 2, LONGEST), SHORTEST);
}

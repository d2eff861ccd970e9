import { milliseconds, type Duration } from "./duration.js";

/** Thrown by a handler whose task cannot be done: no other attempt would help. A task for one worker is then dead. */
export class Reject extends Error {
  override name = "Reject";

  constructor(reason: string, options: { cause?: unknown } = {}) {
    super(reason, options);
  }
}

/** Thrown by a handler that wants another attempt. This one counts as a failure, as each attempt does. */
export class Retry extends Error {
  override name = "Retry";
  /** The wait before the next attempt, in place of the backoff of the queue. */
  readonly after: Duration | undefined;

  constructor(
    reason = "the handler asks for another attempt",
    options: { after?: Duration | undefined; cause?: unknown } = {},
  ) {
    const { after, ...rest } = options;
    super(reason, rest);
    if (after !== undefined) milliseconds(after, "after");
    this.after = after;
  }
}

/**
 * Thrown by a handler: not now. The task comes again after this time, and no failure counts. For a site that is busy, or
 * a service that is away. Without `after` the task comes again at once, or, after `task.hold`, when the hold is over.
 * Nothing bounds how often a task is put off, except its deadline. A taskd that is too old for this counts a failure.
 */
export class PutOff extends Error {
  override name = "PutOff";
  /** The wait before the task comes again. */
  readonly after: Duration;

  constructor(reason: string, options: { after?: Duration | undefined; cause?: unknown } = {}) {
    const { after = 0, ...rest } = options;
    super(reason, rest);
    milliseconds(after, "after");
    this.after = after;
  }
}

/**
 * Thrown by a handler: not now, and nothing else either. The task comes again after this time, at no cost as after
 * `PutOff`, and until then the worker takes no tasks: for a service that every task needs and that is away or asks for a
 * pause. Tasks that wait in the worker go to others at once.
 */
export class Throttle extends PutOff {
  override name = "Throttle";
}

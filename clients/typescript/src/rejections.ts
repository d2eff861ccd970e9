import { milliseconds, type Duration } from "./duration.js";

/** Thrown by a handler that cannot do its task: the attempt is a failure. */
export class Reject extends Error {
  override name = "Reject";
  /** `false`: no other attempt is made, and the task is dead. */
  readonly retry: boolean;
  /** The wait before the next attempt, in place of the backoff of the queue. */
  readonly after: Duration | undefined;

  constructor(reason: string, options: { retry?: boolean; after?: Duration; cause?: unknown } = {}) {
    super(reason, options.cause === undefined ? undefined : { cause: options.cause });
    if (options.after !== undefined) milliseconds(options.after, "after");
    this.retry = options.retry ?? true;
    this.after = options.after;
  }
}

/** Thrown by a handler that wants another attempt later. This one counts as a failure, as each attempt does. */
export class Retry extends Reject {
  override name = "Retry";

  constructor(options: { after?: Duration; reason?: string; cause?: unknown } = {}) {
    const { after, reason = "the handler asks for another attempt", cause } = options;
    super(reason, { retry: true, ...(after === undefined ? {} : { after }), cause });
  }
}

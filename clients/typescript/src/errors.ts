import type { ItemStatus } from "./types.js";

/** The base of all errors that this package makes. */
export class TaskdError extends Error {
  override name = "TaskdError";
}

/** No address answered: the connection was refused, or broke. The call may have been carried out. */
export class ConnectionError extends TaskdError {
  override name = "ConnectionError";
}

/** taskd did not answer in time. The call may have been carried out. */
export class TimeoutError extends TaskdError {
  override name = "TimeoutError";
}

/** The answer is not what taskd writes: a proxy perhaps, or a broken connection. */
export class InvalidAnswerError extends TaskdError {
  override name = "InvalidAnswerError";
}

/** The members of RFC 9457 problem details, with the place of a mistake in the body of the request. */
export interface ProblemDetails {
  readonly type: string;
  readonly title: string;
  readonly status: number;
  readonly detail: string;
  readonly line?: number | undefined;
  readonly column?: number | undefined;
}

/** taskd refused a call as a whole, and says why (RFC 9457). */
export class Problem extends TaskdError implements ProblemDetails {
  override name = "Problem";
  readonly type: string;
  readonly title: string;
  readonly status: number;
  readonly detail: string;
  readonly line: number | undefined;
  readonly column: number | undefined;
  /** When to try again, in milliseconds from the answer. */
  readonly retryAfter: number | undefined;

  constructor(call: string, details: ProblemDetails, retryAfter?: number) {
    super(`${call}: ${String(details.status)} ${details.title}: ${details.detail}`);
    this.type = details.type;
    this.title = details.title;
    this.status = details.status;
    this.detail = details.detail;
    this.line = details.line;
    this.column = details.column;
    this.retryAfter = retryAfter;
  }
}

/** 400: the request is wrong. */
export class BadRequestError extends Problem {
  override name = "BadRequestError";
}
/** 401: the call needs an access token, or has one that is not valid. */
export class UnauthenticatedError extends Problem {
  override name = "UnauthenticatedError";
}
/** 403: the access token does not allow the call. */
export class ForbiddenError extends Problem {
  override name = "ForbiddenError";
}
/** 404: there is no such task or route. */
export class NotFoundError extends Problem {
  override name = "NotFoundError";
}
/** 409: the task is over already. */
export class ConflictError extends Problem {
  override name = "ConflictError";
}
/** 413: the request is too large to be served at all. */
export class TooLargeError extends Problem {
  override name = "TooLargeError";
}
/** 429: taskd has no room now. */
export class BusyError extends Problem {
  override name = "BusyError";
}
/** 503: a server behind taskd is away, or taskd stops. */
export class UnavailableError extends Problem {
  override name = "UnavailableError";
}

type ProblemClass = new (call: string, details: ProblemDetails, retryAfter?: number) => Problem;

const BY_STATUS: Readonly<Record<number, ProblemClass>> = {
  400: BadRequestError,
  401: UnauthenticatedError,
  403: ForbiddenError,
  404: NotFoundError,
  409: ConflictError,
  413: TooLargeError,
  429: BusyError,
  503: UnavailableError,
};

/** Makes the error of an answer. `text` is its body: problem details, or what a proxy wrote. */
export function problemOf(call: string, status: number, text: string, retryAfter?: number): Problem {
  let details: ProblemDetails = { type: "about:blank", title: "Error", status, detail: text.slice(0, 500) };
  try {
    const read = JSON.parse(text) as Partial<ProblemDetails> | null;
    if (typeof read?.detail === "string") {
      const { type = "about:blank", title = "Error", detail, line, column } = read;
      details = { type, title, status, detail, line, column };
    }
  } catch {
    // Not JSON: the text itself is the detail.
  }
  return new (BY_STATUS[status] ?? Problem)(call, details, retryAfter);
}

/** True if the same call may succeed later, or at another address. */
export function isTransient(error: unknown): boolean {
  if (error instanceof Problem) {
    return error.status === 408 || error.status === 429 || error.status >= 500;
  }
  return error instanceof ConnectionError || error instanceof TimeoutError || error instanceof InvalidAnswerError;
}

/** True for a refusal that another body would not meet. */
export function isAboutBody(error: unknown): error is Problem {
  return error instanceof BadRequestError || error instanceof TooLargeError;
}

/** taskd refuses a task: it is wrong, and would be refused again. */
export class RejectedError extends TaskdError {
  override name = "RejectedError";
}

/** The reason of an aborted `task.signal`: the worker does not hold the task any more. */
export class LeaseLostError extends TaskdError {
  override name = "LeaseLostError";

  /** taskd's answer to the extension of the lease: `CANCELLED` after a cancel. */
  readonly status: ItemStatus;

  constructor(status: ItemStatus) {
    super(status === "CANCELLED" ? "the task was cancelled" : `the lease is lost: ${status}`);
    this.status = status;
  }
}

/** The reason of an aborted `task.signal`: the worker does not wait for its handlers any longer. */
export class WorkerStoppedError extends TaskdError {
  override name = "WorkerStoppedError";
}

/** The reason of an aborted `task.signal`: the handler has taken longer than `taskTimeout`. */
export class TaskTimeoutError extends TaskdError {
  override name = "TaskTimeoutError";
}

/** A worker stopped, and taskd did not take some of its reports: other workers do these tasks again. */
export class UnreportedError extends TaskdError {
  override name = "UnreportedError";

  /** How many reports are lost. */
  readonly reports: number;

  constructor(reports: number, cause: unknown) {
    super(
      `${String(reports)} reports did not reach taskd; other workers do these tasks again` +
        (cause instanceof Error ? `: ${cause.message}` : ""),
      { cause },
    );
    this.reports = reports;
  }
}

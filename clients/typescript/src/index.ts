export { Client } from "./client.js";
export type { Duration } from "./duration.js";
export {
  BadRequestError,
  BusyError,
  ConflictError,
  ConnectionError,
  ForbiddenError,
  InvalidAnswerError,
  LeaseLostError,
  NotFoundError,
  Problem,
  RejectedError,
  TaskTimeoutError,
  TaskdError,
  TimeoutError,
  TooLargeError,
  UnauthenticatedError,
  UnavailableError,
  UnreportedError,
  WorkerStoppedError,
  isTransient,
  type ProblemDetails,
} from "./errors.js";
export type { StreamOptions } from "./insert.js";
export type { Around, HandleOptions, Handler, WorkerOptions, WorkerStats } from "./options.js";
export { PutOff, Reject, Retry, Throttle } from "./rejections.js";
export { PayloadError, type Schema, type StandardSchema } from "./schema.js";
export type { Completed, Extension, GetRequest, Report, Source, SourceHost } from "./source.js";
export type { Task } from "./task.js";
export type { ConnectionOptions } from "./transport.js";
export type * from "./types.js";
export type { WatchOptions } from "./watch.js";
export { Worker } from "./worker.js";

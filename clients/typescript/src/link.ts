import * as grpc from "@grpc/grpc-js";

import { ConnectionError, Problem, TaskdError, TimeoutError, problemOf } from "./errors.js";
import {
  answerOf,
  millisecondsOf,
  type FrameAnswer,
  type SessionOpened,
  type TaskdFrame,
  type WorkerFrame,
} from "./frames.js";
import type { ItemAnswer } from "./types.js";

/** taskd ended the stream because of a frame: perhaps of the one with these reports. A call of their own says more. */
export class FrameRefusedError extends ConnectionError {
  override name = "FrameRefusedError";
}

/** The method, as `@grpc/proto-loader` has it. */
export type StreamTasks = grpc.MethodDefinition<WorkerFrame, TaskdFrame>;

/** What a link tells of itself. */
export interface LinkEvents {
  onTasks: (tasks: TaskdFrame["tasks"]) => void;
  onEnded: (answers: ItemAnswer[]) => void;
  /** Before each heartbeat. */
  onBeat: () => void;
}

/** The time for the first frame of taskd, in milliseconds. */
const OPENING = 10_000;
/** The part of a session's time-out after which a silent stream is dead: taskd may have heard its last frame a heartbeat
 * before, a third of the time-out, and ends the session when the time-out is over. */
const PATIENCE = 0.6;
/** taskd answers 16 frames at a time; the others wait here. */
const MOST_FRAMES = 12;

/** HTTP's statuses of gRPC's codes that say more than "try again". */
const STATUSES: Readonly<Record<number, number>> = {
  [grpc.status.INVALID_ARGUMENT]: 400,
  [grpc.status.UNAUTHENTICATED]: 401,
  [grpc.status.PERMISSION_DENIED]: 403,
  [grpc.status.RESOURCE_EXHAUSTED]: 429,
};

/** taskd does not take a frame, whoever sends it: it has too many items or bytes. */
const REFUSALS: readonly unknown[] = [
  grpc.status.INVALID_ARGUMENT,
  grpc.status.OUT_OF_RANGE,
  grpc.status.RESOURCE_EXHAUSTED,
];

interface Waiting {
  frame: WorkerFrame;
  resolve: (answer: FrameAnswer) => void;
  reject: (error: unknown) => void;
  timer?: NodeJS.Timeout;
  onWritten?: () => void;
}

/** One stream of a session. */
export class Link {
  readonly opened: Promise<SessionOpened>;
  /** The end of the stream: undefined, or the error that ended it. */
  readonly ended: Promise<unknown>;
  /** How many tasks taskd may still send, as far as this side knows. */
  demand: number;
  isOpen = false;
  /** taskd had opened the session. */
  wasOpen = false;
  /** If taskd refused a frame for its items: the most items that a frame without an answer had. Otherwise 0. */
  refusedItems = 0;
  readonly #call: grpc.ClientDuplexStream<WorkerFrame, TaskdFrame>;
  readonly #events: LinkEvents;
  readonly #answers = new Map<number, Waiting>();
  readonly #queue: Waiting[] = [];
  #onOpened!: (opened: SessionOpened) => void;
  #onEnded!: (error: unknown) => void;
  #reason: unknown;
  #number = 0;
  /** How many frames have come. */
  #frames = 0;
  #timeout = OPENING;
  #silence: NodeJS.Timeout | undefined;
  #beat: NodeJS.Timeout | undefined;
  #started: string[] = [];
  /** Those who wait until a frame with their task's begin is written. */
  readonly #untold = new Set<() => void>();
  #want = 0;
  #flush: NodeJS.Immediate | undefined;
  #isOver = false;

  constructor(
    client: grpc.Client,
    method: StreamTasks,
    metadata: grpc.Metadata,
    first: WorkerFrame,
    events: LinkEvents,
  ) {
    this.ended = new Promise((resolve) => (this.#onEnded = resolve));
    this.opened = new Promise((resolve, reject) => {
      this.#onOpened = resolve;
      void this.ended.then((error) => {
        reject(error ?? new ConnectionError("taskd ended the stream"));
      });
    });
    this.opened.catch(() => undefined);
    this.#events = events;
    this.demand = Number(first.open?.["want"] ?? 0);
    this.#call = client.makeBidiStreamRequest(
      method.path,
      method.requestSerialize,
      method.responseDeserialize,
      metadata,
    );
    this.#call.on("data", (frame: TaskdFrame) => {
      this.#hear(frame);
    });
    this.#call.on("error", (error: grpc.ServiceError) => {
      this.#end(this.#reason ?? errorOf(error), error.code);
    });
    this.#call.on("end", () => {
      this.#end(this.#reason);
    });
    this.#listen();
    this.#call.write(first);
  }

  /** Asks for more tasks. */
  want(more: number): void {
    this.demand += more;
    this.#want += more;
    this.#flush ??= setImmediate(() => {
      this.#send();
    });
  }

  /**
   * Says that a handler begins. Returns when the frame is written, so that taskd reads it even if the process dies then;
   * or when the stream is over.
   */
  async start(id: string): Promise<void> {
    if (this.#isOver) return;
    this.#started.push(id);
    this.#flush ??= setImmediate(() => {
      this.#send();
    });
    await new Promise<void>((resolve) => this.#untold.add(resolve));
  }

  /** Sends reports, and waits for the answer. */
  async ask(frame: WorkerFrame, limit: number): Promise<FrameAnswer> {
    if (this.#isOver || !this.isOpen) throw new ConnectionError("the stream is not open");
    return new Promise((resolve, reject) => {
      const waiting: Waiting = { frame, resolve, reject };
      waiting.timer = setTimeout(() => {
        this.#forget(waiting);
        reject(new TimeoutError(`taskd did not answer a frame within ${String(limit)} ms`));
      }, limit);
      this.#queue.push(waiting);
      this.#sendQueued();
    });
  }

  /** No more tasks are to come. */
  surrender(): void {
    this.#want = 0;
    this.demand = 0;
    if (this.isOpen && !this.#isOver) this.#call.write({ surrender: true });
  }

  /** Ends the session, and then the stream. */
  close(): void {
    if (!this.#isOver) {
      this.#send();
      this.#call.write({ close: true });
      this.#call.end();
    }
  }

  /** Ends the stream, and leaves the session. */
  cut(reason: unknown): void {
    this.#reason ??= reason;
    this.#call.cancel();
    this.#end(this.#reason);
  }

  #hear(frame: TaskdFrame): void {
    if (this.#isOver) return;
    this.#listen();
    const { opened, tasks, answer, ended, closing } = frame;
    if (opened !== null) this.#open(opened);
    if (tasks.length > 0) {
      this.demand = Math.max(0, this.demand - tasks.length);
      this.#events.onTasks(tasks);
    }
    if (answer !== null) this.#answer(answer);
    if (ended.length > 0) this.#events.onEnded(ended.map(answerOf));
    if (closing !== null) this.cut(new ConnectionError(`taskd ends the stream: ${closing.reason}`));
  }

  #open(opened: SessionOpened): void {
    [this.isOpen, this.wasOpen] = [true, true];
    this.demand = opened.granted;
    this.#timeout = Math.max(millisecondsOf(opened.timeout), 1000);
    this.#listen();
    const heartbeat = Math.max(millisecondsOf(opened.heartbeat), 200);
    this.#beat = setInterval(() => {
      this.#events.onBeat();
      this.#send(true);
    }, heartbeat * 0.7);
    this.#onOpened(opened);
  }

  #answer(answer: FrameAnswer): void {
    const waiting = this.#answers.get(answer.number);
    if (waiting === undefined) return;
    this.#answers.delete(answer.number);
    clearTimeout(waiting.timer);
    // taskd may have taken less of a demand.
    this.demand = Math.max(0, this.demand - ((waiting.frame.want ?? 0) - answer.granted));
    waiting.resolve(answer);
    this.#sendQueued();
  }

  /** Sends what has gathered. An empty frame is a heartbeat. */
  #send(isBeat = false): void {
    clearImmediate(this.#flush);
    this.#flush = undefined;
    if (this.#isOver || !this.isOpen) return;
    const frame: WorkerFrame = this.#started.length > 0 ? { started: this.#started.splice(0) } : {};
    const untold = [...this.#untold];
    const onWritten = (): void => {
      this.#tell(untold);
    };
    // A begin shares the frame of a demand, but does not wait with it for answers.
    const isShared = this.#want > 0 && this.#answers.size < MOST_FRAMES;
    if (!isShared && (isBeat || frame.started !== undefined)) this.#call.write(frame, onWritten);
    if (this.#want > 0) {
      // An answer says how much of it taskd took.
      const [want, ignore] = [this.#want, (): void => undefined];
      this.#want = 0;
      const shared = isShared ? { frame: { ...frame, want }, onWritten } : { frame: { want } };
      this.#queue.push({ ...shared, resolve: ignore, reject: ignore });
      this.#sendQueued();
    }
  }

  #tell(untold: Iterable<() => void>): void {
    for (const resolve of untold) {
      this.#untold.delete(resolve);
      resolve();
    }
  }

  #sendQueued(): void {
    while (this.#answers.size < MOST_FRAMES) {
      const waiting = this.#queue.shift();
      if (waiting === undefined) return;
      this.#number += 1;
      this.#answers.set(this.#number, waiting);
      this.#call.write({ ...waiting.frame, number: this.#number }, waiting.onWritten);
    }
  }

  /** Nobody waits for this answer any more. */
  #forget(waiting: Waiting): void {
    const place = this.#queue.indexOf(waiting);
    if (place >= 0) this.#queue.splice(place, 1);
    for (const [number, sent] of this.#answers) if (sent === waiting) this.#answers.delete(number);
    this.#sendQueued();
  }

  /**
   * Without any frame for so long, the stream is dead. taskd ends the session after its time-out, so this side gives up
   * earlier: then there is time to go on with the session.
   */
  #listen(): void {
    clearTimeout(this.#silence);
    this.#frames += 1;
    const heard = this.#frames;
    const limit = this.isOpen ? this.#timeout * PATIENCE : this.#timeout;
    this.#silence = setTimeout(() => {
      // A process that was busy for so long reads first what has come meanwhile.
      setImmediate(() => {
        if (this.#frames === heard) this.cut(new TimeoutError(`there was no frame of taskd for ${String(limit)} ms`));
      });
    }, limit);
  }

  #end(error: unknown, code?: grpc.status): void {
    if (this.#isOver) return;
    const isRefused = this.isOpen && REFUSALS.includes(code);
    this.#isOver = true;
    this.isOpen = false;
    clearTimeout(this.#silence);
    clearInterval(this.#beat);
    clearImmediate(this.#flush);
    this.#tell(this.#untold);
    const sent = [...this.#answers.values()];
    this.#answers.clear();
    if (isRefused && code === grpc.status.INVALID_ARGUMENT) {
      this.refusedItems = Math.max(0, ...sent.map(({ frame }) => itemsOf(frame)));
    }
    // Whether taskd refuses the worker for good, the next stream or the next call says.
    const broke =
      error instanceof TimeoutError ? error : new ConnectionError("taskd ended the stream", { cause: error });
    for (const { reject, timer } of sent) {
      clearTimeout(timer);
      reject(isRefused ? new FrameRefusedError(String(error), { cause: error }) : broke);
    }
    for (const { reject, timer } of this.#queue.splice(0)) {
      clearTimeout(timer);
      reject(broke);
    }
    this.#onEnded(error);
  }
}

function itemsOf({ completions = [], rejections = [], extensions = [] }: WorkerFrame): number {
  return completions.length + rejections.length + extensions.length;
}

/** The error of this package for one of gRPC. */
function errorOf(error: grpc.ServiceError): TaskdError {
  const what = "taskd.v1.Tasks/StreamTasks";
  const title = grpc.status[error.code];
  const status = STATUSES[error.code];
  if (status === undefined) {
    return new ConnectionError(`${what}: ${title}: ${error.details}`, { cause: error });
  }
  const problem = problemOf(what, status, JSON.stringify({ title, status, detail: error.details }));
  return problem instanceof Problem ? problem : new ConnectionError(what);
}

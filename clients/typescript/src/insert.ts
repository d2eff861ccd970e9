import { Buffer } from "node:buffer";

import { backoff, milliseconds, pause, type Duration } from "./duration.js";
import { InvalidAnswerError } from "./errors.js";
import { listOf, objectOf, type Answer, type Call, type Transport } from "./transport.js";
import type { IndexedInsertAnswer, InsertAnswer, NewTask, TaskResult } from "./types.js";
import { fromWire, taskText, withValue, type Json } from "./wire.js";

/** How a stream of tasks is sent. The memory of a stream is about `inFlight` + 1 batches. */
export interface StreamOptions {
  /** The most tasks of one call (1,000). */
  batch?: number | undefined;
  /** The bytes of one call, about (4 MiB). */
  batchBytes?: number | undefined;
  /** The calls at a time (2). Answers come in the order of the tasks. */
  inFlight?: number | undefined;
  /** How long a task waits for others ("200ms"). */
  linger?: Duration | undefined;
  signal?: AbortSignal | undefined;
}

const PATH = "/v1/tasks";

/** Lines of NDJSON, one for each task, or the reason why a task has none. */
type Lines = { text: string; error?: string }[];

type Tasks = Iterable<NewTask> | AsyncIterable<NewTask>;

/**
 * Inserts tasks of any number, in batches of lines, and yields an answer for each, in order.
 *
 * Each batch is a call of its own and not a part of one endless call: it can be sent again, also to another taskd, and
 * it needs no request that streams while its answer does, which not every `fetch` can.
 */
export async function* insertStream(
  transport: Transport,
  tasks: Tasks,
  options: StreamOptions = {},
): AsyncGenerator<IndexedInsertAnswer, void, undefined> {
  const controller = new AbortController();
  let endTurn = (): void => undefined;
  const abort = (): void => {
    controller.abort(options.signal?.reason);
    endTurn();
  };
  options.signal?.addEventListener("abort", abort, { once: true });
  const inFlight = Math.max(1, options.inFlight ?? 2);
  const batches = batchesOf(tasks, options);
  const calls: Promise<InsertAnswer[]>[] = [];
  let next: Promise<IteratorResult<Lines, void>> | undefined;
  let index = 0;
  try {
    for (let ended = false; !ended || calls.length > 0;) {
      options.signal?.throwIfAborted();
      if (!ended && calls.length < inFlight) next ??= quietly(batches.next());
      const first = calls[0];
      const read = calls.length < inFlight ? next : undefined;
      // The answers of a batch do not wait for a slow source. Promise.race would keep those of each turn as long as the
      // longest promise in it.
      const event = await new Promise<{ batch?: IteratorResult<Lines, void>; answers?: InsertAnswer[] }>(
        (resolve, reject) => {
          read?.then((batch) => {
            resolve({ batch });
          }, reject);
          first?.then((answers) => {
            resolve({ answers });
          }, reject);
          endTurn = () => {
            reject(options.signal?.reason as Error);
          };
        },
      );
      if (event.batch !== undefined) {
        next = undefined;
        if (event.batch.done === true) ended = true;
        else calls.push(quietly(insertLines(transport, event.batch.value, controller.signal)));
      }
      if (event.answers === undefined) continue;
      void calls.shift();
      for (const answer of event.answers) {
        yield { index, ...answer };
        index += 1;
      }
    }
  } finally {
    options.signal?.removeEventListener("abort", abort);
    controller.abort();
    // The source may be in the middle of a wait, and then ends after it.
    void quietly(batches.return());
  }
}

/** A promise whose rejection is looked at later, or never. */
function quietly<T>(promise: Promise<T>): Promise<T> {
  promise.catch(() => undefined);
  return promise;
}

/** Gathers tasks into batches. A batch is whole when it has enough tasks or bytes, or its first task has waited. */
async function* batchesOf(tasks: Tasks, options: StreamOptions): AsyncGenerator<Lines, void, undefined> {
  const [most, mostBytes] = [Math.max(1, options.batch ?? 1000), options.batchBytes ?? 4 << 20];
  const linger = milliseconds(options.linger ?? "200ms", "linger");
  const source = Symbol.asyncIterator in tasks ? tasks[Symbol.asyncIterator]() : tasks[Symbol.iterator]();
  let ended = false;
  try {
    let pending: Promise<IteratorResult<NewTask>> | undefined;
    while (!ended) {
      const lines: Lines = [];
      const over = new AbortController();
      let bytes = 0;
      let waits: Promise<"late"> | undefined;
      while (lines.length < most && bytes < mostBytes) {
        pending ??= Promise.resolve(source.next());
        const read = waits === undefined ? await pending : await Promise.race([quietly(pending), waits]);
        if (read === "late") break;
        pending = undefined;
        if (read.done === true) {
          ended = true;
          break;
        }
        const line = lineOf(read.value);
        bytes += Buffer.byteLength(line.text) + 1;
        lines.push(line);
        waits ??= pause(linger, over.signal).then(() => "late" as const);
      }
      over.abort();
      if (lines.length > 0) yield lines;
    }
  } finally {
    if (!ended) await source.return?.();
  }
}

function lineOf(task: NewTask): Lines[number] {
  try {
    return { text: taskText(task) };
  } catch (error) {
    return { text: "", error: error instanceof Error ? error.message : String(error) };
  }
}

/**
 * Inserts the lines of a batch, and sends those again that taskd did not store. After `retryFor` without progress
 * they stay `TRY_LATER`; a call that fails as a whole then throws.
 */
export async function insertLines(transport: Transport, lines: Lines, signal: AbortSignal): Promise<InsertAnswer[]> {
  const answers = lines.map(({ error }): InsertAnswer =>
    error === undefined ? { status: "TRY_LATER", error: "taskd did not answer" } : { status: "REJECTED", error },
  );
  let progress = performance.now();
  for (let failures = 0; ;) {
    const open = [...answers.keys()].filter((place) => answers[place]?.status === "TRY_LATER");
    if (open.length === 0) return answers;
    const body = open.map((place) => `${lines[place]?.text ?? ""}\n`).join("");
    const call: Call = { method: "POST", path: PATH, body, contentType: "application/x-ndjson", signal };
    // taskd itself waits about half a minute for room.
    const [answered, error] = linesOf(await transport.call({ ...call, wait: 60_000 }), open.length);
    answered.forEach((answer, nth) => {
      answers[open[nth] ?? 0] = answer;
    });
    if (answered.some((answer) => answer.status !== "TRY_LATER")) [progress, failures] = [performance.now(), 0];
    else failures += 1;
    if (failures > 0 && performance.now() - progress > transport.retryFor) {
      if (error !== undefined) throw error;
      return answers;
    }
    if (failures > 0) await pause(backoff(failures), signal);
    signal.throwIfAborted();
  }
}

/**
 * The answers of an NDJSON insert, up to the first line that is none. Of an answer that broke off, the last line counts
 * only if it is whole.
 */
function linesOf(answer: Answer, most: number): [InsertAnswer[], InvalidAnswerError?] {
  const lines = answer.text.split("\n");
  const last = lines.pop() ?? "";
  if (answer.cut === undefined && last !== "") lines.push(last);
  const answers: InsertAnswer[] = [];
  for (const line of lines) {
    try {
      answers.push(insertAnswerOf(objectOf(line, `POST ${PATH}`)));
    } catch (error) {
      if (error instanceof InvalidAnswerError) return [answers, error];
      throw error;
    }
  }
  if (answers.length <= most) return [answers];
  return [[], new InvalidAnswerError(`POST ${PATH}: ${String(answers.length)} answers to ${String(most)} tasks`)];
}

/** Reads the answer to one task. Its error then names no line: the answer's place does. */
export function insertAnswerOf<R>(read: Json): InsertAnswer<R> {
  const answer = fromWire<InsertAnswer<R>>(read);
  if (Array.isArray(read["results"])) {
    answer.results = listOf(read, "results").map((result) => withValue<TaskResult<R>>(result, "result"));
  }
  if (typeof answer.status !== "string") throw new InvalidAnswerError(`POST ${PATH}: an answer has no status`);
  if (answer.error !== undefined) answer.error = answer.error.replace(/^line \d+: /, "");
  return answer;
}

import { backoff, pause } from "./duration.js";
import { isTransient } from "./errors.js";
import { insertAnswerOf } from "./insert.js";
import { retryAfterOf, type Transport } from "./transport.js";
import type { InsertAnswer, NewTask } from "./types.js";
import { isFinal } from "./watch.js";
import { taskText, type Json } from "./wire.js";

/** taskd takes so many tasks in an insert that waits. */
const MOST = 1000;
/** The longest wait of one call, in milliseconds: taskd's `max_wait`. A longer wait takes several calls. */
const LONGEST_WAIT = 60_000;
/** A call that answers earlier, in milliseconds, did not wait. */
const SHORTEST_WAIT = 1000;

/**
 * Inserts tasks, and answers when all are final or the wait is over.
 *
 * A call that broke off, or that ended before the wait, is sent again with the tasks that are not final: taskd takes them
 * for duplicates, and waits for those that it has. The first answer says whether a task was new.
 */
export async function insertAndWait<R>(
  transport: Transport,
  tasks: readonly NewTask[],
  wait: number,
  signal?: AbortSignal,
): Promise<InsertAnswer<R>[]> {
  if (tasks.length > MOST) {
    throw new RangeError(`${String(tasks.length)} tasks in an insert that waits; at most ${String(MOST)}`);
  }
  const texts = tasks.map((task) => taskText(task));
  const answers: (InsertAnswer<R> | undefined)[] = texts.map(() => undefined);
  const deadline = performance.now() + wait;
  let [failures, failingSince] = [0, 0];
  for (;;) {
    const open = [...answers.keys()].filter((place) => isOpen(answers[place]));
    const begun = performance.now();
    const left = Math.max(0, Math.min(Math.ceil(deadline - begun), LONGEST_WAIT));
    const isStored = open.every((place) => answers[place] !== undefined && !isToRepeat(answers[place]));
    if (open.length === 0 || (left === 0 && isStored)) return answers.filter((answer) => answer !== undefined);
    let error: unknown;
    try {
      const read = await call(
        transport,
        open.map((place) => texts[place] ?? ""),
        left,
        signal,
      );
      open.forEach((place, nth) => {
        const answer = read[nth];
        if (answer !== undefined) answers[place] = merged(answers[place], insertAnswerOf<R>(answer));
      });
      if (!answers.some(isToRepeat)) failures = 0;
      else error = new Error("taskd did not store all tasks");
    } catch (failure) {
      if (!isTransient(failure)) throw failure;
      error = failure;
    }
    const now = performance.now();
    if (error !== undefined) {
      if (failures === 0) failingSince = begun;
      failures += 1;
      const rest = Math.max(backoff(failures), retryAfterOf(error));
      if (now - failingSince + rest > transport.retryFor) {
        if (answers.every((answer) => answer !== undefined)) return answers;
        throw error;
      }
      await pause(rest, signal);
    } else if (now - begun < SHORTEST_WAIT && now < deadline && answers.some(isOpen)) {
      // This taskd cannot wait now.
      await pause(Math.min(SHORTEST_WAIT, deadline - now), signal);
    }
    signal?.throwIfAborted();
  }
}

async function call(transport: Transport, texts: string[], wait: number, signal?: AbortSignal): Promise<Json[]> {
  const path = `/v1/tasks?wait=${String(wait)}ms`;
  const body = `[${texts.join(",")}]`;
  return transport.list({ method: "POST", path, body, list: "results", wait, signal }, { for: 0 });
}

function isToRepeat(answer: InsertAnswer | undefined): boolean {
  return answer?.status === "TRY_LATER";
}

/** True if another call may say more. */
function isOpen(answer: InsertAnswer | undefined): boolean {
  if (answer === undefined || isToRepeat(answer)) return true;
  return answer.status !== "REJECTED" && (answer.taskStatus === undefined || !isFinal(answer.taskStatus));
}

/** What two calls about a task say together. To the second one a task that the first one stored is a duplicate. */
function merged<R>(first: InsertAnswer<R> | undefined, second: InsertAnswer<R>): InsertAnswer<R> {
  if (first === undefined || isToRepeat(first)) return second;
  const { taskStatus, results } = second;
  return {
    ...first,
    ...(taskStatus === undefined ? {} : { taskStatus }),
    ...(results === undefined ? {} : { results }),
  };
}

import type { Client } from "./client.js";
import { durationText } from "./duration.js";
import { BadRequestError, isTransient } from "./errors.js";
import { listOf, type Answer, type Call, type ConnectionOptions } from "./transport.js";
import type { ItemAnswer, LeasedTask, Logger } from "./types.js";
import { fromWire, withValue } from "./wire.js";

/** What a worker asks for. */
export interface GetRequest {
  worker: string;
  queues: readonly string[];
  /** How the queues share the tasks; absent: by priority alone. */
  weights?: Readonly<Record<string, number>> | undefined;
  maxTasks: number;
  /** How long to wait for the first task, in milliseconds. */
  wait: number;
  /** In milliseconds; absent: as long as the task says. */
  leaseDuration?: number | undefined;
}

/** A completion or a rejection, as JSON that taskd reads. */
export interface Report {
  id: string;
  text: string;
  /** How many discovered tasks the text has. */
  discovered: number;
}

/** The answers to completions, and the tasks that came with them. */
export interface Completed {
  answers: ItemAnswer[];
  tasks: LeasedTask[];
}

export interface Extension {
  id: string;
  leaseToken: string;
  /** What the lease has then, in milliseconds from now. */
  by: number;
  /** A handler asked for it: the lease is to last so long even if the process says nothing meanwhile. */
  isAsked?: boolean;
}

/**
 * Where a worker gets tasks, and where it reports them: taskd, or `MockSource` in tests. `get` tries again itself. The
 * other calls try once: after an error that `isTransient` knows the worker calls again. All other errors are final.
 */
export interface Source {
  /** Where the tasks come from, for the log. Absent: from no server. */
  readonly address?: string;
  /**
   * It reports to taskd, which takes 10,000 discovered tasks with a completion: the worker inserts further ones by its
   * client. Absent: it takes any number.
   */
  readonly isTaskd?: boolean;
  /** Leases tasks. It ends with none when the signal is aborted. */
  get(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]>;
  /** True if tasks of a `get` may be on their way: a stop then waits a moment before it aborts. Absent: they cannot. */
  mayBeAnswering?(): boolean;
  complete(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]>;
  /**
   * Reports completions, and leases up to `maxTasks` other tasks that are there; it does not wait for any. The worker
   * does not call `get` meanwhile. It may abort this call, and calls `complete` then; so it does after an error. A source
   * without it brings tasks by `get` alone.
   */
  completeAndGet?(request: GetRequest, reports: readonly Report[], signal: AbortSignal): Promise<Completed>;
  reject(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]>;
  /**
   * Extends leases. Each try ends after `limit` milliseconds, and there are two at most: a later answer would come too
   * late for the leases.
   */
  extend(worker: string, extensions: readonly Extension[], signal: AbortSignal, limit: number): Promise<ItemAnswer[]>;
  /** Begins to serve a worker. The methods from here on are for sources that taskd tells of things by itself. */
  open?(host: SourceHost): void;
  /** The worker has room for so many tasks now. */
  room?(free: number): void;
  /** The tasks that have come and that no `get` has brought: the worker takes them to give them back. */
  takeArrived?(): LeasedTask[];
  /**
   * A handler is about to begin with a task. The worker waits for the promise, so that taskd knows of a task that kills
   * its process. It must end soon, and without an answer of taskd.
   */
  started?(id: string): Promise<void>;
  /** The worker has ended. Tasks with `isInSession` that did not begin go back now, at no cost. */
  close?(): Promise<void>;
}

/** The worker of a source. */
export interface SourceHost {
  readonly worker: string;
  readonly queues: readonly string[];
  readonly weights?: Readonly<Record<string, number>> | undefined;
  /** In milliseconds; absent: as long as each task says. */
  readonly leaseDuration: number | undefined;
  readonly token: ConnectionOptions["token"];
  readonly client: Client;
  readonly logger: Logger;
  /** The ids of the tasks in hand. */
  holding(): string[];
  /** Tasks have come although the worker has no room: taskd sent them before it heard of that. */
  onArrived(): void;
  /** Leases ended without a report. */
  onEnded(answers: readonly ItemAnswer[]): void;
  /** The stream of the session broke: the session may end before another stream goes on with it. */
  onAlone(): void;
  /** taskd has opened another session. It learns from extensions which tasks are in hand. */
  onMoved(): void;
}

/**
 * How long a poll goes on that is to end, in milliseconds: as long as taskd takes to answer where it has tasks. taskd
 * takes back what it leased for a call only if it has not written the answer.
 */
export const ANSWER_COMES = 250;
const FOR_EVER = Infinity;
/** The least time between two lines about a taskd that is away, in milliseconds. */
const REMIND_AFTER = 60_000;

/** taskd itself. */
export class HttpSource implements Source {
  readonly isTaskd = true;
  readonly #client: Client;
  readonly #log: Logger;
  /** The calls that fail now. */
  readonly #failing = new Set<string>();
  #isTold = false;
  #toldAt = -Infinity;
  /** The most tasks of a call: taskd's `max_items`, as far as it is known. */
  #mostTasks = Infinity;

  constructor(client: Client, log: Logger) {
    this.#client = client;
    this.#log = log;
  }

  async get(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]> {
    const { wait, leaseDuration } = request;
    const maxTasks = Math.min(request.maxTasks, this.#mostTasks);
    const body = getText(request, maxTasks);
    const call: Call = { method: "POST", path: "/v1/tasks:get", body, list: "tasks", wait, signal };
    let answer: Answer;
    try {
      answer = await this.#call({ ...call, keepBegunAnswer: true }, FOR_EVER);
    } catch (error) {
      // taskd releases leases whose answer nobody reads.
      if (signal.aborted) return [];
      if (!(error instanceof BadRequestError) || maxTasks === 1) throw error;
      // If it is something else than the number, the smallest call fails, too.
      this.#mostTasks = Math.floor(maxTasks / 2);
      return this.get(request, signal);
    }
    return tasksOf(answer, leaseDuration);
  }

  async complete(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]> {
    return this.#report("complete", "completions", worker, reports, signal);
  }

  mayBeAnswering(): boolean {
    return true;
  }

  async completeAndGet(request: GetRequest, reports: readonly Report[], signal: AbortSignal): Promise<Completed> {
    const { worker, leaseDuration } = request;
    const next = getText({ ...request, wait: 0 }, Math.min(request.maxTasks, this.#mostTasks));
    const body = reportText("completions", worker, reports, `,"next":${next}`);
    const call: Call = { method: "POST", path: "/v1/tasks:complete", body, list: "results", signal };
    const answer = await this.#call({ ...call, keepBegunAnswer: true }, 0);
    return { answers: answersOf(answer), tasks: "tasks" in answer.json ? tasksOf(answer, leaseDuration) : [] };
  }

  async reject(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]> {
    return this.#report("reject", "rejections", worker, reports, signal);
  }

  async extend(
    worker: string,
    extensions: readonly Extension[],
    signal: AbortSignal,
    limit: number,
  ): Promise<ItemAnswer[]> {
    const items = extensions.map(({ id, leaseToken, by }) => ({ id, lease_token: leaseToken, by: `${String(by)}ms` }));
    const body = JSON.stringify({ worker, extensions: items });
    return this.#items({ method: "POST", path: "/v1/tasks:extend", body, signal, timeout: limit });
  }

  async #report(
    what: string,
    list: string,
    worker: string,
    reports: readonly Report[],
    signal: AbortSignal,
  ): Promise<ItemAnswer[]> {
    const body = reportText(list, worker, reports);
    return this.#items({ method: "POST", path: `/v1/tasks:${what}`, body, signal });
  }

  async #items(call: Call): Promise<ItemAnswer[]> {
    return answersOf(await this.#call({ ...call, list: "results" }, 0));
  }

  async #call(call: Call, time: number): Promise<Answer> {
    const onFailure = (error: unknown): void => {
      this.#tellAway(call.path, error);
    };
    try {
      const answer = await this.#client.transport.call(call, { for: time, onFailure });
      this.#tellBack(call.path);
      return answer;
    } catch (error) {
      if (isTransient(error)) onFailure(error);
      throw error;
    }
  }

  /** Says that taskd is away, now and then: where a part of taskd is away, one call fails and another does not. */
  #tellAway(path: string, error: unknown): void {
    this.#failing.add(path);
    if (this.#isTold || performance.now() - this.#toldAt < REMIND_AFTER) return;
    [this.#isTold, this.#toldAt] = [true, performance.now()];
    this.#log.warn(`taskd does not answer, trying again: ${String(error)}`);
  }

  #tellBack(path: string): void {
    this.#failing.delete(path);
    if (!this.#isTold || this.#failing.size > 0) return;
    this.#isTold = false;
    this.#log.info("taskd answers again");
  }
}

function getText({ worker, queues, weights, wait, leaseDuration }: GetRequest, maxTasks: number): string {
  return JSON.stringify({
    worker,
    queues,
    weights,
    max_tasks: maxTasks,
    wait: durationText(wait, "wait"),
    lease_duration: leaseDuration === undefined ? undefined : durationText(leaseDuration, "leaseDuration"),
  });
}

/** `more` is the text of further members. */
function reportText(list: string, worker: string, reports: readonly Report[], more = ""): string {
  const items = reports.map((report) => report.text).join(",");
  return `{"worker":${JSON.stringify(worker)},"${list}":[${items}]${more}}`;
}

function answersOf(answer: Answer): ItemAnswer[] {
  return listOf(answer.json, "results").map((item) => fromWire<ItemAnswer>(item));
}

function tasksOf(answer: Answer, leaseDuration: number | undefined): LeasedTask[] {
  return listOf(answer.json, "tasks").map((read) => {
    const task = withValue<LeasedTask>(read, "payload");
    const left = leaseDuration ?? leaseLeft(task.leaseExpiresAt, answer.date);
    return left === undefined ? task : { ...task, leaseLeft: left };
  });
}

/**
 * What is left of a lease by taskd's clock, which an answer tells in whole seconds. Within that second the clock here
 * says more, if it agrees. Otherwise the result is up to a second too small.
 */
function leaseLeft(expiresAt: Date | undefined, date: number | undefined): number | undefined {
  if (expiresAt === undefined || date === undefined) return undefined;
  const [here, latest] = [Date.now(), date + 1000];
  const now = date <= here && here < latest ? here : latest;
  return expiresAt.getTime() - now;
}

import type { Client } from "./client.js";
import { durationText } from "./duration.js";
import { listOf, type Answer, type Call } from "./transport.js";
import type { ItemAnswer, LeasedTask, Logger } from "./types.js";
import { fromWire, withValue } from "./wire.js";

/** What a worker asks for. */
export interface GetRequest {
  worker: string;
  queues: readonly string[];
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

export interface Extension {
  id: string;
  leaseToken: string;
  /** What the lease has then, in milliseconds from now. */
  by: number;
}

/**
 * Where a worker gets tasks, and where it reports them: taskd, or `MockSource` in tests. A call that fails for a while
 * is tried again inside of it, so an error that it throws is final.
 */
export interface Source {
  /** Leases tasks. It ends with none when the signal is aborted. */
  get(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]>;
  complete(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]>;
  reject(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]>;
  extend(worker: string, extensions: readonly Extension[], signal: AbortSignal): Promise<ItemAnswer[]>;
}

const FOR_EVER = Infinity;

/** taskd itself. */
export class HttpSource implements Source {
  readonly #client: Client;
  readonly #log: Logger;
  #isAway = false;

  constructor(client: Client, log: Logger) {
    this.#client = client;
    this.#log = log;
  }

  async get(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]> {
    const { worker, queues, maxTasks, wait, leaseDuration } = request;
    const body = JSON.stringify({
      worker,
      queues,
      max_tasks: maxTasks,
      wait: durationText(wait, "wait"),
      lease_duration: leaseDuration === undefined ? undefined : durationText(leaseDuration, "leaseDuration"),
    });
    const call: Call = { method: "POST", path: "/v1/tasks:get", body, list: "tasks", wait, signal };
    let answer: Answer;
    try {
      answer = await this.#call({ ...call, keepBegunAnswer: true });
    } catch (error) {
      // taskd releases leases whose answer nobody reads.
      if (signal.aborted) return [];
      throw error;
    }
    return listOf(answer.json, "tasks").map((read) => {
      const task = withValue<LeasedTask>(read, "payload");
      const left = leaseDuration ?? leaseLeft(task.leaseExpiresAt, answer.date);
      return left === undefined ? task : { ...task, leaseLeft: left };
    });
  }

  async complete(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]> {
    return this.#report("complete", "completions", worker, reports, signal);
  }

  async reject(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]> {
    return this.#report("reject", "rejections", worker, reports, signal);
  }

  async extend(worker: string, extensions: readonly Extension[], signal: AbortSignal): Promise<ItemAnswer[]> {
    const items = extensions.map(({ id, leaseToken, by }) => ({ id, lease_token: leaseToken, by: `${String(by)}ms` }));
    const body = JSON.stringify({ worker, extensions: items });
    return this.#items("/v1/tasks:extend", body, signal);
  }

  async #report(
    what: string,
    list: string,
    worker: string,
    reports: readonly Report[],
    signal: AbortSignal,
  ): Promise<ItemAnswer[]> {
    const items = reports.map((report) => report.text).join(",");
    const body = `{"worker":${JSON.stringify(worker)},"${list}":[${items}]}`;
    return this.#items(`/v1/tasks:${what}`, body, signal);
  }

  async #items(path: string, body: string, signal: AbortSignal): Promise<ItemAnswer[]> {
    const { json } = await this.#call({ method: "POST", path, body, list: "results", signal });
    return listOf(json, "results").map((answer) => fromWire<ItemAnswer>(answer));
  }

  /** Tells once that taskd is away, and once that it is back. */
  async #call(call: Call): Promise<Answer> {
    const onFailure = (error: unknown): void => {
      if (!this.#isAway) this.#log.warn(`taskd does not answer, trying again: ${String(error)}`);
      this.#isAway = true;
    };
    const answer = await this.#client.transport.call(call, { for: FOR_EVER, onFailure });
    if (this.#isAway) this.#log.info("taskd answers again");
    this.#isAway = false;
    return answer;
  }
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

/** Tasks by streams of gRPC instead of polls: `import { StreamSource } from "@taskd/client/stream"`. */

import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

import { connectionTo, targetOf, type StreamTls } from "./connection.js";
import { abortWith, backoff, milliseconds, pause, type Duration } from "./duration.js";
import { ConnectionError, Problem, TaskdError, TimeoutError } from "./errors.js";
import {
  answerOf,
  completionOf,
  extensionOf,
  rejectionOf,
  taskOf,
  timeOf,
  type TaskdFrame,
  type WorkerFrame,
} from "./frames.js";
import { FrameRefusedError, Link, type StreamTasks } from "./link.js";
import {
  ANSWER_COMES,
  HttpSource,
  type Extension,
  type GetRequest,
  type Report,
  type Source,
  type SourceHost,
} from "./source.js";
import type { ItemAnswer, LeasedTask } from "./types.js";
import type { Json } from "./wire.js";

export type { StreamTls };

export interface StreamSourceOptions {
  /** The address of taskd's gRPC ("http://127.0.0.1:7601"), or several: if one ends a stream, the next one is tried. */
  url?: string | readonly string[] | undefined;
  /** The access token, or a function that knows it, which is asked for each stream. Absent: that of the worker. */
  token?: string | (() => string | Promise<string>) | undefined;
  tls?: StreamTls | undefined;
  /**
   * How long taskd keeps the tasks of a worker of which it hears nothing ("15s"; 2 s to 10 min). Make it longer than the
   * longest time for which a handler blocks the process.
   */
  timeout?: Duration | undefined;
  /** Ends other sessions with the worker's name at the start, for a worker that was restarted. */
  takeover?: boolean | undefined;
}

/** The time for one answer, in milliseconds. */
const ANSWER = 30_000;
/** The longest poll while there is no stream. */
const POLL = 5000;
/** The time for the function that knows the token. */
const TOKEN = 10_000;
/** The time for the end of a session. */
const CLOSING = 3000;
/** A stream that lived so long was good. */
const GOOD = 5000;
/** The shortest lease that a session asks for by itself. */
const LEASE = 30_000;
const PROTO = fileURLToPath(new URL("../proto/taskd.proto", import.meta.url));

/**
 * Gets tasks by a stream: taskd sends them as soon as they are there, never more than the worker has room for, and takes
 * the reports on the same stream. While no stream can be had, the worker polls over HTTP.
 */
export class StreamSource implements Source {
  readonly isTaskd = true;
  readonly #options: StreamSourceOptions;
  readonly #addresses: readonly string[];
  readonly #timeout: number;
  /** The length of the leases. */
  #lease: number;
  readonly #method: StreamTasks;
  readonly #stop = new AbortController();
  readonly #arrived: LeasedTask[] = [];
  /** The tasks in hand with which a handler has begun. */
  readonly #begun = new Set<string>();
  #host: SourceHost | undefined;
  #polls: HttpSource | undefined;
  #loop: Promise<void> = Promise.resolve();
  #link: Link | undefined;
  #session = "";
  #hasTakenOver = false;
  /** Of the last stream. */
  #wasOpen = false;
  #room = 0;
  /** The most items of a frame: taskd's `max_items`, as far as it is known. */
  #mostItems = 1000;
  #current = 0;
  /** There was no stream at any address, so the worker polls. */
  #isPolling = false;
  /** The poll under way: what it may bring, and its end. */
  #poll: { maxTasks: number; end: AbortController } | undefined;
  #isTold = false;
  #fatal: { error: unknown } | undefined;
  #changed = new AbortController();

  constructor(options: StreamSourceOptions = {}) {
    const { url = "http://127.0.0.1:7601", timeout = "15s" } = options;
    this.#options = options;
    this.#addresses = typeof url === "string" ? [url] : url;
    if (this.#addresses.length === 0) throw new TypeError("url: there is no address");
    for (const address of this.#addresses) targetOf(address);
    this.#timeout = milliseconds(timeout, "timeout");
    // A process that is silent for less than the time-out keeps its leases.
    this.#lease = Math.max(LEASE, 2 * this.#timeout);
    const loaded = loadSync(PROTO, { keepCase: true, longs: Number, enums: String, defaults: true });
    const service = loaded["taskd.v1.Tasks"] as unknown as grpc.ServiceDefinition;
    this.#method = service["StreamTasks"] as unknown as StreamTasks;
  }

  get address(): string {
    return this.#addresses.join(", ");
  }

  open(host: SourceHost): void {
    if (this.#host !== undefined) throw new TypeError("a StreamSource serves one worker: make a new one");
    this.#host = host;
    this.#lease = host.leaseDuration ?? this.#lease;
    this.#polls = new HttpSource(host.client, host.logger);
    this.#loop = this.#run(host);
  }

  async get(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]> {
    const deadline = performance.now() + request.wait;
    this.room(request.maxTasks);
    while (!signal.aborted) {
      if (this.#fatal !== undefined) throw this.#fatal.error;
      if (this.#arrived.length > 0) return this.#given(this.#arrived.splice(0, request.maxTasks));
      const left = deadline - performance.now();
      if (left <= 0) return [];
      this.#changed = new AbortController();
      if (!this.#isPolling || this.#link?.isOpen === true) {
        const unbind = abortWith(this.#changed, signal);
        await pause(left, this.#changed.signal);
        unbind();
      } else {
        const tasks = await this.#polled({ ...request, wait: Math.min(left, POLL) }, signal);
        if (tasks.length > 0) return tasks;
      }
    }
    return [];
  }

  takeArrived(): LeasedTask[] {
    return this.#given(this.#arrived.splice(0));
  }

  mayBeAnswering(): boolean {
    return this.#poll !== undefined;
  }

  async #polled(request: GetRequest, signal: AbortSignal): Promise<LeasedTask[]> {
    const end = new AbortController();
    const unbind = abortWith(end, signal);
    this.#poll = { maxTasks: request.maxTasks, end };
    try {
      return this.#given(await this.#unary().get(request, end.signal));
    } finally {
      unbind();
      this.#poll = undefined;
      end.abort();
      // A stream that has opened meanwhile was not asked for what the poll might bring.
      this.room(this.#room);
    }
  }

  /** Ends the poll under way in a moment. */
  #endPoll(): void {
    const end = this.#poll?.end;
    if (end === undefined) return;
    void pause(ANSWER_COMES, end.signal).then(() => {
      end.abort();
    });
  }

  /** The worker has these tasks now, and less room. */
  #given(tasks: LeasedTask[]): LeasedTask[] {
    this.#room = Math.max(0, this.#room - tasks.length);
    return tasks;
  }

  room(free: number): void {
    this.#room = free;
    const link = this.#link;
    if (link?.isOpen !== true) return;
    const more = this.#wanted() - link.demand;
    if (more > 0) link.want(more);
    else if (free === 0 && link.demand > 0) link.surrender();
  }

  async started(id: string): Promise<void> {
    this.#begun.add(id);
    // Without a stream the next one says it.
    if (this.#link?.isOpen === true) await this.#link.start(id);
  }

  async complete(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]> {
    const call = async (): Promise<ItemAnswer[]> => this.#unary().complete(worker, reports, signal);
    for (const { id } of reports) this.#begun.delete(id);
    if (this.#link?.isOpen !== true) return call();
    const completions = reports.map(completionOf).filter((one) => one !== undefined);
    return completions.length < reports.length ? call() : this.#ask("completions", completions, ANSWER, call);
  }

  async reject(worker: string, reports: readonly Report[], signal: AbortSignal): Promise<ItemAnswer[]> {
    const call = async (): Promise<ItemAnswer[]> => this.#unary().reject(worker, reports, signal);
    for (const { id } of reports) this.#begun.delete(id);
    if (this.#link?.isOpen !== true) return call();
    return this.#ask("rejections", reports.map(rejectionOf), ANSWER, call);
  }

  async extend(
    worker: string,
    extensions: readonly Extension[],
    signal: AbortSignal,
    limit: number,
  ): Promise<ItemAnswer[]> {
    const call = async (some: readonly Extension[]): Promise<ItemAnswer[]> =>
      this.#unary().extend(worker, some, signal, limit);
    // A session ends no lease that was extended beside it, so these outlive its time-out.
    const isBeside = ({ by, isAsked = false }: Extension): boolean => isAsked && by > this.#timeout;
    const [beside, inside] = [extensions.filter(isBeside), extensions.filter((one) => !isBeside(one))];
    if (this.#link?.isOpen !== true || inside.length === 0) return call(extensions);
    const onStream = this.#ask("extensions", inside.map(extensionOf), limit, async () => call(inside));
    const [answered, others] = await Promise.all([
      onStream.catch(async (error: unknown) => {
        // The stream may hang, and count as dead only after the end of these leases.
        if (error instanceof TimeoutError) return call(inside);
        throw error;
      }),
      beside.length > 0 ? call(beside) : [],
    ]);
    return extensions.map((one) => (isBeside(one) ? others : answered).shift() ?? { id: one.id, status: "TRY_LATER" });
  }

  /**
   * Asks on the stream. If taskd ended it because of a frame, a call over HTTP says which of the items is wrong: sent on
   * the next stream, the same frame would end that one, too.
   */
  async #ask(
    kind: "completions" | "rejections" | "extensions",
    items: readonly Json[],
    limit: number,
    call: () => Promise<ItemAnswer[]>,
  ): Promise<ItemAnswer[]> {
    const answers: ItemAnswer[] = [];
    try {
      while (answers.length < items.length) {
        if (this.#link === undefined) throw new ConnectionError("the stream is not open");
        const part = items.slice(answers.length, answers.length + this.#mostItems);
        const answered = (await this.#link.ask({ [kind]: part }, limit))[kind];
        if (answered.length !== part.length) throw new ConnectionError("taskd did not answer all items of a frame");
        answers.push(...answered.map(answerOf));
      }
    } catch (error) {
      if (error instanceof FrameRefusedError) return call();
      throw error;
    }
    return answers;
  }

  async close(): Promise<void> {
    const link = this.#link;
    this.#stop.abort();
    link?.close();
    const over = new AbortController();
    const limit = pause(CLOSING, over.signal);
    await Promise.race([link?.ended, limit]);
    link?.cut(new ConnectionError("the worker has ended"));
    // A function that knows the token may never answer.
    await Promise.race([this.#loop, limit]);
    over.abort();
  }

  /** Opens a stream again and again, until the end. */
  async #run(host: SourceHost): Promise<void> {
    for (let failures = 0; !this.#stop.signal.aborted;) {
      const begun = performance.now();
      const error = await this.#live(host);
      if (this.#isOver()) return;
      if (this.#isRefusal(error)) {
        this.#fatal = { error };
        this.#changed.abort();
        this.#poll?.end.abort();
        return;
      }
      failures = performance.now() - begun > GOOD ? 1 : failures + 1;
      this.#tellAway(host, error);
      this.#current = (this.#current + 1) % this.#addresses.length;
      if (failures >= this.#addresses.length && !this.#isPolling) {
        this.#isPolling = true;
        this.#changed.abort();
      }
      const isRound = failures % this.#addresses.length === 0;
      await pause(isRound ? backoff(failures / this.#addresses.length) : 0, this.#stop.signal);
    }
  }

  #isOver(): boolean {
    return this.#stop.signal.aborted;
  }

  /** True for an error that the next stream would meet, too. A function may know another token by now. */
  #isRefusal(error: unknown): boolean {
    if (!(error instanceof Problem)) return false;
    const { token = this.#host?.token } = this.#options;
    const isOfToken = error.status === 401 || error.status === 403;
    return (isOfToken && (typeof token !== "function" || !this.#wasOpen)) || (error.status === 400 && !this.#wasOpen);
  }

  #tellAway(host: SourceHost, error: unknown): void {
    if (this.#isTold) return;
    this.#isTold = true;
    host.logger.warn(`there is no stream of tasks, trying again: ${String(error)}`);
  }

  /** One stream, to its end. Returns the reason. */
  async #live(host: SourceHost): Promise<unknown> {
    const client = connectionTo(this.#addresses[this.#current] ?? "", this.#options.tls);
    try {
      return await this.#follow(host, await this.#connect(host, client));
    } catch (error) {
      return error;
    } finally {
      client.close();
    }
  }

  /** Uses a stream to its end. Returns the reason. */
  async #follow(host: SourceHost, link: Link): Promise<unknown> {
    this.#link = link;
    try {
      const opened = await link.opened;
      this.#session = opened.session;
      this.#hasTakenOver = true;
      this.#isPolling = false;
      if (this.#isTold) host.logger.info("taskd sends tasks by a stream again");
      this.#isTold = false;
      this.#endPoll();
      if (!opened.resumed) {
        host.onMoved();
        this.#extendArrived();
      }
      // taskd may not have heard of a begin on the stream that broke.
      const holding = new Set(host.holding());
      for (const id of this.#begun) {
        if (holding.has(id)) void link.start(id);
        else this.#begun.delete(id);
      }
      this.room(this.#room);
    } catch {
      // The end of the stream has the reason.
    }
    const error = await link.ended;
    this.#link = undefined;
    this.#wasOpen = link.wasOpen;
    if (link.refusedItems > 1) this.#mostItems = Math.min(this.#mostItems, Math.floor(link.refusedItems / 2));
    for (const task of this.#arrived) delete task.isInSession;
    host.onAlone();
    return error ?? new ConnectionError("taskd ended the stream");
  }

  async #connect(host: SourceHost, client: grpc.Client): Promise<Link> {
    const metadata = new grpc.Metadata();
    const secret = await this.#secret(host);
    this.#stop.signal.throwIfAborted();
    if (secret !== undefined) metadata.set("authorization", `Bearer ${secret}`);
    const first: WorkerFrame = {
      open: {
        worker: host.worker,
        queues: host.queues,
        weights: host.weights,
        // A poll may begin before the stream is open.
        want: this.#isPolling ? 0 : this.#wanted(),
        session: this.#session,
        holding: this.#session === "" ? [] : [...host.holding(), ...this.#arrived.map(({ id }) => id)],
        takeover: this.#options.takeover === true && !this.#hasTakenOver,
        tells_started: true,
        // The worker extends its leases. taskd would go on with it for a worker that has moved to another process, and
        // then end them with the old session.
        keep_leases: false,
        timeout: timeOf(this.#timeout),
        lease_duration: timeOf(this.#lease),
      },
    };
    return new Link(client, this.#method, metadata, first, {
      onTasks: (tasks) => {
        this.#take(tasks);
        if (this.#room === 0) host.onArrived();
      },
      onEnded: (answers) => {
        const ended = new Set(answers.map(({ id }) => id));
        for (const id of ended) this.#begun.delete(id);
        const rest = this.#arrived.filter(({ id }) => !ended.has(id));
        this.#arrived.splice(0, this.#arrived.length, ...rest);
        host.onEnded(answers);
      },
      onBeat: () => {
        // taskd may have had no room for the whole demand.
        this.room(this.#room);
        this.#extendArrived();
      },
    });
  }

  async #secret({ token: ofWorker }: SourceHost): Promise<string | undefined> {
    const { token = ofWorker } = this.#options;
    if (typeof token !== "function") return token;
    const over = new AbortController();
    const unbind = abortWith(over, this.#stop.signal);
    try {
      // Without an end, a function that never answers leaves the worker without tasks, and nobody hears of it.
      return await Promise.race([
        token(),
        pause(TOKEN, over.signal).then(() => {
          throw new ConnectionError(`the function of the token did not answer within ${String(TOKEN)} ms`);
        }),
      ]);
    } finally {
      unbind();
      over.abort();
    }
  }

  #take(tasks: TaskdFrame["tasks"]): void {
    this.#arrived.push(...tasks.map((task) => taskOf(task, this.#lease)));
    this.#changed.abort();
  }

  /** Extends the leases of tasks that the worker has not taken yet, as of those that come during its stop. */
  #extendArrived(): void {
    const items = this.#arrived.map(({ id, leaseToken }) => extensionOf({ id, leaseToken, by: this.#lease }));
    // The answers do not matter: the worker extends what it takes.
    void this.#ask("extensions", items, ANSWER, async () => Promise.resolve([])).catch(() => undefined);
  }

  /** How many tasks taskd may send now. */
  #wanted(): number {
    return Math.max(0, this.#room - this.#arrived.length - (this.#poll?.maxTasks ?? 0));
  }

  #unary(): HttpSource {
    if (this.#polls === undefined) throw new TaskdError("the source is not open");
    return this.#polls;
  }
}

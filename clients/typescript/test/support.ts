/** A taskd of its own for each file of tests, and conditions to wait for. */

import { execFile, spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import { connect, createServer as createTcpServer, type AddressInfo, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { promisify } from "node:util";

import { Client, type Logger, type TaskView } from "@taskd/client";

// Files of tests run side by side, and each one's workers have a name of their own by default.
process.env["TASKD_WORKER"] = `typescript-test-${String(process.pid)}`;

const BIN = process.env["TASKD_BIN"] ?? "taskd";
const PATIENCE = 60_000;
/** taskd refuses variables that it does not know. */
const ENVIRONMENT = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("TASKD_")));

export const SILENT: Logger = { info: () => undefined, warn: () => undefined, error: () => undefined };

/** Asks again until the answer is neither false nor undefined. */
export async function until<T>(what: string, ask: () => T | Promise<T>): Promise<Exclude<T, false | undefined>> {
  const deadline = Date.now() + PATIENCE;
  for (;;) {
    const answer = await ask();
    if (answer !== false && answer !== undefined) return answer as Exclude<T, false | undefined>;
    if (Date.now() > deadline) throw new Error(`this did not become true in time: ${what}`);
    await sleep(20);
  }
}

/** A promise, and how to end it. */
export class Gate {
  open!: () => void;
  readonly opened = new Promise<void>((resolve) => {
    this.open = resolve;
  });
}

/** Ports that nobody uses now, below those of outgoing connections: what was killed comes back on the same ones. */
export async function freePorts(count: number): Promise<number[]> {
  const ports = new Set<number>();
  while (ports.size < count) {
    const port = 20_000 + Math.floor(Math.random() * 10_000);
    const server = createTcpServer();
    const isFree = await new Promise<boolean>((resolve) => {
      server.once("error", () => {
        resolve(false);
      });
      server.listen(port, "127.0.0.1", () => {
        resolve(true);
      });
    });
    if (isFree) await once(server.close(), "close");
    if (isFree) ports.add(port);
  }
  return [...ports];
}

/** A taskd with a data folder of its own. */
export class Taskd {
  readonly url: string;
  /** The address of gRPC. */
  readonly grpc: string;
  readonly client: Client;
  readonly #folder: string;
  readonly #args: string[];
  #process: ChildProcess | undefined;
  #log = "";

  private constructor(folder: string, ports: readonly number[], args: string[], scheme: string) {
    this.#folder = folder;
    const [http, grpc] = ports.map((port) => `127.0.0.1:${String(port)}`);
    this.#args = ["--pipelines", "all", "--config", join(folder, "taskd.toml"), "--data-dir", join(folder, "data")];
    this.#args.push("--http-listen", String(http), "--grpc-listen", String(grpc), ...args);
    this.url = `${scheme}://${String(http)}`;
    this.grpc = `${scheme}://${String(grpc)}`;
    this.client = new Client({ url: this.url });
  }

  /** Starts it, and waits until it is ready. `ready` replaces the question for it. */
  static async start(
    config = "",
    options: { scheme?: string; ready?: (url: string) => Promise<boolean> } = {},
  ): Promise<Taskd> {
    const folder = await mkdtemp(join(process.env["TASKD_TEST_DIR"] ?? tmpdir(), "ts-"));
    const defaults = `[queues.default]\nbackoff = ["50ms"]\n`;
    await writeFile(join(folder, "taskd.toml"), config.includes("[queues.default]") ? config : config + defaults);
    const taskd = new Taskd(folder, await freePorts(2), [], options.scheme ?? "http");
    await taskd.run(options.ready);
    return taskd;
  }

  /** Starts another process on the Redis and the database of one that runs. */
  static async beside(other: Taskd): Promise<Taskd> {
    const data = join(other.#folder, "data");
    return Taskd.start(`redis_url = "unix://${data}/redis.sock"\ndatabase_url = "sqlite://${data}/taskd.db"\n`);
  }

  /** Starts the process, again perhaps, and waits until it is ready. */
  async run(ready: (url: string) => Promise<boolean> = isReady): Promise<void> {
    const child = spawn(BIN, this.#args, { env: ENVIRONMENT, stdio: ["ignore", "pipe", "pipe"] });
    const gather = (chunk: Buffer): void => {
      this.#log = (this.#log + chunk.toString()).slice(-20_000);
    };
    child.stdout.on("data", gather);
    child.stderr.on("data", gather);
    child.on("error", (error) => {
      this.#log += String(error);
    });
    this.#process = child;
    await until("taskd is ready", async () => {
      if (child.exitCode !== null || child.pid === undefined) throw new Error(`taskd did not start:\n${this.#log}`);
      return ready(this.url);
    });
  }

  async kill(): Promise<void> {
    await this.#end("SIGKILL");
  }

  async stop(): Promise<void> {
    await this.#end("SIGTERM");
    await rm(this.#folder, { recursive: true, force: true });
  }

  /** Runs a command of taskd on this data folder, and returns what it prints. */
  async command(...args: string[]): Promise<string> {
    const of = ["--config", join(this.#folder, "taskd.toml"), "--data-dir", join(this.#folder, "data")];
    return (await promisify(execFile)(BIN, [...args, ...of], { env: ENVIRONMENT })).stdout.trim();
  }

  async #end(signal: NodeJS.Signals): Promise<void> {
    const child = this.#process;
    this.#process = undefined;
    if (child === undefined || child.exitCode !== null || child.signalCode !== null) return;
    const ended = once(child, "exit");
    child.kill(signal);
    await ended;
  }
}

async function isReady(url: string): Promise<boolean> {
  try {
    return (await fetch(`${url}/readyz`)).ok;
  } catch {
    return false;
  }
}

/** How many sessions this taskd has ended because their workers said nothing. */
export async function silentEnds(url: string): Promise<number> {
  const text = await (await fetch(`${url}/metrics`)).text();
  return Number(/^taskd_sessions_ended_total\{reason="silent"\} (\d+)/m.exec(text)?.[1] ?? 0);
}

/** Waits until all tasks of a queue have this status, and returns them. */
export async function allAre(client: Client, queue: string, status: string, count: number): Promise<TaskView[]> {
  return until(`${String(count)} tasks of ${queue} are ${status}`, async () => {
    // A task that Redis calls completed is listed as unfinished until SQL has its result.
    if ((await client.listPage({ queue, status: "UNFINISHED" }, { limit: 1 })).tasks.length > 0) return undefined;
    const tasks: TaskView[] = [];
    for await (const task of client.listTasks({ queue })) tasks.push(task);
    return tasks.length === count && tasks.every((task) => task.status === status) ? tasks : undefined;
  });
}

/** A server that answers as the test says. */
export async function fakeTaskd(
  answer: (
    path: string,
    body: string,
    nth: number,
  ) => { status?: number; headers?: Record<string, string>; body: string },
): Promise<{ url: string; server: Server; close: () => Promise<void> }> {
  let nth = 0;
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (chunk: Buffer) => {
      body += chunk.toString();
    });
    request.on("end", () => {
      const { status = 200, headers = {}, body: text } = answer(request.url ?? "", body, nth);
      nth += 1;
      response.writeHead(status, { "content-type": "application/json", ...headers }).end(text);
    });
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const close = async (): Promise<void> => {
    server.closeAllConnections();
    await once(server.close(), "close");
  };
  return { url: `http://127.0.0.1:${String((server.address() as AddressInfo).port)}`, server, close };
}

/** A server whose answers the test writes itself. */
export async function rawServer(
  answer: (request: IncomingMessage, response: ServerResponse, nth: number) => void,
): Promise<{ url: string; server: Server; close: () => Promise<void> }> {
  const fake = await fakeTaskd(() => ({ body: "" }));
  fake.server.removeAllListeners("request");
  let nth = 0;
  fake.server.on("request", (request: IncomingMessage, response: ServerResponse) => {
    answer(request, response, nth);
    nth += 1;
  });
  return fake;
}

/** The JSON of a request. */
export async function bodyOf<T>(request: IncomingMessage): Promise<T> {
  let body = "";
  for await (const chunk of request) body += String(chunk);
  return JSON.parse(body) as T;
}

/** A way to a port that a test can cut, and open again. */
export class Cable {
  readonly url: string;
  readonly #server = createTcpServer();
  readonly #sockets = new Set<Socket>();
  readonly #to: URL;
  #isCut = false;
  /** How many connections it has had. */
  count = 0;

  private constructor(to: URL, port: number) {
    this.#to = to;
    this.url = `${to.protocol}//127.0.0.1:${String(port)}`;
    this.#server.on("connection", (near) => {
      if (this.#isCut) {
        near.destroy();
        return;
      }
      this.count += 1;
      const far = connect(Number(this.#to.port), this.#to.hostname);
      for (const [one, other] of [
        [near, far],
        [far, near],
      ] as const) {
        this.#sockets.add(one);
        one.pipe(other);
        one.on("error", () => other.destroy());
        one.on("close", () => {
          this.#sockets.delete(one);
          other.destroy();
        });
      }
    });
  }

  static async to(url: string, options: { isCut?: boolean } = {}): Promise<Cable> {
    const [port = 0] = await freePorts(1);
    const cable = new Cable(new URL(url), port);
    cable.#isCut = options.isCut ?? false;
    cable.#server.listen(port, "127.0.0.1");
    await once(cable.#server, "listening");
    return cable;
  }

  /** Breaks all connections, and takes no new ones. */
  cut(): void {
    this.#isCut = true;
    for (const socket of this.#sockets) socket.destroy();
  }

  /** Lets nothing through, and says nothing. */
  freeze(): void {
    for (const socket of this.#sockets) {
      socket.unpipe();
      socket.pause();
    }
  }

  mend(): void {
    this.#isCut = false;
  }

  async close(): Promise<void> {
    this.cut();
    await once(this.#server.close(), "close");
  }
}

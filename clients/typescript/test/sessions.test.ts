/** Sessions of workers that are killed, move to another process, or say nothing for a while. */

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import process from "node:process";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { Worker } from "@taskd/client";
import type { Logger, SourceHost } from "@taskd/client";
import { StreamSource } from "@taskd/client/stream";
import { Cable, Gate, SILENT, Taskd, allAre, silentEnds, until } from "./support.js";

const KILLER = fileURLToPath(new URL("child-killer.js", import.meta.url));
const CHILD_WAITS = fileURLToPath(new URL("child-waits.js", import.meta.url));

let taskd: Taskd;
/** Another process on the same Redis and database. */
let other: Taskd;
before(async () => {
  taskd = await Taskd.start();
  other = await Taskd.beside(taskd);
});
after(async () => {
  await other.stop();
  await taskd.stop();
});

/** A way to the first process; the worker goes on at the other one when it says nothing any more. */
async function moving(): Promise<{ cable: Cable; url: string[]; isBack: Gate; logger: Logger }> {
  const cable = await Cable.to(taskd.grpc);
  const isBack = new Gate();
  const info = (line: string): void => {
    if (line.includes("by a stream again")) isBack.open();
  };
  return { cable, url: [cable.url, other.grpc], isBack, logger: { ...SILENT, info } };
}

test("a task that kills its worker at once is dead at last", async () => {
  const { client, url, grpc } = taskd;
  await client.insert({ queue: "poison", key: "k", maxAttempts: 2 });
  for (const attempts of [1, 2]) {
    const child = spawn(process.execPath, [KILLER, url, grpc, "poison"], { stdio: "ignore" });
    assert.deepEqual(await once(child, "exit"), [null, "SIGKILL"]);
    await until(`attempt ${String(attempts)} has failed`, async () => {
      const [task] = (await client.listPage({ queue: "poison" })).tasks;
      return task?.attempts === attempts;
    });
  }
  await allAre(client, "poison", "DEAD", 1);
});

test("a stream that goes on at another process takes the tasks along", async (t) => {
  const { cable, url, isBack, logger } = await moving();
  t.after(async () => cable.close());
  const { id = "" } = await other.client.insert({ queue: "moves", key: "k" });
  const ends = await silentEnds(taskd.url);
  // The worker extends the lease after 3 s, at the other process, and then after 7 s. If the first process kept it, too,
  // it would do so after 4 s, and end it with the session after 5 s.
  const source = new StreamSource({ url, timeout: "5s" });
  const options = { url: other.url, queue: "moves", leaseDuration: "8s", logger, source };
  const gate = new Gate();
  const worker = new Worker({ ...options, signals: false }).handle(async (task) => {
    await gate.opened;
    return task.attempt;
  });
  const running = worker.run();
  await until("it has begun", () => worker.stats.running === 1);
  cable.freeze();
  await isBack.opened;
  await until("the first process has ended the session", async () => (await silentEnds(taskd.url)) > ends);
  gate.open();
  await allAre(other.client, "moves", "COMPLETED", 1);
  await worker.stop();
  await running;
  assert.equal(worker.stats.lost, 0);
  assert.deepEqual(
    (await other.client.results(id)).map(({ result }) => result),
    [1],
  );
});

test("another process learns at once what is in hand", async (t) => {
  const { cable, url, isBack, logger } = await moving();
  t.after(async () => cable.close());
  await other.client.insert({ queue: "learns", key: "k" });
  const source = new StreamSource({ url, timeout: "2s" });
  const gate = new Gate();
  const options = { queue: "learns", leaseDuration: "2m", logger, source };
  const worker = new Worker({ ...options, url: other.url, signals: false });
  const running = worker.handle(async () => gate.opened).run();
  await until("it has begun", () => worker.stats.running === 1);
  cable.freeze();
  await isBack.opened;
  const moved = performance.now();
  await until("the lease was extended by a call, and on the stream", () => worker.stats.extended >= 2);
  // The worker extends a lease every 40 s at other times.
  const took = performance.now() - moved;
  gate.open();
  await worker.stop();
  await running;
  assert.ok(took < 20_000, `${String(took)} ms`);
});

test("a lease that a handler asked for outlives the silence of its process", async () => {
  const { client, url, grpc } = taskd;
  const { id = "" } = await client.insert({ queue: "blocks", key: "k" });
  const ends = await silentEnds(url);
  const source = new StreamSource({ url: grpc, timeout: "2s" });
  const worker = new Worker({ url, queue: "blocks", logger: SILENT, signals: false, source });
  const running = worker
    .handle(async (task) => {
      if (task.attempt > 1) return task.attempt;
      await task.extend("10m");
      // Blocks until taskd has ended the session.
      execFileSync(process.execPath, [CHILD_WAITS, url, String(ends)]);
      return task.attempt;
    })
    .run();
  await allAre(client, "blocks", "COMPLETED", 1);
  await worker.stop();
  await running;
  assert.deepEqual(
    (await client.results(id)).map(({ result }) => result),
    [1],
  );
  assert.deepEqual([worker.stats.taken, worker.stats.lost], [1, 0]);
});

test("the clock of the worker does not lengthen a lease", async (t) => {
  const cable = await Cable.to(taskd.grpc);
  t.after(async () => cable.close());
  const lengths: string[] = [];
  const reading: typeof fetch = async (input, init) => {
    if ((input as string).endsWith(":extend")) {
      const { extensions } = JSON.parse(init?.body as string) as { extensions: { by: string }[] };
      lengths.push(...extensions.map(({ by }) => by));
    }
    return fetch(input, init);
  };
  const clock = Date.now.bind(Date);
  t.mock.method(Date, "now", () => clock() - 3_600_000);
  await taskd.client.insert({ queue: "skewed", key: "k" });
  const source = new StreamSource({ url: cable.url });
  const gate = new Gate();
  const options = { url: taskd.url, queue: "skewed", logger: SILENT, fetch: reading, source };
  const worker = new Worker({ ...options, signals: false }).handle(async () => gate.opened);
  const running = worker.run();
  await until("it has begun", () => worker.stats.running === 1);
  cable.cut();
  await until("the worker extends the lease by a call", () => lengths.length > 0);
  gate.open();
  await worker.stop();
  await running;
  assert.equal(lengths[0], "30000ms");
});

test("a task that the worker has not taken yet keeps its lease", async (t) => {
  const { client } = taskd;
  const source = new StreamSource({ url: taskd.grpc, timeout: "2s" });
  const host: SourceHost = {
    worker: "late",
    queues: ["late"],
    leaseDuration: 1500,
    token: undefined,
    client,
    logger: SILENT,
    holding: () => [],
    onEnded: () => undefined,
    onAlone: () => undefined,
    onArrived: () => undefined,
    onMoved: () => undefined,
  };
  const { id = "" } = await client.insert({ queue: "late", key: "k" });
  source.room(1);
  source.open(host);
  t.after(async () => source.close());
  const leaseEnd = async (): Promise<number> => {
    const [attempt] = (await client.getTask(id)).history;
    return attempt?.leaseExpiresAt?.getTime() ?? 0;
  };
  const first = await until("it is leased", async () => (await leaseEnd()) || undefined);
  await until("the lease is extended beyond its length", async () => (await leaseEnd()) > first + 2000);
  const request = { worker: "late", queues: ["late"], maxTasks: 1, wait: 0 };
  const tasks = await source.get({ ...request, wait: 1000 }, new AbortController().signal);
  assert.deepEqual(
    tasks.map(({ attempt }) => attempt),
    [1],
  );
});

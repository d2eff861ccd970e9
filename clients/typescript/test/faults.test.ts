/** Kills: taskd, a worker's process, and a polite stop of one. Each task counts once. */

import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { Worker } from "@taskd/client";
import { SILENT, Taskd, allAre, until } from "./support.js";

let taskd: Taskd;
before(async () => {
  // Short leases: those of killed processes end soon, and workers extend theirs often.
  taskd = await Taskd.start('[queues.default]\nlease = "2s"\nbackoff = ["50ms"]\nmax_attempts = 20\n');
});
after(async () => {
  await taskd.stop();
});

interface Child {
  process: ChildProcess;
  lines: string[];
}

function startChild(queue: string, name: string, until: "told" | "killed"): Child {
  const script = fileURLToPath(new URL("child-worker.js", import.meta.url));
  const child = spawn(process.execPath, [script, taskd.url, queue, name, until], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  const lines: string[] = [];
  createInterface({ input: child.stdout }).on("line", (line) => lines.push(line));
  return { process: child, lines };
}

const isBegun = (child: Child, count: number) => () =>
  child.lines.filter((line) => line.startsWith("begun")).length === count;

test("taskd is killed amid work, and each task counts once", async () => {
  const { client } = taskd;
  const tasks = Array.from({ length: 300 }, (_, n) => ({ queue: "killed", key: String(n) }));
  const answers = await client.insertBatch(tasks);
  const options = { url: taskd.url, queue: "killed", logger: SILENT, signals: false as const };
  const workers = ["a", "b"].map((name) =>
    new Worker({ ...options, name, concurrency: 5, reports: { maxItems: 3 } }).handle(async (task) => {
      await new Promise((resolve) => setTimeout(resolve, 5));
      return task.key;
    }),
  );
  const running = workers.map((worker) => worker.run());
  const completed = (): number => workers.reduce((sum, { stats }) => sum + stats.completed, 0);
  for (const least of [30, 120]) {
    await until(`${String(least)} tasks are done`, () => completed() >= least);
    await taskd.kill();
    await taskd.run();
  }
  await allAre(client, "killed", "COMPLETED", 300);
  await Promise.all(workers.map((worker) => worker.stop()));
  await Promise.all(running);
  for (const [n, { id = "" }] of answers.entries()) {
    const results = await client.results(id);
    assert.deepEqual(
      results.filter(({ surplus }) => !surplus).map(({ result }) => result),
      [String(n)],
    );
  }
});

test("a worker's process is killed amid work, and another does its tasks", async () => {
  const { client } = taskd;
  const answers = await client.insertBatch(["a", "b", "c"].map((key) => ({ queue: "orphans", key })));
  const child = startChild("orphans", "killed", "killed");
  await until("it has begun all three", isBegun(child, 3));
  child.process.kill("SIGKILL");
  await once(child.process, "exit");
  const worker = new Worker({ url: taskd.url, queue: "orphans", name: "heir", logger: SILENT, signals: false });
  const running = worker.handle((task) => task.attempt).run();
  await allAre(client, "orphans", "COMPLETED", 3);
  await worker.stop();
  await running;
  for (const { id = "" } of answers) {
    const [result] = await client.results(id);
    assert.deepEqual([result?.worker, result?.result], ["heir", 2]);
  }
});

test("SIGTERM: a process finishes what it has begun, and ends by itself", async () => {
  const { client } = taskd;
  await client.insertBatch(["a", "b", "c", "d"].map((key) => ({ queue: "drain", key })));
  const child = startChild("drain", "polite", "told");
  await until("it has begun three", isBegun(child, 3));
  child.process.kill("SIGTERM");
  await until("it has heard of it", () => child.lines.some((line) => line.startsWith("SIGTERM: waiting for 3")));
  const ended = once(child.process, "exit");
  child.process.stdin?.write("go\n");
  assert.deepEqual((await ended)[0], 0);
  assert.equal(child.lines.at(-1), "ended");
  await until("its three are completed", async () => {
    return (await client.listPage({ queue: "drain", status: "COMPLETED" })).tasks.length === 3;
  });
  const worker = new Worker({ url: taskd.url, queue: "drain", logger: SILENT, signals: false });
  const running = worker.handle(() => "the rest").run();
  await allAre(client, "drain", "COMPLETED", 4);
  await worker.stop();
  await running;
});

test("SIGINT twice: a process stops at once, and gives its tasks back", async () => {
  const { client } = taskd;
  await client.insert({ queue: "twice", key: "k" });
  const child = startChild("twice", "hasty", "killed");
  await until("it has begun", isBegun(child, 1));
  child.process.kill("SIGINT");
  await until("it has heard of it", () => child.lines.some((line) => line.startsWith("SIGINT")));
  const ended = once(child.process, "exit");
  child.process.kill("SIGINT");
  assert.deepEqual((await ended)[0], 0);
  const worker = new Worker({ url: taskd.url, queue: "twice", logger: SILENT, signals: false });
  const running = worker.handle(() => "done").run();
  const [task] = await allAre(client, "twice", "COMPLETED", 1);
  await worker.stop();
  await running;
  const { history } = await client.getTask(task?.id ?? "");
  assert.ok(history.some(({ reason }) => reason === "the worker stopped"));
});

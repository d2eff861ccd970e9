/** Reports while taskd, or a part of it, is away. */

import assert from "node:assert/strict";
import type { IncomingMessage, ServerResponse } from "node:http";
import { test } from "node:test";

import { ConnectionError, UnreportedError, Worker, type ItemAnswer, type Report } from "@taskd/client";
import { MockSource } from "@taskd/client/testing";
import { Gate, SILENT, bodyOf, rawServer, until } from "./support.js";

interface Completions {
  completions: { id: string }[];
}

/** A taskd that gives out tasks once, and takes completions as the test says. */
async function taskdOf(
  ids: readonly string[],
  take: (completions: string[]) => ItemAnswer[] | undefined,
): Promise<{ url: string; close: () => Promise<void> }> {
  const at = new Date(Date.now() + 3_600_000).toISOString();
  const tasks = ids.map((id) => ({ id, queue: "q", key: id, lease_token: id, lease_expires_at: at, attempt: 1 }));
  const complete = async (request: IncomingMessage, response: ServerResponse): Promise<void> => {
    const { completions } = await bodyOf<Completions>(request);
    const results = take(completions.map(({ id }) => id));
    if (results !== undefined) response.end(JSON.stringify({ results }));
    else response.writeHead(503).end('{"title":"Service Unavailable","status":503,"detail":"the shard is away"}');
  };
  let given = false;
  return rawServer((request, response) => {
    response.setHeader("content-type", "application/json");
    if (request.url === "/v1/tasks:complete") void complete(request, response);
    else if (request.url === "/v1/tasks:get" && !given) {
      given = true;
      response.end(JSON.stringify({ tasks }));
    }
  });
}

for (const answer of ["503", "TRY_LATER"]) {
  test(`a part of taskd that is away does not hold up the reports for others: ${answer}`, async (t) => {
    const others = ["a", "b", "c", "d", "e"];
    const done: string[] = [];
    let isAway = true;
    const fake = await taskdOf(["away", ...others], (ids) => {
      const isLater = (id: string): boolean => id === "away" && isAway;
      if (answer === "503" && ids.every(isLater)) return undefined;
      return ids.map((id) => {
        if (!isLater(id)) done.push(id);
        return { id, status: isLater(id) ? "TRY_LATER" : "OK" };
      });
    });
    t.after(async () => fake.close());
    const begun = new Gate();
    const options = { url: fake.url, queue: "q", reports: { maxItems: 1 }, logger: SILENT, signals: false as const };
    const worker = new Worker(options).handle(async (task) => {
      // Its report is the first one.
      if (task.key === "away") begun.open();
      else await begun.opened;
    });
    const running = worker.run();
    await until("all others are reported", () => done.length === others.length && worker.stats.unreported === 1);
    isAway = false;
    await until("all is reported", () => worker.stats.completed === 6);
    await worker.stop();
    await running;
    assert.deepEqual(done.sort(), [...others, "away"].sort());
  });
}

test("a stop while taskd is away ends with an error and a line of the log", async () => {
  class Away extends MockSource {
    override async complete(): Promise<ItemAnswer[]> {
      return Promise.reject(new ConnectionError("taskd is away"));
    }
  }
  const lines: string[] = [];
  const logger = { ...SILENT, error: (line: string) => lines.push(line) };
  const source = new Away([{}, {}]);
  const worker = new Worker({ queue: "test", source, drainTimeout: "50ms", logger, signals: false });
  const running = worker.handle(() => "done").run();
  await until("two reports wait", () => worker.stats.unreported === 2);
  await Promise.all([
    worker.stop(),
    assert.rejects(running, (error) => {
      assert.ok(error instanceof UnreportedError && error.reports === 2 && error.cause instanceof ConnectionError);
      assert.match(error.message, /^2 reports did not reach taskd; other workers do these tasks again: taskd is away$/);
      return true;
    }),
  ]);
  assert.deepEqual(lines, ["2 reports did not reach taskd; other workers do these tasks again: taskd is away"]);
});

test("reports go on when taskd is back, each once", async () => {
  let failures = 0;
  class Flapping extends MockSource {
    override async complete(worker: string, reports: readonly Report[]): Promise<ItemAnswer[]> {
      failures += 1;
      if (failures % 3 !== 0) throw new ConnectionError("broken");
      return super.complete(worker, reports);
    }
  }
  const source = new Flapping(Array.from({ length: 50 }, () => ({})));
  const reports = { maxItems: 10 };
  const worker = new Worker({ queue: "test", source, concurrency: 10, reports, logger: SILENT, signals: false });
  const running = worker.handle(() => "done").run();
  await source.settled();
  await worker.stop();
  await running;
  assert.equal(source.outcomes.length, 50);
  assert.deepEqual([worker.stats.completed, worker.stats.lost, worker.stats.unreported], [50, 0, 0]);
});

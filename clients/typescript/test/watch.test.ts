/** Watches on servers that the test writes: breaks, gaps, parts of events. */

import assert from "node:assert/strict";
import type { IncomingMessage, ServerResponse } from "node:http";
import { test } from "node:test";

import { Client, ConnectionError, InvalidAnswerError, NotFoundError, UnauthenticatedError } from "@taskd/client";
import type { QueueEvent, TaskEvent } from "@taskd/client";
import { freePorts, rawServer, until } from "./support.js";

const event = (id: string, status: string): string =>
  `id: ${id}\nevent: status\ndata: {"id":"1","queue":"q","status":"${status}","at":"2026-11-23T08:00:00.000Z"}\n\n`;
const END = 'event: end\ndata: {"reason":"STOPPING","detail":"this taskd stops"}\n\n';

interface Asked {
  path: string | undefined;
  last: string | undefined;
}

/** A taskd that answers each connection with texts, one after the other. The last one is repeated. */
async function taskdOf(
  ...texts: string[][]
): Promise<{ url: string; asked: Asked[]; open: () => number; close: () => Promise<void> }> {
  const asked: Asked[] = [];
  let open = 0;
  const answer = async (request: IncomingMessage, response: ServerResponse, parts: string[]): Promise<void> => {
    asked.push({ path: request.url, last: request.headers["last-event-id"] as string | undefined });
    open += 1;
    response.once("close", () => (open -= 1));
    response.writeHead(200, { "content-type": "text/event-stream" });
    for (const part of parts) {
      if (part === "STAY") return;
      if (part === "BREAK") response.destroy();
      else await new Promise((resolve) => response.write(part, resolve));
      // Each part comes by itself.
      await new Promise((resolve) => setTimeout(resolve, 2));
    }
    response.end();
  };
  const fake = await rawServer((request, response, nth) => {
    void answer(request, response, texts[Math.min(nth, texts.length - 1)] ?? []);
  });
  return { ...fake, asked, open: () => open };
}

async function seen(events: AsyncIterable<QueueEvent>, most = Infinity): Promise<string[]> {
  const all: string[] = [];
  for await (const event of events) {
    all.push(event.type === "gap" ? "gap" : `${event.eventId} ${event.status}`);
    if (all.length >= most) break;
  }
  return all;
}

test("a watch of a task goes on behind the last event, to the end of the task", async () => {
  const taskd = await taskdOf(
    [": beat\n\n", event("1-QUEUED", "QUEUED"), "id: 2-ASS", "BREAK"],
    [event("2-ASSIGNED", "ASSIGNED"), 'event: news\ndata: {"of": "a newer taskd"}\n\n', END],
    [event("3-DELAYED", "DELAYED") + event("4-COMPLETED", "COMPLETED") + event("5-never", "QUEUED"), "STAY"],
  );
  const events: TaskEvent[] = [];
  for await (const event of new Client({ url: taskd.url }).watchTask("a/b")) events.push(event);
  assert.deepEqual(
    events.map(({ eventId, status }) => `${eventId} ${status}`),
    ["1-QUEUED QUEUED", "2-ASSIGNED ASSIGNED", "3-DELAYED DELAYED", "4-COMPLETED COMPLETED"],
  );
  assert.deepEqual(events[0], {
    type: "status",
    eventId: "1-QUEUED",
    id: "1",
    queue: "q",
    status: "QUEUED",
    at: new Date("2026-11-23T08:00:00.000Z"),
  });
  assert.deepEqual(taskd.asked, [
    { path: "/v1/tasks/a%2Fb/events", last: undefined },
    { path: "/v1/tasks/a%2Fb/events", last: "1-QUEUED" },
    { path: "/v1/tasks/a%2Fb/events", last: "2-ASSIGNED" },
  ]);
  await until("the connection is closed", () => taskd.open() === 0);
  await taskd.close();
});

test("events are read however they are cut, and with any ends of lines", async () => {
  const text = `retry: 10\n\n: a comment\n\n${event("é-1", "QUEUED")}event: gap\ndata: {}\n\n${event("2", "DEAD")}`;
  const bytes = Buffer.from(text.replace('"queue":"q",', '"queue":"q",\ndata: ').replaceAll("\n", "\r\n"));
  const taskd = await rawServer((_, response) => {
    void (async () => {
      response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
      for (const byte of bytes) {
        await new Promise((resolve) => response.write(Uint8Array.of(byte), resolve));
        await new Promise((resolve) => setImmediate(resolve));
      }
    })();
  });
  const events = await seen(new Client({ url: taskd.url }).watchQueue("q"), 3);
  assert.deepEqual(events, ["é-1 QUEUED", "gap", "2 DEAD"]);
  await taskd.close();
});

test("a queue whose watch broke before its first event has a gap", async () => {
  const taskd = await taskdOf([": beat\n\n", "BREAK"], [event("1", "QUEUED"), END], [event("2", "DEAD"), "STAY"]);
  const events = await seen(new Client({ url: taskd.url }).watchQueue("a&b"), 3);
  assert.deepEqual(events, ["gap", "1 QUEUED", "2 DEAD"]);
  assert.deepEqual(
    taskd.asked.map(({ path, last }) => [path, last]),
    [
      ["/v1/events?queue=a%26b", undefined],
      ["/v1/events?queue=a%26b", undefined],
      ["/v1/events?queue=a%26b", "1"],
    ],
  );
  await taskd.close();
});

test("a watch that begins behind the end of a task has no events", async () => {
  const last: unknown[] = [];
  const taskd = await rawServer((request, response) => {
    last.push(request.headers["last-event-id"]);
    response.writeHead(204).end();
  });
  const client = new Client({ url: taskd.url });
  assert.deepEqual(await seen(client.watchTask("1", { lastEventId: "9-COMPLETED" })), []);
  assert.deepEqual(last, ["9-COMPLETED"]);
  await taskd.close();
});

test("a watch gives up after retryFor, and at once if taskd refuses it", async () => {
  const [nobody] = await freePorts(1);
  const away = new Client({ url: `http://127.0.0.1:${String(nobody)}`, retryFor: "300ms" });
  await assert.rejects(seen(away.watchTask("1")), ConnectionError);
  // A server that takes calls and says nothing is not there, either.
  const silent = await taskdOf([]);
  await assert.rejects(seen(new Client({ url: silent.url, retryFor: "300ms" }).watchQueue("q")), ConnectionError);
  await silent.close();
  const page = await rawServer((_, response) => {
    response.writeHead(200, { "content-type": "text/html" }).end("<html>");
  });
  const other = new Client({ url: page.url, retryFor: "300ms" });
  await assert.rejects(seen(other.watchTask("1")), InvalidAnswerError);
  await page.close();
  for (const [status, problem] of [
    [404, NotFoundError],
    [401, UnauthenticatedError],
  ] as const) {
    const refusing = await rawServer((_, response) => {
      response.writeHead(status).end(JSON.stringify({ title: "no", status, detail: "no" }));
    });
    await assert.rejects(seen(new Client({ url: refusing.url }).watchTask("1")), problem);
    await refusing.close();
  }
  const garbage = await taskdOf(["id: 1\nevent: status\ndata: <html>\n\n"]);
  await assert.rejects(seen(new Client({ url: garbage.url, retryFor: 0 }).watchTask("1")), InvalidAnswerError);
  await garbage.close();
  const endless = await taskdOf([
    "data: ",
    ..."x"
      .repeat(40)
      .split("")
      .map(() => "x".repeat(30_000)),
    "STAY",
  ]);
  await assert.rejects(seen(new Client({ url: endless.url, retryFor: 0 }).watchTask("1")), /an event is too large/);
  await endless.close();
});

test("a watch goes on at another address", async () => {
  const [nobody] = await freePorts(1);
  const one = await taskdOf([event("1", "QUEUED"), END]);
  const two = await taskdOf([event("2", "COMPLETED"), "STAY"]);
  const client = new Client({ url: [`http://127.0.0.1:${String(nobody)}`, one.url, two.url] });
  assert.deepEqual(await seen(client.watchTask("1")), ["1 QUEUED", "2 COMPLETED"]);
  assert.equal(two.asked[0]?.last, "1");
  await one.close();
  await two.close();
});

test("an abort ends a watch with its reason, and a break closes the connection", async () => {
  const taskd = await taskdOf([event("1", "QUEUED"), "STAY"]);
  const client = new Client({ url: taskd.url });
  const abort = new AbortController();
  const all = client.watchQueue("q", { signal: abort.signal });
  assert.equal((await all.next()).done, false);
  const next = all.next();
  abort.abort(new RangeError("enough"));
  await assert.rejects(next, /enough/);
  assert.deepEqual(await seen(client.watchQueue("q"), 1), ["1 QUEUED"]);
  await until("both connections are closed", () => taskd.open() === 0);
  await taskd.close();
});

/** The example `examples/link-checker` as its user starts it, on a small site. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { Taskd, freePorts } from "./support.js";

test("the link checker finds the broken links of a site", async () => {
  const [nobody] = await freePorts(1);
  const pages: Record<string, string> = {
    "/": '<a href="a.html">a</a> <a class="x" href="/gone.html">gone</a> <a href="mailto:a@b">mail</a>',
    "/a.html": `<a href='/#top'>back</a> <a href="b.html#x">b</a> <a href="http://127.0.0.1:${String(nobody)}/">no</a>`,
    "/b.html": '<a href="a.html">a</a>',
  };
  const asked: string[] = [];
  const site = createServer((request, response) => {
    asked.push(request.url ?? "");
    const page = pages[request.url ?? ""];
    response.writeHead(page === undefined ? 404 : 200, { "content-type": "text/html; charset=utf-8" }).end(page);
  }).listen(0, "127.0.0.1");
  await once(site, "listening");
  const start = `http://127.0.0.1:${String((site.address() as AddressInfo).port)}/`;
  const taskd = await Taskd.start();
  try {
    const script = fileURLToPath(new URL("../example/link-checker.js", import.meta.url));
    const { code, stdout } = await new Promise<{ code: unknown; stdout: string }>((resolve) => {
      execFile(process.execPath, [script, start, taskd.url, "links"], (error, stdout) => {
        resolve({ code: error?.code ?? 0, stdout });
      });
    });
    assert.match(stdout, new RegExp(`broken: ${start}gone\\.html \\(404, linked from ${start}\\)`));
    assert.match(stdout, new RegExp(`broken: http://127\\.0\\.0\\.1:${String(nobody)}/ \\(.*does not answer`));
    assert.match(stdout, /5 links, 2 broken; queue links\n$/);
    assert.equal(code, 1);
    assert.deepEqual(asked.sort(), ["/", "/a.html", "/b.html", "/gone.html"]);
  } finally {
    await taskd.stop();
    site.closeAllConnections();
    await once(site.close(), "close");
  }
});

test("the link checker ends after a signal, and says what is left", async () => {
  // The site does not answer, so the work has no end.
  const site = createServer(() => undefined).listen(0, "127.0.0.1");
  await once(site, "listening");
  const start = `http://127.0.0.1:${String((site.address() as AddressInfo).port)}/`;
  const taskd = await Taskd.start();
  try {
    const script = fileURLToPath(new URL("../example/link-checker.js", import.meta.url));
    const ended = new Promise<string>((resolve) => {
      const child = execFile(process.execPath, [script, start, taskd.url, "left"], (_, stdout) => {
        resolve(stdout);
      });
      site.once("request", () => {
        child.kill("SIGTERM");
        // The first signal waits for the handler.
        setTimeout(() => child.kill("SIGTERM"), 200);
      });
    });
    assert.match(await ended, /\n1 links are not checked yet\n0 links, 0 broken; queue left\n$/);
  } finally {
    await taskd.stop();
    site.closeAllConnections();
    await once(site.close(), "close");
  }
});

/**
 * Checks the links of a site: a task is a URL, and what it discovers are the links of its page.
 *
 *     npm --prefix ../../clients/typescript ci && npm install
 *     node link-checker.ts http://127.0.0.1:8000/ http://127.0.0.1:7600
 *
 * Node 22.18 and newer run it as it is. Start it several times with the same third argument, the name of a queue: the
 * processes share the work.
 */

import { Retry, Worker } from "@taskd/client";

interface Link {
  /** The page that has the link. */
  from: string;
}

interface Checked extends Link {
  status: number;
}

const [, , start, taskd = "http://127.0.0.1:7600", queue = `links-${Date.now().toString(36)}`] = process.argv;
if (start === undefined || !URL.canParse(start)) {
  console.error("usage: node link-checker.ts URL-OF-A-SITE [URL-OF-TASKD [QUEUE]]");
  process.exit(2);
}
const site = new URL(".", start).href;

const worker = new Worker({ url: taskd, queue, concurrency: 20, taskTimeout: "20s" });

worker.handle<Link>(async (task): Promise<Checked> => {
  const { key: url, payload, signal } = task;
  let page: Response;
  try {
    page = await fetch(url, { signal });
  } catch (error) {
    throw new Retry(`${url} does not answer (linked from ${payload.from})`, { cause: error });
  }
  if (page.status === 429 || page.status >= 500) {
    throw new Retry(`${url}: ${String(page.status)}`, { after: "1s" });
  }
  // Links to other sites are checked and not followed.
  if (page.ok && page.url.startsWith(site) && page.headers.get("content-type")?.startsWith("text/html") === true) {
    for (const link of linksOf(await page.text(), page.url)) {
      task.discover({ key: link, payload: { from: url }, maxAttempts: 2 });
    }
  } else {
    await page.body?.cancel();
  }
  return { status: page.status, from: payload.from };
});

function linksOf(html: string, base: string): Set<string> {
  const links = new Set<string>();
  for (const [, link = ""] of html.matchAll(/<a\s[^>]*?href\s*=\s*["']([^"']+)["']/gi)) {
    const url = URL.canParse(link, base) ? new URL(link, base) : undefined;
    if (url === undefined || !url.protocol.startsWith("http")) continue;
    url.hash = "";
    links.add(url.href);
  }
  return links;
}

const { client } = worker;
await client.insert({ queue, key: start, payload: { from: "the command line" } });
// A signal ends the worker, too; then there are tasks left.
const ended = new AbortController();
const running = worker.run().finally(() => {
  ended.abort();
});
// taskd answers when no link is left, or after half a minute; then the question is asked again.
const drained = new URL(`/v1/queues/${queue}?wait=drained`, taskd);
while (!ended.signal.aborted) {
  const answer = await fetch(drained, { signal: ended.signal }).catch(() => undefined);
  if (answer?.ok === true && ((await answer.json()) as { drained: boolean }).drained) break;
  // taskd is away for a moment.
  if (answer?.ok !== true) await new Promise((resolve) => setTimeout(resolve, 500));
}
await worker.stop();
await running;

let [links, broken, left] = [0, 0, 0];
for await (const { id, key, status, reason = "" } of client.listTasks({ queue })) {
  if (!["COMPLETED", "DEAD", "CANCELLED"].includes(status)) {
    left += 1;
    continue;
  }
  links += 1;
  const [checked] = await client.results<Checked>(id);
  if (status === "COMPLETED" && checked !== undefined && checked.result.status < 400) continue;
  broken += 1;
  const why = checked === undefined ? reason : `${String(checked.result.status)}, linked from ${checked.result.from}`;
  console.log(`broken: ${key} (${why})`);
}
// Another start with the same queue goes on with these.
if (left > 0) console.log(`${String(left)} links are not checked yet`);
console.log(`${String(links)} links, ${String(broken)} broken; queue ${queue}`);
process.exitCode = broken > 0 ? 1 : 0;

/** The package as its users get it: packed, unpacked into another project, imported with its types. */

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { promisify } from "node:util";

const run = promisify(execFile);
const ROOT = new URL("../..", import.meta.url).pathname;

test("the packed package works in a project of its own, and has its types", async () => {
  const folder = await mkdtemp(join(tmpdir(), "ts-pack-"));
  try {
    const { stdout } = await run("npm", ["pack", "--ignore-scripts", "--json", "--pack-destination", folder], {
      cwd: ROOT,
    });
    const [packed] = JSON.parse(stdout) as { filename: string; files: { path: string }[] }[];
    assert.ok(
      packed?.files.every(({ path }) =>
        /^(dist|proto|src)\/|^(package\.json|README\.md|LICENSE-(APACHE|MIT))$/.test(path),
      ),
    );
    const modules = join(folder, "node_modules", "@taskd", "client");
    await mkdir(modules, { recursive: true });
    await run("tar", ["-xzf", join(folder, packed?.filename ?? ""), "-C", modules, "--strip-components=1"]);
    await writeFile(join(folder, "package.json"), '{"type":"module"}');
    // The worker of README.md and docs/workers.md with the type of its payload, with the types of the package and those
    // of browsers only. tests/it/docs.rs runs it as it stands.
    const readme = await readFile(join(ROOT, "README.md"), "utf8");
    const worker =
      /```js\n(import [\s\S]*?worker\.run\(\);\n)```/.exec(readme)?.[1] ?? assert.fail("no worker in README.md");
    const typed = /`worker\.handle(<.*>)`/.exec(readme)?.[1] ?? assert.fail("no typed handler in README.md");
    await writeFile(join(folder, "worker.ts"), worker.replace("worker.handle(", `worker.handle${typed}(`));
    const tsc = join(ROOT, "node_modules", "typescript", "bin", "tsc");
    const options = ["--strict", "--noEmit", "--module", "nodenext", "--target", "es2022", "--lib", "es2023,dom"];
    await run(process.execPath, [tsc, ...options, "worker.ts"], { cwd: folder });
    const script =
      'import { runHandler } from "@taskd/client/testing"; console.log((await runHandler(() => 1)).result)';
    assert.equal((await run(process.execPath, ["--input-type=module", "-e", script], { cwd: folder })).stdout, "1\n");
  } finally {
    await rm(folder, { recursive: true });
  }
});
